"""Where the memory traffic of a compiled program comes from: bytes by line of the source code."""

import dataclasses
import re
from collections import defaultdict
from pathlib import Path

from pma_jax.planning.counts import executed_traffic
from pma_jax.planning.hlo import Instruction, Program

# Part of the name of an operation -> what it belongs to; the first that matches.
PASSES = (
    ("rematted_computation", "recomputed"),
    ("transpose(", "backward"),
    ("jvp(", "forward"),
)
PACKAGE = f"{Path(__file__).parents[1]}/"


@dataclasses.dataclass(frozen=True)
class SourceTraffic:
    """The memory traffic of the instructions that one operation of a line of source code was compiled to."""

    source: str  # such as `model/layers.py:48`; empty if the compiler made the instructions without one
    operation: str  # of JAX, such as `mul` or `bd,dv->bv/dot_general`; without a source, the name of the instruction
    pass_name: str  # `forward`, `backward` or `recomputed`; empty outside of what is differentiated
    bytes: int  # of all executions, per device
    executions: int
    largest: str  # the instruction with the most bytes, and its result


def heaviest_operations(program: Program, count: int) -> list[SourceTraffic]:
    """Return the operations with the most memory traffic, the heaviest first.

    A fusion counts for the operation of its last instruction. Instructions that the compiler adds, such as copies, have
    no source and count by their names.
    """
    sources = _Sources(program.text)
    groups: dict[tuple[str, str, str], list[tuple[int, int, Instruction]]] = defaultdict(list)
    for instruction, times, moved in executed_traffic(program):
        if moved * times:
            groups[_describe(instruction, sources)].append((moved * times, times, instruction))
    found = []
    for key, members in groups.items():
        largest = max(members, key=lambda member: member[0])[2]
        array = largest.arrays[0]
        described = f"{largest.name} {array.dtype}[{','.join(map(str, array.dims))}]"
        found.append(
            SourceTraffic(*key, sum(member[0] for member in members), sum(member[1] for member in members), described)
        )
    return sorted(found, key=lambda one: -one.bytes)[:count]


def _describe(instruction: Instruction, sources: "_Sources") -> tuple[str, str, str]:
    """Return the source, the operation and the pass of an instruction."""
    name = re.search(r'op_name="([^"]*)"', instruction.attributes)
    frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
    if name is None or frame is None:
        return "", re.sub(r"[.\d]+$", "", instruction.name), ""
    pass_name = next((pass_name for part, pass_name in PASSES if part in name[1]), "")
    *_, outer, operation = ["", *name[1].split("/")]
    return sources.line(int(frame[1])), f"{outer}/{operation}" if "->" in outer else operation, pass_name


class _Sources:
    """The tables of source lines at the head of the text of a program."""

    def __init__(self, text: str):
        self._files = {key: value.strip('"') for key, value in _table(text, "FileNames").items()}
        self._locations = {key: _fields(value) for key, value in _table(text, "FileLocations").items()}
        self._frames = {key: _fields(value) for key, value in _table(text, "StackFrames").items()}

    def line(self, frame: int) -> str:
        """Return the line of this package that is the innermost of a stack; of other code, only the file name."""
        lines = []
        while frame in self._frames:
            location = self._locations[self._frames[frame]["file_location_id"]]
            lines.append(f"{self._files[location['file_name_id']]}:{location['line']}")
            parent = self._frames[frame].get("parent_frame_id", 0)
            frame = parent if parent != frame else 0
        ours = [line.removeprefix(PACKAGE) for line in lines if line.startswith(PACKAGE)]
        return next(iter([*ours, *(Path(line).name for line in lines)]), "")


def _table(text: str, name: str) -> dict[int, str]:
    match = re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
    rows = (row.partition(" ") for row in match[1].splitlines()) if match else ()
    return {int(key): value for key, _, value in rows}


def _fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
