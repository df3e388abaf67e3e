"""Parser for the HLO text of a compiled program: its computations, and how often each instruction runs."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

CALLS = ("call", "call-start", "async-start", "conditional")
BITS = {"pred": 8, "token": 0, "opaque": 0}  # other names contain their width: f32, bf16, s4, c64, f8e4m3fn


@dataclasses.dataclass(frozen=True)
class HloArray:
    """The dtype and dims of an array; `in_main_memory` is false in an on-chip memory space (VMEM, SMEM)."""

    dtype: str
    dims: tuple[int, ...]
    in_main_memory: bool

    @property
    def bytes(self) -> int:
        """Size in bytes, without the padding of the layout."""
        if self.dtype in BITS:
            return math.prod(self.dims) * BITS[self.dtype] // 8
        width = re.search(r"\d+", self.dtype)
        assert width, self.dtype
        return math.prod(self.dims) * int(width[0]) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    arrays: tuple[HloArray, ...]  # of the result; several for a tuple
    operands: tuple[str, ...]  # names; the value of a constant, or the number of a parameter
    attributes: str
    is_root: bool

    def attribute(self, key: str) -> str | None:
        """Return the value of `key=value` up to the next comma, or the content of its braces; None if it is absent."""
        match = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|([^,\s]+))", self.attributes)
        return None if match is None else match[1] if match[1] is not None else match[2]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled module: computations by name, each a dict of instructions by name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    devices: int
    text: str

    @property
    def aliased_outputs(self) -> int:
        """Number of outputs that reuse the memory of an argument."""
        header = self.text.partition("\n")[0]
        start = header.find("input_output_alias={")
        return 0 if start < 0 else len(re.findall(r"\((\d+), \{[^}]*\}", _until_closed(header[start:], "{", "}")))


def parse_hlo(text: str) -> Program:
    """Parse the text that `compiled.as_text()` returns."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        opened = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if opened:
            current = computations[opened[2]] = {}
            entry = opened[2] if opened[1] else entry
        elif line == "}":  # longer lines close a multi-line attribute, such as that of a Pallas kernel
            current = None
        elif current is not None:
            instruction = _parse_instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])]
    assert entry, "no ENTRY computation in the compiled text"
    return Program(computations, entry, math.prod(counts), text)


def loop_trip_counts(program: Program) -> list[int | None]:
    """Return the trip count of each loop that runs, outer loops first; None where the text does not state it."""
    whiles = [(caller, i) for caller, _, i, times in executed_instructions(program) if i.opcode == "while" and times]
    return [_trip_count(program, caller, instruction) for caller, instruction in whiles]


# --- The text ---------------------------------------------------------------------------------------------------------


def _parse_instruction(line: str) -> Instruction | None:
    """Parse one line of a computation; return None if it is not an instruction."""
    match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if match is None:
        return None
    rest = line[match.end() :]
    shape = _until_closed(rest, "(", ")") if rest.startswith("(") else rest.partition(" ")[0]
    called = rest[len(shape) :].lstrip()
    opcode = called.partition("(")[0]
    inside = _until_closed(called[len(opcode) :], "(", ")")
    attributes = called[len(opcode) + len(inside) :]
    if opcode in ("constant", "parameter"):
        operands = (inside[1:-1],)
    else:
        operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(re.findall(r"([A-Za-z_][\w.\-]*)", inside))
    return Instruction(match[2], opcode, _parse_arrays(shape), operands, attributes, bool(match[1]))


def _until_closed(text: str, opening: str, closing: str) -> str:
    """Return `text` up to the bracket that closes its first opening bracket."""
    depth = 0
    for bracket in re.finditer(rf"[{re.escape(opening)}{re.escape(closing)}]", text):
        depth += 1 if bracket[0] == opening else -1
        if depth == 0:
            return text[: bracket.end()]
    raise AssertionError(f"unbalanced brackets in the compiled text: {text[:80]}")


@functools.lru_cache(maxsize=4096)
def _parse_arrays(text: str) -> tuple[HloArray, ...]:
    """Parse a shape such as `(f32[2,3]{1,0}, s32[])`."""
    matches = re.findall(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?", text)
    return tuple(
        HloArray(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), not re.search(r"S\([1-9]", layout))
        for dtype, dims, layout in matches
    )


