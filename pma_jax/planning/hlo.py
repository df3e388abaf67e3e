"""Parser for the HLO text of a compiled program: its computations, and how often each instruction runs."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

CALL_OPCODES = ("call", "call-start", "async-start", "conditional")
BITS_BY_DTYPE = {"pred": 8, "token": 0, "opaque": 0}  # other names contain their width: f32, bf16, s4, c64, f8e4m3fn


@dataclasses.dataclass(frozen=True)
class HloArray:
    """The shape of one array."""

    dtype: str
    dims: tuple[int, ...]
    in_main_memory: bool  # false in every memory space but the default (HBM), for example in VMEM and SMEM

    @property
    def bytes(self) -> int:
        """Size in bytes, without the padding of the layout."""
        if self.dtype in BITS_BY_DTYPE:
            return math.prod(self.dims) * BITS_BY_DTYPE[self.dtype] // 8
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

    def callees(self, *keys: str) -> list[str]:
        """Return the names of the computations in the attributes `keys`, without `%`; absent attributes have none."""
        return re.findall(r"[\w.\-]+", " ".join(self.attribute(key) or "" for key in keys))

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
    def aliased_output_count(self) -> int:
        """Number of outputs that reuse the memory of an argument."""
        header = self.text.partition("\n")[0]
        start = header.find("input_output_alias={")
        return 0 if start < 0 else len(re.findall(r"\((\d+), \{[^}]*\}", _balanced_prefix(header[start:], "{", "}")))


def parse_hlo(text: str) -> Program:
    """Parse the text that `compiled.as_text()` returns."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif line == "}":  # `}` followed by more text ends a multi-line attribute, such as a Pallas kernel's
            current = None
        elif current is not None:
            instruction = _parse_instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])]
    assert entry, "no ENTRY computation in the compiled text"
    return Program(computations, entry, math.prod(counts), text)


def loop_trip_counts(program: Program) -> list[int | None]:
    """Return the trip count of each loop that runs, outer loops first; None where it is unknown."""
    loops = [e for e in walk_instructions(program) if e.instruction.opcode == "while" and e.times]
    return [_trip_count(program, loop.computation, loop.instruction) for loop in loops]


# --- The text ---------------------------------------------------------------------------------------------------------


def _parse_instruction(line: str) -> Instruction | None:
    """Parse one line of a computation; return None if it is not an instruction."""
    match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if match is None:
        return None
    rest = line[match.end() :]
    shape = _balanced_prefix(rest, "(", ")") if rest.startswith("(") else rest.partition(" ")[0]
    call = rest[len(shape) :].lstrip()
    opcode = call.partition("(")[0]
    inside = _balanced_prefix(call[len(opcode) :], "(", ")")
    attributes = call[len(opcode) + len(inside) :]
    if opcode in ("constant", "parameter"):
        operands = (inside[1:-1],)
    else:
        operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(re.findall(r"([A-Za-z_][\w.\-]*)", inside))
    return Instruction(match[2], opcode, _parse_arrays(shape), operands, attributes, bool(match[1]))


def _balanced_prefix(text: str, opening: str, closing: str) -> str:
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


def operand_arrays(computation: dict[str, Instruction], operand: str) -> tuple[HloArray, ...]:
    """Return the arrays of an operand, given by name, or () if the computation contains no instruction of that name."""
    return computation[operand].arrays if operand in computation else ()


# --- Executed instructions and trip counts ----------------------------------------------------------------------------


class Execution(NamedTuple):
    """An instruction of a program, and how often it runs."""

    scope: str  # the nearest enclosing computation that is not a fusion
    computation: str  # the computation that contains the instruction
    instruction: Instruction
    times: int


def walk_instructions(program: Program) -> Iterator[Execution]:
    """Yield every instruction that can be reached from the entry, with its execution count.

    Counts are lower bounds: of a conditional, only the branch that executes the fewest instructions is counted (the
    other branches are yielded with count 0), and a loop with an unknown trip count is counted once. For example, the
    all-to-all between experts repeats in a branch that is skipped when the router is balanced.
    """
    return _walk(program, program.entry, program.entry, 1)


def _walk(program: Program, scope: str, computation: str, times: int) -> Iterator[Execution]:
    for instruction in program.computations[computation].values():
        yield Execution(scope, computation, instruction, times)
        if instruction.opcode == "while":
            body, trips = instruction.callees("body")[0], _trip_count(program, computation, instruction)
            yield from _walk(program, body, body, times * (trips or 1))
        elif instruction.opcode == "fusion":
            yield from _walk(program, scope, instruction.callees("calls")[0], times)
        elif instruction.opcode in CALL_OPCODES:
            keys = ("branch_computations", "to_apply", "calls", "true_computation", "false_computation")
            called = instruction.callees(*keys)
            shortest = min(called, key=lambda callee: _execution_count(program, callee)) if len(called) > 1 else None
            for callee in called:
                yield from _walk(program, callee, callee, times if shortest in (None, callee) else 0)


def _execution_count(program: Program, computation: str) -> int:
    """Return the number of instructions that a computation executes."""
    return sum(execution.times for execution in _walk(program, computation, computation, 1))


def _trip_count(program: Program, parent: str, loop: Instruction) -> int | None:
    """Return the trip count of a loop in the computation `parent`.

    It is the loop's `known_trip_count`, or derived from a constant start, step and limit; None if neither is possible.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition, body = (program.computations[loop.callees(key)[0]] for key in ("condition", "body"))
    compare = next(i for i in condition.values() if i.is_root)
    if compare.opcode != "compare" or compare.attribute("direction") != "LT":
        return None
    counter, limit = condition.get(compare.operands[0]), _constant_value(condition, compare.operands[1])
    if counter is None or counter.opcode != "get-tuple-element" or limit is None:
        return None
    index, before_loop = int(counter.attribute("index") or 0), program.computations[parent]
    start = _constant_value(before_loop, _tuple_operand(before_loop.get(loop.operands[0]), index))
    update = body.get(_tuple_operand(next(i for i in body.values() if i.is_root), index))
    if start is None or update is None or update.opcode != "add":
        return None
    steps = [step for step in (_constant_value(body, name) for name in update.operands) if step is not None]
    # XLA:TPU unrolls collective-matmul loops by two, so their counter grows by 2.
    return max(-(-(limit - start) // steps[0]), 0) if len(steps) == 1 and steps[0] > 0 else None


def _tuple_operand(instruction: Instruction | None, index: int) -> str:
    """Return the name of an element of a tuple, or "" if the instruction does not make a tuple."""
    return instruction.operands[index] if instruction is not None and instruction.opcode == "tuple" else ""


def _constant_value(computation: dict[str, Instruction], name: str) -> int | None:
    """Return the value of a scalar that is a constant or a copy of one, else None."""
    scalar = computation.get(name)
    while scalar is not None and scalar.opcode == "copy":
        scalar = computation.get(scalar.operands[0])
    return int(scalar.operands[0]) if scalar is not None and scalar.opcode == "constant" else None
