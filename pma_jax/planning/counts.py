"""Work of one device in a compiled program: collectives, FLOPs of matmuls, memory traffic.

XLA's cost analysis counts the body of a loop once, however often it runs, and a scanned decoder is one loop. The
functions here multiply each instruction by the trip counts of the loops around it. For a conditional they count only
the branch that executes the fewest instructions, so sums are lower bounds if that branch also does the least work.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from pma_jax.planning.hlo import CALL_OPCODES, HloArray, Instruction, Program, operand_arrays, walk_instructions

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Opcodes of instructions without memory traffic of their own. The bodies of loops and calls are counted separately.
OPCODES_WITHOUT_TRAFFIC = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "add-dependency", "while", "domain", "iota", *CALL_OPCODES,
)  # fmt: skip
# Targets of custom calls without memory traffic.
CUSTOM_CALLS_WITHOUT_TRAFFIC = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, as one device executes it."""

    kind: str
    payload_bytes: int  # per device and execution: of the result for an all-gather, of the operand for other kinds
    group_devices: int
    executions: int
    # Devices of each group, in the order of the mesh, [groups, devices]; of a permute, the pairs of devices.
    groups: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), int), compare=False, repr=False)

    @property
    def sent_bytes_per_execution(self) -> float:
        """Bytes that a device sends per execution, with a bandwidth-optimal (ring) algorithm."""
        ring_factor = (self.group_devices - 1) / self.group_devices
        factor = {"all-reduce": 2 * ring_factor, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.payload_bytes * factor.get(self.kind, ring_factor)


def collectives(program: Program) -> list[Collective]:
    """Return the collectives that run, with their numbers of executions.

    XLA for TPU may split an asynchronous collective into several fusions with one channel ID; these count once.
    """
    executed, seen_channels, visited = [], set(), set()
    for scope, name, instruction, times in walk_instructions(program):
        visited.add(name)
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        if name != scope:  # `name` is the computation of a fusion in `scope`
            channel = (scope, kind, instruction.attribute("channel_id"))
            if channel in seen_channels:
                continue
            seen_channels.add(channel)
        computation = program.computations[name]
        operand_bytes = sum(
            array.bytes for source in instruction.operands for array in operand_arrays(computation, source)
        )
        groups = device_groups(instruction, program.devices)
        group = program.devices if instruction.attribute("source_target_pairs") else groups.shape[1]
        if kind == "all-reduce" and name != scope and _is_only_sliced(computation, instruction.name):
            kind = "reduce-scatter"  # XLA for TPU expresses a reduce-scatter as an all-reduce followed by a slice
        if times:
            payload = operand_bytes * group if kind == "all-gather" else operand_bytes
            executed.append(Collective(kind, payload, group, times, groups))
    missed = [name for name in program.computations.keys() - visited if _has_collective(program.computations[name])]
    assert not missed, f"collectives in computations that no instruction calls: {missed}"
    return executed


def crossing(program: Program, parts: int) -> list[Collective]:
    """Return the collectives between devices of several of `parts` equal ranges, such as replicas or slices."""

    def crosses(collective: Collective) -> bool:
        part = collective.groups // (program.devices // parts)
        return bool((part != part[:, :1]).any())

    return [collective for collective in collectives(program) if crosses(collective)]


@dataclasses.dataclass(frozen=True)
class SliceTransfer:
    """What one device hands to its host for a collective between slices, which Megascale transfers and reduces."""

    kind: str  # Megascale's type of the transfer
    operand_bytes: int
    slices: int  # of a group
    executions: int

    @property
    def sent_bytes_per_execution(self) -> float:
        """Bytes that travel to other slices per device and execution, along a ring of the slices."""
        others = self.slices - 1
        factor = {
            "ALL_REDUCE": 2 * others / self.slices,
            "REDUCE_SCATTER": others / self.slices,
            "ALL_TO_ALL": others / self.slices,
            "ALL_GATHER": others,
            "ONE_TO_ONE": 1,
        }
        return self.operand_bytes * factor[self.kind]


def slice_transfers(program: Program) -> list[SliceTransfer]:
    """Return the collectives between slices of a TPU; none on other platforms."""
    transfers = []
    for _, name, instruction, times in walk_instructions(program):
        if instruction.opcode != "send" or "megascale" not in instruction.attributes:
            continue
        operand_bytes = sum(a.bytes for a in operand_arrays(program.computations[name], instruction.operands[0]))
        kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        group = re.search(r'_xla_megascale_target="\{([\d,]+)\}', instruction.attributes)
        assert kind and (group or kind[1] == "ONE_TO_ONE"), instruction.attributes
        slices = len(group[1].split(",")) if group else 2
        transfers.append(SliceTransfer(kind[1], operand_bytes, slices, times))
    return transfers


def inter_slice_operand_bytes(program: Program) -> int:
    """Return the bytes of the operands of the collectives between slices, per device."""
    return sum(t.executions * t.operand_bytes for t in slice_transfers(program))


def inter_slice_sent_bytes(program: Program) -> float:
    """Return the bytes that travel to other slices, per device."""
    return sum(t.executions * t.sent_bytes_per_execution for t in slice_transfers(program))


def matmul_flops(program: Program) -> int:
    """Return the FLOPs of all matmuls, 2 per multiply-add. Custom kernels and element-wise operations do not count."""
    total = 0
    for _, name, instruction, times in walk_instructions(program):
        computation = program.computations[name]
        if instruction.opcode == "dot":
            lhs = operand_arrays(computation, instruction.operands[0])[0]
            dims = [int(d) for d in (instruction.attribute("lhs_contracting_dims") or "").split(",") if d]
            total += times * 2 * math.prod(instruction.arrays[0].dims) * math.prod(lhs.dims[d] for d in dims)
        elif instruction.opcode == "convolution":
            total += times * _convolution_flops(computation, instruction)
    return total


@dataclasses.dataclass(frozen=True)
class KernelCounts:
    """FLOPs that the custom (Pallas) kernels of a program declare, and the number of TPU kernels that declare none."""

    declared_flops: int  # summed over all executions of the kernels
    undeclared_kernels: int  # each kernel in the text of the program counts once, even if it runs several times


def count_kernels(program: Program) -> KernelCounts:
    """Sum the FLOPs that the custom kernels of a program declare, and count those that declare none."""
    declared, undeclared = 0, 0
    for _, _, instruction, times in walk_instructions(program):
        if instruction.opcode == "custom-call" and times:
            flops = _declared_flops(instruction)
            declared += times * (flops or 0)
            undeclared += flops is None and '="tpu_custom_call"' in instruction.attributes
    return KernelCounts(declared, undeclared)


def memory_traffic_bytes(program: Program) -> int:
    """Return the bytes that instructions read from and write to main memory.

    Values inside a fusion and in on-chip memory do not count. A slice or an in-place update counts only the elements
    that it reads and writes, not its complete operand.
    """
    return sum(times * moved for _, times, moved in executed_traffic(program))


def executed_traffic(program: Program) -> Iterator[tuple[Instruction, int, int]]:
    """Yield each instruction that is not inside a fusion, how often it runs, and the bytes that it moves each time."""
    for scope, name, instruction, times in walk_instructions(program):
        if name == scope:
            yield instruction, times, _instruction_traffic(program, program.computations[name], instruction)


# --- Collectives ------------------------------------------------------------------------------------------------------


def device_groups(collective: Instruction, devices: int) -> np.ndarray:
    """Return the devices of each group of a collective, int [groups, devices per group]; of a permute, the pairs.

    Groups are explicit lists, iota lists (`[2,4]<=[4,2]T(1,0)`) or axes of a mesh. Devices are numbered in the order of
    the mesh.
    """
    pairs = collective.attributes.partition("source_target_pairs=")[2]
    text = pairs or collective.attributes.partition("replica_groups=")[2]
    if text.startswith("{{"):
        rows = re.findall(r"[\d,]+", text[: text.index("}}")])
        return np.array([[int(device) for device in row.split(",") if device] for row in rows if row != ","])
    if iota := re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = [int(n) for n in iota[3].split(",")]
        order = [int(n) for n in iota[4].split(",")] if iota[4] else range(len(shape))
        return np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(int(iota[1]), int(iota[2]))
    if mesh := re.match(r"mesh\[([^\]]*)\](?:, device_ids=([^{]*))? \{([^}]*)\}", text):
        return _groups_of_axes(mesh[1], mesh[2] or "", mesh[3])
    assert not text or text.startswith("{}"), text[:200]
    return np.arange(devices)[None]


def _groups_of_axes(sizes: str, device_ids: str, axes: str) -> np.ndarray:
    """Return the groups along mesh axes; a part of an axis is written 'x':(before)size."""
    shape = {name: int(size) for name, size in re.findall(r"['\"](\w+)['\"]=(\d+)", sizes)}
    chosen = re.findall(r"['\"](\w+)['\"](?::\((\d+)\)(\d+))?", axes)
    dims: list[int] = []
    grouped = {}  # order in `axes` -> index of the dim
    for name, size in shape.items():
        parts = sorted(
            (int(before or 1), int(part or size), i) for i, (n, before, part) in enumerate(chosen) if n == name
        )
        done = 1
        for before, part, i in parts:
            dims += [before // done, part]
            grouped[i], done = len(dims) - 1, before * part
        dims.append(size // done)
    order = np.arange(math.prod(dims))
    if iota := re.match(r"\(\[([\d,]+)\]T\(([\d,]+)\)\)", device_ids):
        shape, transposed = ([int(n) for n in text.split(",")] for text in iota.groups())
        order = order.reshape(shape).transpose(transposed)
    elif explicit := re.match(r"\(([\d,]+)\)", device_ids):
        order = np.array([int(device) for device in explicit[1].split(",")])
    else:
        assert not device_ids, device_ids
    last = [grouped[i] for i in range(len(chosen))]
    rest = [i for i in range(len(dims)) if i not in last]
    ids = order.reshape(dims).transpose([*rest, *last])
    return ids.reshape(-1, math.prod(dims[i] for i in last))


def _has_collective(computation: dict[str, Instruction]) -> bool:
    return any(i.opcode.removesuffix("-start") in COLLECTIVES for i in computation.values())


def _is_only_sliced(computation: dict[str, Instruction], name: str) -> bool:
    """Return whether all uses of an instruction are slices of its result."""
    users = [i for i in computation.values() if name in i.operands]
    return bool(users) and all(
        user.opcode == "dynamic-slice"
        or (user.opcode in ("bitcast", "reshape", "copy") and _is_only_sliced(computation, user.name))
        for user in users
    )


# --- Matmuls and memory traffic ---------------------------------------------------------------------------------------


def _declared_flops(kernel: Instruction) -> int | None:
    declared = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', kernel.attributes)
    return int(declared[1]) if declared else None


def _convolution_flops(computation: dict[str, Instruction], convolution: Instruction) -> int:
    """Return the FLOPs of a convolution, 2 per multiply-add; padding and the zeros of dilation do not count.

    XLA for TPU writes batched matmuls as convolutions with dilated windows.
    """
    inputs, kernel = (operand_arrays(computation, name)[0] for name in convolution.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert labels, convolution
    result = convolution.arrays[0].dims
    spatial_pairs = 1
    for i in range(len(labels[1]) - 2):
        input_dim, kernel_dim, result_dim = (labels[k].index(str(i)) for k in (1, 2, 3))
        spatial_pairs *= _window_pairs(
            convolution.attributes, i, inputs.dims[input_dim], kernel.dims[kernel_dim], result[result_dim]
        )
    outputs = result[labels[3].index("b")] * result[labels[3].index("f")]
    return 2 * outputs * kernel.dims[labels[2].index("i")] * spatial_pairs


def _window_pairs(attributes: str, dim: int, input_size: int, kernel_size: int, result_size: int) -> int:
    """Count the (result index, kernel index) pairs along the spatial dimension `dim` that read an element of the input.

    The other pairs read padding or a zero that the dilation of the input inserts.
    """
    window = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}

    def value(key: str, default: str) -> str:
        return fields[key].split("x")[dim] if key in fields else default

    stride, padding = int(value("stride", "1")), int(value("pad", "0_0").split("_")[0])
    input_dilation, kernel_dilation = int(value("lhs_dilate", "1")), int(value("rhs_dilate", "1"))
    index = np.arange(result_size)[:, None] * stride - padding + np.arange(kernel_size) * kernel_dilation
    return int(np.sum((index >= 0) & (index % input_dilation == 0) & (index // input_dilation < input_size)))


def _instruction_traffic(program: Program, computation: dict[str, Instruction], instruction: Instruction) -> int:
    """Return the bytes that one execution of an instruction of `computation` reads and writes."""
    opcode = instruction.opcode
    if (
        opcode in OPCODES_WITHOUT_TRAFFIC
        or opcode.endswith(("-done", "-update"))
        or instruction.attribute("custom_call_target") in [f'"{target}"' for target in CUSTOM_CALLS_WITHOUT_TRAFFIC]
    ):
        return 0
    if opcode == "fusion":
        fused = program.computations[instruction.callees("calls")[0]]
        return _fusion_traffic(fused, computation, instruction)
    written = instruction.arrays
    if opcode.endswith("-start"):  # the result tuple starts with the operands
        written = written[len(instruction.operands) :]
    if opcode in ("dynamic-slice", "slice", "gather", "slice-start"):
        # A slice reads as many bytes as it writes, from main memory if its operand is there.
        is_read = any(array.in_main_memory for array in operand_arrays(computation, instruction.operands[0]))
        return _memory_bytes(written[:1]) + sum(array.bytes for array in written[:1] if is_read)
    if opcode in ("dynamic-update-slice", "scatter"):
        update = instruction.operands[1 if opcode == "dynamic-update-slice" else -1]
        return 2 * _memory_bytes(operand_arrays(computation, update))
    read = [operand_arrays(computation, name) for name in instruction.operands]
    return sum(map(_memory_bytes, [written, *read]))


def _memory_bytes(arrays: tuple[HloArray, ...]) -> int:
    return sum(array.bytes for array in arrays if array.in_main_memory)


def _fusion_traffic(fused: dict[str, Instruction], computation: dict[str, Instruction], fusion: Instruction) -> int:
    total = 0
    for parameter in fused.values():
        if parameter.opcode != "parameter":
            continue
        operand = operand_arrays(computation, fusion.operands[int(parameter.operands[0])])
        if not _memory_bytes(operand):
            continue
        sliced = _sliced_bytes(fused, parameter.name)
        total += _memory_bytes(operand) if sliced is None else min(sliced, _memory_bytes(operand))
    root = next(i for i in fused.values() if i.is_root)
    results = [fused.get(name) for name in root.operands] if root.opcode == "tuple" else [root]
    for array, result in zip(fusion.arrays, results, strict=False):
        while result is not None and result.opcode in ("bitcast", "get-tuple-element") and result.operands:
            result = fused.get(result.operands[0])
        # A fusion writes neither results in on-chip memory nor parameters that it returns unchanged.
        if not array.in_main_memory or result is None or result.opcode == "parameter":
            continue
        is_update = result.opcode == "dynamic-update-slice"
        total += sum(a.bytes for a in operand_arrays(fused, result.operands[1])) if is_update else array.bytes
    return total


def _sliced_bytes(fused: dict[str, Instruction], name: str) -> int | None:
    """Return the bytes that a fusion reads of its parameter `name` through slices.

    An in-place update of the parameter, and returning it in a tuple, read nothing. Return None if the fusion uses the
    parameter in another way.
    """
    total = 0
    for user in fused.values():
        if name not in user.operands or user.opcode == "tuple":
            continue
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += sum(array.bytes for array in user.arrays)
        elif user.opcode == "bitcast":
            inner = _sliced_bytes(fused, user.name)
            if inner is None:
                return None
            total += inner
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
            return None
    return total