def result_arrays(computation: dict[str, Instruction], name: str) -> tuple[HloArray, ...]:
    """Return the result arrays of the instruction `name`, or () if the computation does not contain it."""
    return computation[name].arrays if name in computation else ()


# --- Executed instructions and trip counts ----------------------------------------------------------------------------


def executed_instructions(
    program: Program, name: str | None = None, times: int = 1, caller: str | None = None
) -> Iterator[tuple[str, str, Instruction, int]]:
    """Yield each instruction that can run, with the number of times that it runs.

    The shortest branch of a conditional counts as executed and the instructions of the others run 0 times, so that sums
    are lower bounds. For example, the exchange of tokens between experts has further rounds in a branch that a balanced
    router does not need.

    Args:
        program: The compiled program.
        name: The computation to start from; the entry computation by default.
        times: How often that computation runs.
        caller: The computation that contains the fusion, if `name` is the computation of a fusion.

    Yields:
        (nearest enclosing computation that is not a fusion's, computation, instruction, times).
    """
    name = name or program.entry
    caller = caller or name
    for instruction in program.computations[name].values():
        yield caller, name, instruction, times
        if instruction.opcode == "while":
            body = computation_name(instruction.attribute("body"))
            yield from executed_instructions(program, body, times * (_trip_count(program, name, instruction) or 1))
        elif instruction.opcode == "fusion":
            yield from executed_instructions(program, computation_name(instruction.attribute("calls")), times, caller)
        elif instruction.opcode in CALLS:
            branches = instruction.attribute("branch_computations") or ""
            keys = ("to_apply", "calls", "true_computation", "false_computation")
            names = [*branches.split(","), *[instruction.attribute(key) or "" for key in keys]]
            called = [callee for callee in map(computation_name, names) if callee]
            shortest = min(called, key=lambda callee: _instruction_count(program, callee)) if len(called) > 1 else None
            for callee in called:
                yield from executed_instructions(program, callee, times if shortest in (None, callee) else 0)


def _instruction_count(program: Program, name: str) -> int:
    """Return the number of instructions that a computation executes."""
    return sum(times for _, _, _, times in executed_instructions(program, name))


def computation_name(name: str | None) -> str:
    """Return the name of a computation as an attribute gives it, without whitespace and `%`."""
    return (name or "").strip().lstrip("%")


def _trip_count(program: Program, caller: str, loop: Instruction) -> int | None:
    """Return the trip count that XLA states, or that of a loop `i < constant` whose `i` grows by a constant."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = program.computations[computation_name(loop.attribute("condition"))]
    compare = next(i for i in condition.values() if i.is_root)
    if compare.opcode != "compare" or compare.attribute("direction") != "LT":
        return None
    counter, limit = condition.get(compare.operands[0]), _constant(condition, compare.operands[1])
    if counter is None or counter.opcode != "get-tuple-element" or limit is None:
        return None
    index, before = int(counter.attribute("index") or 0), program.computations[caller]
    body = program.computations[computation_name(loop.attribute("body"))]
    first = _constant(before, _tuple_element(before.get(loop.operands[0]), index))
    after = body.get(_tuple_element(next(i for i in body.values() if i.is_root), index))
    if first is None or after is None or after.opcode != "add":
        return None
    steps = [step for step in (_constant(body, name) for name in after.operands) if step is not None]
    # XLA for TPU unrolls the loops of collective matrix products by two: their counter grows by 2.
    return max(-(-(limit - first) // steps[0]), 0) if len(steps) == 1 and steps[0] > 0 else None


def _tuple_element(instruction: Instruction | None, index: int) -> str:
    """Return the name of an element of a tuple, or "" if the instruction does not make a tuple."""
    return instruction.operands[index] if instruction is not None and instruction.opcode == "tuple" else ""


def _constant(computation: dict[str, Instruction], name: str) -> int | None:
    """Return the value of a scalar that is a constant or a copy of one, else None."""
    scalar = computation.get(name)
    while scalar is not None and scalar.opcode == "copy":
        scalar = computation.get(scalar.operands[0])
    return int(scalar.operands[0]) if scalar is not None and scalar.opcode == "constant" else None
