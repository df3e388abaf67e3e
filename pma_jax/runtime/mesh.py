"""The device mesh, and the sharding rules that map logical dims of arrays to mesh axes.

Every mesh axis is explicit (`AxisType.Explicit`): an array's sharding is part of its type, and an operation whose
output sharding would be ambiguous is an error. "Axis" means an axis of the mesh, "dim" a dimension of an array.
"""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import P
from jax.experimental import mesh_utils

from pma_jax.config import Config, MeshConfig, ModelConfig
from pma_jax.config.errors import UserError

AXES = ("replica", "data", "fsdp", "tensor", "expert")


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else entry or ()


@dataclasses.dataclass(frozen=True)
class Rules:
    """Sharding rules: the mesh axis or axes that split each logical dim; None leaves a dim unsplit."""

    batch: tuple[str, ...] = ("replica", "data", "fsdp", "expert")  # B
    width: str | None = "fsdp"  # D of parameters; D of activations is not split
    heads: str | None = "tensor"  # N and K
    hidden: str | None = "tensor"  # F
    vocabulary: str | None = "tensor"  # V
    experts: str | None = "expert"  # E

    def spec(self, *dims: str | None) -> P:
        """Return the `PartitionSpec` of an array with these logical dims (None: unsplit).

        Inside `jax.shard_map` the manual axes are omitted, because arrays are already per-device shards there.

        Raises:
            UserError: One mesh axis would split two dims.
        """
        manual = jax.sharding.get_abstract_mesh().manual_axes
        named = [getattr(self, dim) if dim else None for dim in dims]
        split = [tuple(a for a in axes_of(axis) if a not in manual) for axis in named]
        flat = [a for axes in split for a in axes]
        for axis in flat:
            if flat.count(axis) > 1:
                raise UserError(f"dims {dims} are both split by mesh axis {axis!r}: change one of the sharding rules")
        return P(*split)


RULES = Rules()


def make_mesh(sizes: MeshConfig) -> jax.sharding.Mesh:
    """Create an explicit mesh over all devices.

    Initialises the backend, on CPU with `cpu_devices` devices. If it is already initialised, it keeps its devices.

    Raises:
        UserError: As for `mesh_from_devices`.
    """
    if sizes.cpu_devices:
        with contextlib.suppress(RuntimeError):  # the backend is initialised, which fixes the device count
            jax.config.update("jax_num_cpu_devices", sizes.cpu_devices)
    return mesh_from_devices(jax.devices(), sizes)


def mesh_from_devices(devices: Sequence[jax.Device], sizes: MeshConfig) -> jax.sharding.Mesh:
    """Create an explicit mesh over `devices`, which may belong to a topology to compile for (not attached).

    Only the axes `replica` and `data` cross TPU slices, because the other axes communicate much more; `replica` goes
    first, because its devices communicate least.

    Raises:
        UserError: A size is invalid, the product of the sizes is not the number of devices, or another axis would have
            to cross slices.
    """
    shape = [getattr(sizes, axis) for axis in AXES]
    count = len(devices)
    if shape.count(-1) > 1 or any(size == 0 or size < -1 for size in shape):
        raise UserError(f"mesh sizes {dict(zip(AXES, shape, strict=True))}: each is 1 or more, and at most one is -1")
    if -1 in shape:
        rest = -math.prod(shape)
        shape[shape.index(-1)] = max(count // rest, 1)
    if math.prod(shape) != count:
        raise UserError(
            f"mesh {dict(zip(AXES, shape, strict=True))} needs {math.prod(shape)} devices, and {count} are available"
        )
    # Devices of a single slice have no slice_index; on GPUs the attribute means the host.
    slices = collections.Counter(getattr(d, "slice_index", 0) if d.platform == "tpu" else 0 for d in devices)
    if len(set(slices.values())) > 1:
        raise UserError(f"slices of {sorted(slices.values())} devices: all slices must have equally many")
    replica_slices = math.gcd(shape[0], len(slices))
    data_slices = len(slices) // replica_slices
    if shape[1] % data_slices:
        raise UserError(
            f"mesh.replica is {shape[0]} and mesh.data is {shape[1]}, and there are {len(slices)} slices of "
            f"{count // len(slices)} devices: make their product a multiple of {len(slices)}, and make the other axes "
            "fit into one slice"
        )
    inside = (shape[0] // replica_slices, shape[1] // data_slices, *shape[2:])
    if len(slices) > 1:  # connected by the data center network
        across = (replica_slices, data_slices, 1, 1, 1)
        placed = mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    else:
        placed = mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)
    return jax.sharding.Mesh(placed, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))


