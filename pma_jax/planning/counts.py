"""Work of one device in a compiled program: collectives, FLOPs of matrix products, memory traffic.

XLA's cost analysis counts the body of a loop once, however often it runs, and a scanned decoder is one loop. The
functions here multiply each instruction by the trip counts of the loops around it, and count only the shortest branch
of a conditional.
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
# These instructions only name values or wait for them: they move no bytes.
FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id")
FREE += ("optimization-barrier", "add-dependency", "while", "domain", "iota", *CALLS)
FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program as one device executes it, `times` times."""

    kind: str
    payload_bytes: int  # the complete array that is gathered, summed or exchanged, on one device
    group_devices: int
    times: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends per execution of a ring algorithm, the minimum over all algorithms."""
        others = (self.group_devices - 1) / self.group_devices
        share = {"all-reduce": 2 * others, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.payload_bytes * share.get(self.kind, others)


def collectives(program: Program) -> list[Collective]:
    """Return the collectives that run, with the number of executions.

    An asynchronous collective that XLA for TPU splits over several fusions, which share its channel, counts once.
    """
    executed, seen_channels, visited = [], set(), set()
    for caller, computation, instruction, times in executed_instructions(program):
        visited.add(computation)
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        if computation != caller:  # inside a fusion
            channel = (caller, kind, instruction.attribute("channel_id"))
            if channel in seen_channels:
                continue
            seen_channels.add(channel)
        inside = program.computations[computation]
        operand_bytes = sum(array.bytes for name in instruction.operands for array in result_arrays(inside, name))
        group = _group_devices(instruction, program.devices)
        if kind == "all-reduce" and computation != caller and _only_slices(inside, instruction.name):
            kind = "reduce-scatter"  # XLA for TPU writes it as a sum of which each device keeps a slice
        if times:
            payload = operand_bytes * group if kind == "all-gather" else operand_bytes
            executed.append(Collective(kind, payload, group, times))
    missed = [name for name in program.computations.keys() - visited if _has_collective(program.computations[name])]
    assert not missed, f"collectives in computations that no instruction calls: {missed}"
    return executed


def inter_slice_bytes(program: Program) -> int:
    """Return the bytes that a device sends to other slices; on TPU the hosts transfer and reduce them (Megascale)."""
    total = 0
    for _, computation, instruction, times in executed_instructions(program):
        if instruction.opcode == "send" and "megascale" in instruction.attributes:
            inside = program.computations[computation]
            total += times * sum(array.bytes for array in result_arrays(inside, instruction.operands[0]))
    return total


def matmul_flops(program: Program) -> int:
    """Return the FLOPs of all matrix products outside custom kernels, 2 per multiply-add, without element-wise work."""
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
    """Custom (Pallas) kernels that a program runs."""

    declared_flops: int  # total of the kernels that declare their FLOPs
    silent: int  # number of TPU kernels that declare no FLOPs (a key of the plan's JSON)


def count_kernels(program: Program) -> KernelCounts:
    """Sum the FLOPs that the custom kernels of a program declare, and count those that declare none."""
    declared, undeclared = 0, 0
    for _, _, instruction, times in executed_instructions(program):
        if instruction.opcode == "custom-call" and times:
            flops = _declared_flops(instruction)
            declared += times * (flops or 0)
            undeclared += flops is None and '="tpu_custom_call"' in instruction.attributes
    return KernelCounts(declared, undeclared)


def memory_traffic_bytes(program: Program) -> int:
    """Return the bytes that instructions read from and write to main memory.

    Values inside a fusion and in on-chip memory are free. A slice counts the bytes that it reads, an in-place update
    those that it writes.
    """
    total = 0
    for caller, computation, instruction, times in executed_instructions(program):
        if computation == caller:
            total += times * _instruction_traffic(program, program.computations[computation], instruction)
    return total


# --- Collectives ------------------------------------------------------------------------------------------------------


def _group_devices(collective: Instruction, devices: int) -> int:
    """Return the devices per replica group; groups are listed, counted (`[2,4]<=[8]`) or given as mesh axes."""
    _, separator, text = collective.attributes.partition("replica_groups=")
    if not separator:
        return devices
    if text.startswith("{{"):
        return text[2:].partition("}")[0].count(",") + 1
    counted = re.match(r"\[\d+,(\d+)\]", text)
    if counted:
        return int(counted[1])
    mesh = re.match(r"mesh\[([^\]]*)\](?:, device_ids=[^{]*)? \{([^}]*)\}", text)
    if mesh:
        sizes = dict(re.findall(r"['\"](\w+)['\"]=(\d+)", mesh[1]))
        # A part of an axis is written 'x':(before)size.
        axes = re.findall(r"['\"](\w+)['\"](?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    assert text.startswith("{}"), text[:200]
    return devices


def _has_collective(computation: dict[str, Instruction]) -> bool:
    return any(i.opcode.removesuffix("-start") in COLLECTIVES for i in computation.values())


def _only_slices(computation: dict[str, Instruction], name: str) -> bool:
    """Return whether all uses of an instruction are slices of its result."""
    users = [i for i in computation.values() if name in i.operands]
    return bool(users) and all(
        user.opcode == "dynamic-slice"
        or (user.opcode in ("bitcast", "reshape", "copy") and _only_slices(computation, user.name))
        for user in users
    )


# --- Matrix products and memory traffic -------------------------------------------------------------------------------


def _declared_flops(kernel: Instruction) -> int | None:
    declared = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', kernel.attributes)
    return int(declared[1]) if declared else None


def _convolution_flops(computation: dict[str, Instruction], convolution: Instruction) -> int:
    """Return 2 FLOPs per multiply-add with an element of the image, not with padding or dilation gaps.

    XLA for TPU writes batched matrix products as convolutions with dilated windows.
    """
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
    """Return the number of (result, kernel) index pairs that read an element of the image, along one dimension."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}

    def value(key: str, default: str) -> str:
        return fields[key].split("x")[dim] if key in fields else default

    stride, padding = int(value("stride", "1")), int(value("pad", "0_0").split("_")[0])
    image_dilation, kernel_dilation = int(value("lhs_dilate", "1")), int(value("rhs_dilate", "1"))
    index = np.arange(result)[:, None] * stride - padding + np.arange(kernel) * kernel_dilation
    return int(np.sum((index >= 0) & (index % image_dilation == 0) & (index // image_dilation < image)))


def _instruction_traffic(program: Program, inside: dict[str, Instruction], instruction: Instruction) -> int:
    """Return the bytes that one execution of an instruction reads and writes; `inside` is its computation."""
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
    if opcode.endswith("-start"):  # the result repeats the operands
        written = written[len(instruction.operands) :]
    if opcode in ("dynamic-slice", "slice", "gather", "slice-start"):
        is_read = any(array.in_main_memory for array in result_arrays(inside, instruction.operands[0]))
        return _main_bytes(written[:1]) + sum(array.bytes for array in written[:1] if is_read)
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _main_bytes(
            result_arrays(inside, instruction.operands[1 if opcode == "dynamic-update-slice" else -1])
        )
    return _main_bytes(written) + sum(_main_bytes(result_arrays(inside, name)) for name in instruction.operands)


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
        sliced = _sliced_bytes(fused, parameter.name)
        total += _main_bytes(outer) if sliced is None else min(sliced, _main_bytes(outer))
    root = next(i for i in fused.values() if i.is_root)
    results = [fused.get(name) for name in root.operands] if root.opcode == "tuple" else [root]
    for array, result in zip(fusion.arrays, results, strict=False):
        while result is not None and result.opcode in ("bitcast", "get-tuple-element") and result.operands:
            result = fused.get(result.operands[0])
        if not array.in_main_memory or result is None or result.opcode == "parameter":  # passed through
            continue
        is_update = result.opcode == "dynamic-update-slice"
        total += sum(a.bytes for a in result_arrays(fused, result.operands[1])) if is_update else array.bytes
    return total


def _sliced_bytes(fused: dict[str, Instruction], name: str) -> int | None:
    """Return the bytes that a fusion reads of an operand that it only slices or updates in place; else None."""
    total = 0
    for user in fused.values():
        if name not in user.operands:
            continue
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += sum(array.bytes for array in user.arrays)
        elif user.opcode == "bitcast":
            inner = _sliced_bytes(fused, user.name)
            if inner is None:
                return None
            total += inner
        elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == name) and user.opcode != "tuple":
            return None
    return total
