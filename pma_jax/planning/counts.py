"""What one device does in a compiled program: collectives, matrix products, memory traffic.

XLA's own cost analysis counts the body of a loop once, however often it runs; a scanned decoder is one loop. Here every
instruction counts as often as the loops around it run, and of a condition the shortest branch.
"""

import dataclasses
import math
import re

import numpy as np

from pma_jax.planning.hlo import (
    CALLS,
    HloArray,
    Instruction,
    Program,
    computation_name,
    executed_instructions,
    result_arrays,
)

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Say where values are, or wait for them: no bytes move.
FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id")
FREE += ("optimization-barrier", "add-dependency", "while", "domain", "iota", *CALLS)
FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, by one device; `times` that it runs."""

    kind: str
    payload_bytes: int  # what is gathered, summed or exchanged: the whole of it on one device
    group_devices: int
    times: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends, each time, when the algorithm is a ring: no less is possible for any."""
        others = (self.group_devices - 1) / self.group_devices
        share = {"all-reduce": 2 * others, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.payload_bytes * share.get(self.kind, others)


def collectives(program: Program) -> list[Collective]:
    """Every collective that runs, with the number of times.

    An asynchronous one that XLA for TPU spreads over several fusions is one: they share its channel.
    """
    found, seen, reached = [], set(), set()
    for home, computation, instruction, times in executed_instructions(program):
        reached.add(computation)
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        if computation != home:  # inside a fusion
            channel = (home, kind, instruction.attribute("channel_id"))
            if channel in seen:
                continue
            seen.add(channel)
        inside = program.computations[computation]
        given = sum(array.bytes for name in instruction.operands for array in result_arrays(inside, name))
        group = _group_devices(instruction, program.devices)
        if kind == "all-reduce" and computation != home and _only_slices(inside, instruction.name):
            kind = "reduce-scatter"  # XLA for TPU writes it as a sum of which each device keeps its slice
        if times:
            found.append(Collective(kind, given * group if kind == "all-gather" else given, group, times))
    missed = [name for name in program.computations.keys() - reached if _has_collective(program.computations[name])]
    assert not missed, f"collectives in computations that nothing seems to run: {missed}"
    return found


def inter_slice_bytes(program: Program) -> int:
    """Bytes that a device sends to other slices: XLA for TPU hands them to the hosts, which add up and bring back."""
    total = 0
    for _, computation, instruction, times in executed_instructions(program):
        if instruction.opcode == "send" and "megascale" in instruction.attributes:
            inside = program.computations[computation]
            total += times * sum(array.bytes for array in result_arrays(inside, instruction.operands[0]))
    return total


def matmul_flops(program: Program) -> int:
    """FLOPs of all matrix products outside of hand-written kernels, 2 a multiply-add; no element-wise work."""
    total = 0
    for _, computation, instruction, times in executed_instructions(program):
        inside = program.computations[computation]
        if instruction.opcode == "dot":
            lhs = result_arrays(inside, instruction.operands[0])[0]
            dims = [int(d) for d in (instruction.attribute("lhs_contracting_dims") or "").split(",") if d]
            total += times * 2 * math.prod(instruction.arrays[0].dims) * math.prod(lhs.dims[d] for d in dims)
        elif instruction.opcode == "convolution":
            total += times * _convolution_flops(inside, instruction)
    return total


@dataclasses.dataclass(frozen=True)
class KernelCounts:
    """The hand-written kernels that a program runs."""

    declared_flops: int  # of those that declare them, by the shapes of their buffers
    silent: int  # how many declare none


def count_kernels(program: Program) -> KernelCounts:
    """What the program's kernels say of themselves."""
    declared, silent = 0, 0
    for _, _, instruction, times in executed_instructions(program):
        if instruction.opcode == "custom-call" and times:
            flops = _declared_flops(instruction)
            declared += times * (flops or 0)
            silent += flops is None and '="tpu_custom_call"' in instruction.attributes
    return KernelCounts(declared, silent)


def memory_traffic_bytes(program: Program) -> int:
    """Bytes that instructions read from and write to main memory; what stays inside a fusion or on the chip is free.

    A slice of an array counts for what is taken of it, an update in place for what is written.
    """
    total = 0
    for home, computation, instruction, times in executed_instructions(program):
        if computation == home:
            total += times * _traffic(program, program.computations[computation], instruction)
    return total


# --- Collectives ------------------------------------------------------------------------------------------------------


def _group_devices(collective: Instruction, devices: int) -> int:
    """Devices that take part together: the groups are listed, counted (`[2,4]<=[8]`) or axes of a mesh."""
    _, found, text = collective.attributes.partition("replica_groups=")
    if not found:
        return devices
    if text.startswith("{{"):
        return text[2:].partition("}")[0].count(",") + 1
    counted = re.match(r"\[\d+,(\d+)\]", text)
    if counted:
        return int(counted[1])
    mesh = re.match(r"mesh\[([^\]]*)\](?:, device_ids=[^{]*)? \{([^}]*)\}", text)
    if mesh:
        sizes = dict(re.findall(r"['\"](\w+)['\"]=(\d+)", mesh[1]))
        # Part of an axis is written 'x':(before)size.
        axes = re.findall(r"['\"](\w+)['\"](?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    assert text.startswith("{}"), text[:200]
    return devices


def _has_collective(computation: dict[str, Instruction]) -> bool:
    return any(i.opcode.removesuffix("-start") in COLLECTIVES for i in computation.values())


def _only_slices(computation: dict[str, Instruction], name: str) -> bool:
    users = [i for i in computation.values() if name in i.operands]
    return bool(users) and all(
        user.opcode == "dynamic-slice"
        or (user.opcode in ("bitcast", "reshape", "copy") and _only_slices(computation, user.name))
        for user in users
    )


# --- Products and traffic ---------------------------------------------------------------------------------------------


def _declared_flops(kernel: Instruction) -> int | None:
    declared = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', kernel.attributes)
    return int(declared[1]) if declared else None


def _convolution_flops(computation: dict[str, Instruction], convolution: Instruction) -> int:
    """Two for each multiply-add of an input that is there: XLA for TPU writes batched products as dilated windows."""
    image, kernel = (result_arrays(computation, name)[0] for name in convolution.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert labels, convolution
    result = convolution.arrays[0].dims
    pairs = 1
    for i in range(len(labels[1]) - 2):
        of_image, of_kernel, of_result = (labels[k].index(str(i)) for k in (1, 2, 3))
        pairs *= _window_pairs(
            convolution.attributes, i, image.dims[of_image], kernel.dims[of_kernel], result[of_result]
        )
    features = result[labels[3].index("b")] * result[labels[3].index("f")]
    return 2 * features * kernel.dims[labels[2].index("i")] * pairs


def _window_pairs(attributes: str, dim: int, image: int, kernel: int, result: int) -> int:
    """Pairs of a place in the result and one in the kernel that meet in an element of the image."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}

    def value(key: str, default: str) -> str:
        return fields[key].split("x")[dim] if key in fields else default

    stride, before = int(value("stride", "1")), int(value("pad", "0_0").split("_")[0])
    spread, gaps = int(value("lhs_dilate", "1")), int(value("rhs_dilate", "1"))
    place = np.arange(result)[:, None] * stride - before + np.arange(kernel) * gaps
    return int(np.sum((place >= 0) & (place % spread == 0) & (place // spread < image)))


def _traffic(program: Program, inside: dict[str, Instruction], instruction: Instruction) -> int:
    opcode = instruction.opcode
    if (
        opcode in FREE
        or opcode.endswith(("-done", "-update"))
        or instruction.attribute("custom_call_target") in [f'"{target}"' for target in FREE_TARGETS]
    ):
        return 0
    if opcode == "fusion":
        return _fusion_traffic(
            program.computations[computation_name(instruction.attribute("calls"))], inside, instruction
        )
    written = instruction.arrays
    if opcode.endswith("-start"):  # its result names its operands again
        written = written[len(instruction.operands) :]
    if opcode in ("dynamic-slice", "slice", "gather", "slice-start"):
        return _main_bytes(written[:1]) + sum(a.bytes for a in written[:1] if _any_main(inside, instruction))
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _main_bytes(
            result_arrays(inside, instruction.operands[1 if opcode == "dynamic-update-slice" else -1])
        )
    return _main_bytes(written) + sum(_main_bytes(result_arrays(inside, name)) for name in instruction.operands)


def _any_main(inside: dict[str, Instruction], instruction: Instruction) -> bool:
    return any(array.in_main_memory for array in result_arrays(inside, instruction.operands[0]))


def _main_bytes(arrays: tuple[HloArray, ...]) -> int:
    return sum(array.bytes for array in arrays if array.in_main_memory)


def _fusion_traffic(fused: dict[str, Instruction], inside: dict[str, Instruction], fusion: Instruction) -> int:
    total = 0
    for parameter in fused.values():
        if parameter.opcode != "parameter":
            continue
        outer = result_arrays(inside, fusion.operands[int(parameter.operands[0])])
        if not _main_bytes(outer):
            continue
        takes = _takes(fused, parameter.name)
        total += _main_bytes(outer) if takes is None else min(takes, _main_bytes(outer))
    root = next(i for i in fused.values() if i.is_root)
    results = [fused.get(name) for name in root.operands] if root.opcode == "tuple" else [root]
    for array, result in zip(fusion.arrays, results, strict=False):
        while result is not None and result.opcode in ("bitcast", "get-tuple-element") and result.operands:
            result = fused.get(result.operands[0])
        if not array.in_main_memory or result is None or result.opcode == "parameter":  # passed through
            continue
        updated = result.opcode == "dynamic-update-slice"
        total += sum(a.bytes for a in result_arrays(fused, result.operands[1])) if updated else array.bytes
    return total


def _takes(fused: dict[str, Instruction], name: str) -> int | None:
    """Bytes of an operand that a fusion reads when it only slices it or updates it in place; None: all."""
    taken = 0
    for user in fused.values():
        if name not in user.operands:
            continue
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            taken += sum(array.bytes for array in user.arrays)
        elif user.opcode == "bitcast":
            inner = _takes(fused, user.name)
            if inner is None:
                return None
            taken += inner
        elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == name) and user.opcode != "tuple":
            return None
    return taken