def platform_of(mesh: jax.sharding.Mesh) -> str:
    """Return the platform of the mesh's devices, for which programs are compiled: "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def check_mesh(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Check that `config` can be trained on `mesh`.

    Raises:
        UserError: A size is not divisible by the mesh axes that split it, or the CPU backend was initialised with
            another number of devices than `mesh.cpu_devices`.
    """
    wanted, here = config.mesh.cpu_devices, jax.local_device_count()
    if wanted and wanted != here and platform_of(mesh) == "cpu":
        raise UserError(
            f"mesh.cpu_devices is {wanted}, and JAX already runs with {here} in this process: start a new process, or "
            f"set it to {here}"
        )
    _check_workers(config, mesh)
    # Sequences that are trained at once: those of one worker per device along `replica`.
    per_step = config.training.batch_size_sequences // config.training.accumulation_steps
    per_step = per_step * mesh.shape["replica"] // worker_count(config, mesh)
    steps = "accumulation_steps" if config.replicas.method == "none" else "accumulation_steps / workers per device"
    sizes = {
        f"training.batch_size_sequences / {steps}": ("batch", per_step),
        "evaluation.batch_size_sequences": ("batch", config.evaluation.batch_size_sequences),
    }
    _check_divides(sizes, mesh.shape)
    check_model_on_mesh(config.model, mesh.shape)


