"""XLA's text of a compiled program, read: its computations, and how often each instruction runs."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

CALLS = ("call", "call-start", "async-start", "conditional")
BITS = {"pred": 8, "token": 0, "opaque": 0}  # of the others the name tells: f32, bf16, s4, c64, f8e4m3fn


@dataclasses.dataclass(frozen=True)
class HloArray:
    """An array of a shape in the text; `in_main_memory` is false in a memory space on the chip (VMEM, SMEM)."""

    dtype: str
    dims: tuple[int, ...]
    in_main_memory: bool

    @property
    def bytes(self) -> int:
        """Size without the padding of its layout."""
        if self.dtype in BITS:
            return math.prod(self.dims) * BITS[self.dtype] // 8
        width = re.search(r"\d+", self.dtype)
        assert width, self.dtype
        return math.prod(self.dims) * int(width[0]) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[HloArray, ...]  # of the result; several of a tuple
    operands: tuple[str, ...]  # names; of a constant its value, of a parameter its number
    attributes: str
    is_root: bool

    def attribute(self, key: str) -> str | None:
        """The value of `key=value` up to the next comma, or what its braces hold."""
        found = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|([^,\s]+))", self.attributes)
        return None if found is None else found[1] if found[1] is not None else found[2]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled module: its computations by name, each a dict of instructions by name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    devices: int
    header: str

    @property
    def aliased_outputs(self) -> int:
        """Outputs that take over an argument's memory."""
        start = self.header.find("input_output_alias={")
        return 0 if start < 0 else len(re.findall(r"\((\d+), \{[^}]*\}", _until_closed(self.header[start:], "{", "}")))


def parse_hlo(text: str) -> Program:
    """The program of `compiled.as_text()`."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        opened = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if opened:
            current = computations[opened[2]] = {}
            entry = opened[2] if opened[1] else entry
        elif line == "}":  # more than that ends an attribute of several lines, as Pallas' kernels have
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    header = text.partition("\n")[0]
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)]
    assert entry, "no ENTRY computation in the compiled text"
    return Program(computations, entry, math.prod(counts), header)


def loop_trip_counts(program: Program) -> list[int | None]:
    """The trips of every loop that runs, outer ones first; None where the text does not tell."""
    whiles = [(home, i) for home, _, i, times in executed_instructions(program) if i.opcode == "while" and times]
    return [_trips(program, home, instruction) for home, instruction in whiles]


# --- The text ---------------------------------------------------------------------------------------------------------


def _instruction(line: str) -> Instruction | None:
    named = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if named is None:
        return None
    rest = line[named.end() :]
    shape = _until_closed(rest, "(", ")") if rest.startswith("(") else rest.partition(" ")[0]
    called = rest[len(shape) :].lstrip()
    opcode = called.partition("(")[0]
    inside = _until_closed(called[len(opcode) :], "(", ")")
    attributes = called[len(opcode) + len(inside) :]
    if opcode in ("constant", "parameter"):
        operands = (inside[1:-1],)
    else:
        operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(re.findall(r"([A-Za-z_][\w.\-]*)", inside))
    return Instruction(named[2], opcode, _shapes(shape), operands, attributes, bool(named[1]))


def _until_closed(text: str, opening: str, closing: str) -> str:
    """The beginning of `text` up to where its first bracket is closed."""
    depth = 0
    for found in re.finditer(rf"[{re.escape(opening)}{re.escape(closing)}]", text):
        depth += 1 if found[0] == opening else -1
        if depth == 0:
            return text[: found.end()]
    raise AssertionError(f"an open bracket in the compiled text: {text[:80]}")


@functools.lru_cache(maxsize=4096)
def _shapes(text: str) -> tuple[HloArray, ...]:
    found = re.findall(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?", text)
    return tuple(
        HloArray(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), not re.search(r"S\([1-9]", layout))
        for dtype, dims, layout in found
    )


def result_arrays(computation: dict[str, Instruction], name: str) -> tuple[HloArray, ...]:
    """What the instruction of that name results in."""
    return computation[name].arrays if name in computation else ()


# --- What runs, and how often -----------------------------------------------------------------------------------------


def executed_instructions(
    program: Program, name: str | None = None, times: int = 1, home: str | None = None
) -> Iterator[tuple[str, str, Instruction, int]]:
    """(computation that is not a fusion's, computation, instruction, times) of all that can run.

    Of a condition the shortest branch runs, and what is in the others runs 0 times: what is counted is the least that
    the program does. The exchange of experts has its further rounds behind one, which a balanced router does not need.
    """
    name = name or program.entry
    home = home or name
    for instruction in program.computations[name].values():
        yield home, name, instruction, times
        if instruction.opcode == "while":
            body = computation_name(instruction.attribute("body"))
            yield from executed_instructions(program, body, times * (_trips(program, name, instruction) or 1))
        elif instruction.opcode == "fusion":
            yield from executed_instructions(program, computation_name(instruction.attribute("calls")), times, home)
        elif instruction.opcode in CALLS:
            listed = instruction.attribute("branch_computations") or ""
            keys = ("to_apply", "calls", "true_computation", "false_computation")
            named = [*listed.split(","), *[instruction.attribute(key) or "" for key in keys]]
            called = [callee for callee in map(computation_name, named) if callee]
            shortest = min(called, key=lambda callee: _length(program, callee)) if len(called) > 1 else None
            for callee in called:
                yield from executed_instructions(program, callee, times if shortest in (None, callee) else 0)


def _length(program: Program, name: str) -> int:
    """Instructions that a computation runs."""
    return sum(times for _, _, _, times in executed_instructions(program, name))


def computation_name(name: str | None) -> str:
    """The computation that an attribute names."""
    return (name or "").strip().lstrip("%")


def _trips(program: Program, home: str, loop: Instruction) -> int | None:
    """How often a loop runs: as XLA notes it, or from `i < constant` of an `i` that goes up by a constant."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if noted:
        return int(noted[1])
    condition = program.computations[computation_name(loop.attribute("condition"))]
    compare = next(i for i in condition.values() if i.is_root)
    if compare.opcode != "compare" or compare.attribute("direction") != "LT":
        return None
    counter, limit = condition.get(compare.operands[0]), _constant(condition, compare.operands[1])
    if counter is None or counter.opcode != "get-tuple-element" or limit is None:
        return None
    index, before = int(counter.attribute("index") or 0), program.computations[home]
    body = program.computations[computation_name(loop.attribute("body"))]
    first = _constant(before, _element(before.get(loop.operands[0]), index))
    after = body.get(_element(next(i for i in body.values() if i.is_root), index))
    if first is None or after is None or after.opcode != "add":
        return None
    steps = [step for step in (_constant(body, name) for name in after.operands) if step is not None]
    # XLA for TPU unrolls the loops that it turns a product and its collective into: they go up by twos.
    return max(-(-(limit - first) // steps[0]), 0) if len(steps) == 1 and steps[0] > 0 else None


def _element(made: Instruction | None, index: int) -> str:
    return made.operands[index] if made is not None and made.opcode == "tuple" else ""


def _constant(computation: dict[str, Instruction], name: str) -> int | None:
    """The value of a scalar that is a constant, or a copy of one."""
    found = computation.get(name)
    while found is not None and found.opcode == "copy":
        found = computation.get(found.operands[0])
    return int(found.operands[0]) if found is not None and found.opcode == "constant" else None