def _check_workers(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Check the number of workers, which `mesh.replica` may decide."""
    workers, devices = worker_count(config, mesh), mesh.shape["replica"]
    if workers % devices:
        raise UserError(f"mesh.replica ({devices}) must divide replicas.count ({workers})")
    if config.training.batch_size_sequences % (workers * config.training.accumulation_steps):
        raise UserError(
            f"mesh.replica gives {workers} workers, which, times training.accumulation_steps, must divide "
            f"training.batch_size_sequences ({config.training.batch_size_sequences})"
        )
    if config.replicas.method == "noloco" and (workers % 2 or devices not in (1, workers)):
        raise UserError(
            f"replicas.method=noloco averages pairs of workers: make replicas.count ({workers}) even, and mesh.replica "
            f"({devices}) 1 or equal to it"
        )


def worker_count(config: Config, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Return the number of workers that average their parameters: 1 without `replicas`."""
    return config.replicas.count or mesh.shape["replica"]


def check_model_on_mesh(model: ModelConfig, axis_sizes: Mapping[str, int]) -> None:
    """Check that each size of the model divides by the mesh axes (name -> devices) that split it.

    Raises:
        UserError: A size is not divisible; the message names it and the axes.
    """
    sizes = {
        "model.width": ("width", model.width),
        "model.heads": ("heads", model.heads),
        "model.kv_heads": ("heads", model.kv_heads),
        "model.vocabulary_size": ("vocabulary", model.vocabulary_size),
    }
    if model.experts:
        sizes |= {"model.experts": ("experts", model.experts), "model.expert_hidden": ("hidden", model.expert_hidden)}
    else:
        sizes |= {"model.hidden": ("hidden", model.hidden)}
    _check_divides(sizes, axis_sizes)


def _check_divides(sizes: Mapping[str, tuple[str, int]], axis_sizes: Mapping[str, int]) -> None:
    for key, (dim, size) in sizes.items():
        axes = axes_of(getattr(RULES, dim))
        parts = math.prod(axis_sizes.get(axis, 1) for axis in axes)
        if size % parts:
            raise UserError(f"{key} is {size}, and {' x '.join(axes)} splits it in {parts}: change it or the mesh")


def round_up_to_batch_axes(mesh: jax.sharding.Mesh, batch_size_sequences: int) -> int:
    """Return the smallest multiple, at least `batch_size_sequences`, of the parts in which the mesh splits a batch."""
    parts = math.prod(mesh.shape[axis] for axis in axes_of(RULES.batch))
    return -(-batch_size_sequences // parts) * parts


@functools.lru_cache(maxsize=64)  # `put_batch` needs them in every step
def local_rows(mesh: jax.sharding.Mesh, batch_size_sequences: int) -> np.ndarray:
    """Return the indices, ascending, of the batch rows that this process's devices hold, so that it must read them.

    Several processes hold the same rows if a mesh axis that does not split the batch crosses processes. The array is
    read-only.
    """
    sharding = jax.NamedSharding(mesh, RULES.spec("batch"))
    shares = sharding.addressable_devices_indices_map((batch_size_sequences,)).values()
    rows = np.unique(np.concatenate([np.arange(batch_size_sequences)[rows] for rows in shares]))
    rows.setflags(write=False)
    return rows


def put_batch(mesh: jax.sharding.Mesh, tokens_bxM: np.ndarray) -> jax.Array:
    """Assemble a batch from the rows of each process, sharded over the batch axes of `mesh`.

    Args:
        mesh: The mesh for the batch.
        tokens_bxM: This process's rows, in the order of `local_rows`.

    Returns:
        The global array [B, M].
    """
    shares = math.prod(mesh.shape[axis] for axis in RULES.batch)
    B = len(tokens_bxM) * shares // len(local_rows(mesh, shares))
    rows_b = local_rows(mesh, B)
    return jax.make_array_from_callback(
        (B, tokens_bxM.shape[1]),
        jax.NamedSharding(mesh, RULES.spec("batch", None)),
        lambda index: tokens_bxM[np.searchsorted(rows_b, np.arange(B)[index[0]])],  # pyrefly: ignore[unsupported-operation]
    )


def data_parallel_mesh() -> jax.sharding.Mesh:
    """Create a mesh with all devices along `data`, the default for evaluation and merging."""
    return make_mesh(MeshConfig())


def non_manual_axes() -> tuple[str, ...]:
    """Return the axes of the current mesh that are not manual axes of an enclosing `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)


def map_over_devices(function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
    """Wrap `function` in a `jax.shard_map` over all `non_manual_axes`; arguments are first resharded to `in_specs`.

    check_vma is False, because kernels from libraries do not declare over which axes their results vary. The enclosing
    shard_map of a train step (`sum_gradients` in training/step.py) does not check it either.
    """
    mapped = jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=set(non_manual_axes()), check_vma=False
    )
    return lambda *arrays: mapped(*jax.tree.map(jax.reshard, arrays, in_specs))


def gather_batch_axes(x: jax.Array) -> jax.Array:
    """All-gather `x` along the mesh axes that split the batch: parameters must not be split along these in a matmul."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty:
        return x
    return jax.reshard(x, P(*(tuple(a for a in axes_of(p) if a not in RULES.batch) for p in sharding.spec)))


def reshard_like(like: jax.Array, x: jax.Array) -> jax.Array:
    """Reshard `x` to the sharding of `like`, for gradients: einsum drops the mesh axis of a dim of size 1."""
    sharding = jax.typeof(like).sharding
    return x if sharding.mesh.empty else jax.reshard(x, sharding)


def abstract_arrays(mesh: jax.sharding.Mesh, make: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `make` for (abstract) arguments as ShapeDtypeStructs with shardings on `mesh`.

    Nothing is computed.
    """

    def with_devices(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, leaf.sharding.spec) if leaf.sharding else replicated_sharding(mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with jax.set_mesh(mesh):
        return jax.tree.map(with_devices, jax.eval_shape(make, *arguments))


def replicated_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Return the sharding that keeps a full copy on every device."""
    return jax.NamedSharding(mesh, P())
