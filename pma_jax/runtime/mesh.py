"""The device mesh and the sharding rules: which mesh axis splits which logical dim.

Every axis is explicit: an array's sharding is part of its type, and a product that would need to guess how to move data
is an error, not a surprise. Axes (mesh) and dims (tensor) are two things; `Rules` is where they meet.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import P
from jax.experimental import mesh_utils

from pma_jax.config import Config, MeshConfig

AXES = ("data", "fsdp", "tensor", "expert")


def axes_of(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split one dim: an entry of a partition."""
    return (part,) if isinstance(part, str) else part or ()


def _partition(dims: Sequence[tuple[str, ...]]) -> P:
    return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in dims))


@dataclasses.dataclass(frozen=True)
class Rules:
    """Mesh axis (or axes) of each logical dim; None leaves a dim whole."""

    batch: tuple[str, ...] = ("data", "fsdp", "expert")  # B
    width: str | None = "fsdp"  # D of parameters; activations keep D whole
    heads: str | None = "tensor"  # N and K
    hidden: str | None = "tensor"  # F
    vocabulary: str | None = "tensor"  # V
    experts: str | None = "expert"  # E

    def spec(self, *dims: str | None) -> P:
        """The partition of an array whose dims carry these logical names (None: whole).

        Inside a `jax.shard_map`, where an array is a device's own part, the axes that it is over are left out. Raises
        ValueError when two dims would be split by the same mesh axis.
        """
        gone = jax.sharding.get_abstract_mesh().manual_axes
        named = [getattr(self, dim) if dim else None for dim in dims]
        split = [tuple(a for a in axes_of(axis) if a not in gone) for axis in named]
        flat = [a for axes in split for a in axes]
        for axis in flat:
            if flat.count(axis) > 1:
                raise ValueError(f"dims {dims} are both split by mesh axis {axis!r}: change one of the sharding rules")
        return _partition(split)


RULES = Rules()


def make_mesh(sizes: MeshConfig) -> jax.sharding.Mesh:
    """An explicit mesh over all devices; the CPU counts as `cpu_devices` of them if JAX starts here.

    Raises ValueError when the sizes do not multiply to the number of devices.
    """
    if sizes.cpu_devices:
        with contextlib.suppress(RuntimeError):  # JAX has started: the devices are what they are
            jax.config.update("jax_num_cpu_devices", sizes.cpu_devices)
    return mesh_over(jax.devices(), sizes)


def mesh_over(devices: Sequence[jax.Device], sizes: MeshConfig) -> jax.sharding.Mesh:
    """An explicit mesh over `devices`, which need not be this machine's.

    Of several slices of TPUs each holds whole replicas: the axis `data` goes across them, and all others, which
    exchange much more, stay inside one. Raises ValueError when the sizes do not multiply to the number of devices, or
    a replica does not fit in a slice.
    """
    shape = [sizes.data, sizes.fsdp, sizes.tensor, sizes.expert]
    count = len(devices)
    if shape.count(-1) > 1 or any(size == 0 or size < -1 for size in shape):
        raise ValueError(f"mesh sizes {dict(zip(AXES, shape, strict=True))}: each is 1 or more, and at most one is -1")
    if -1 in shape:
        rest = -math.prod(shape)
        shape[shape.index(-1)] = max(count // rest, 1)
    if math.prod(shape) != count:
        raise ValueError(
            f"mesh {dict(zip(AXES, shape, strict=True))} needs {math.prod(shape)} devices, and {count} are here"
        )
    slices = _slices(devices)
    if shape[0] % len(slices):
        raise ValueError(
            f"mesh.data is {shape[0]}, and {len(slices)} slices of {len(slices[0])} devices share the replicas: make "
            f"mesh.data a multiple of {len(slices)}, and the other axes what one slice has devices for"
        )
    inside = (shape[0] // len(slices), *shape[1:])
    parts = [_slice_mesh(of_slice, inside) for of_slice in slices]
    return jax.sharding.Mesh(np.concatenate(parts), AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))


def _slices(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each slice of TPUs, which are joined by the data center's network; else all in one."""
    found: dict[int, list[jax.Device]] = {}
    for device in devices:
        # The devices of a single slice do not say which one it is; GPUs use the word for a host.
        index = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        found.setdefault(index, []).append(device)
    sizes = {len(of_slice) for of_slice in found.values()}
    if len(sizes) > 1:
        raise ValueError(f"slices of {sorted(sizes)} devices: a mesh goes over slices of one size")
    return [found[index] for index in sorted(found)]


def _slice_mesh(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    try:
        return jax.make_mesh(shape, AXES, devices=devices).devices
    except NotImplementedError:  # an axis of the mesh is only a part of one of the TPU's torus
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def platform_of(mesh: jax.sharding.Mesh) -> str:
    """The platform of the mesh's devices, such as cpu, gpu or tpu: what a program for it is compiled for."""
    return mesh.devices.flat[0].platform


def check_mesh(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Check that `config` can be trained on `mesh`.

    Raises ValueError that names a size which does not divide over the mesh axes that split it, or says that the CPU
    does not count as `mesh.cpu_devices`.
    """
    wanted, here = config.mesh.cpu_devices, jax.local_device_count()
    if wanted and wanted != here and platform_of(mesh) == "cpu":
        raise ValueError(
            f"mesh.cpu_devices is {wanted}, and JAX already runs with {here} in this process: train in a fresh one, or "
            f"set it to {here}"
        )
    model, training = config.model, config.training
    sizes = {
        "training.batch_size_sequences / accumulation_steps": (
            "batch",
            training.batch_size_sequences // training.accumulation_steps,
        ),
        "evaluation.batch_size_sequences": ("batch", config.evaluation.batch_size_sequences),
        "model.width": ("width", model.width),
        "model.heads": ("heads", model.heads),
        "model.kv_heads": ("heads", model.kv_heads),
        "model.vocabulary_size": ("vocabulary", model.vocabulary_size),
    }
    if model.experts:
        sizes |= {"model.experts": ("experts", model.experts), "model.expert_hidden": ("hidden", model.expert_hidden)}
    else:
        sizes |= {"model.hidden": ("hidden", model.hidden)}
    for key, (dim, size) in sizes.items():
        axes = getattr(RULES, dim)
        axes = axes if isinstance(axes, tuple) else (axes,)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise ValueError(f"{key} is {size}, and {' x '.join(axes)} splits it in {parts}: change it or the mesh")


def rows_here(mesh: jax.sharding.Mesh, batch_size_sequences: int) -> np.ndarray:
    """The rows of a batch that this process's devices hold, increasing: what it has to read.

    All of them on one process. Where a mesh axis that does not split the batch goes across processes, several hold the
    same rows.
    """
    sharding = jax.NamedSharding(mesh, RULES.spec("batch"))
    shares = sharding.addressable_devices_indices_map((batch_size_sequences,)).values()
    return np.unique(np.concatenate([np.arange(batch_size_sequences)[rows] for rows in shares]))


def local_mesh() -> jax.sharding.Mesh:
    """All devices along `data`: what evaluation and merging use when no mesh is named."""
    return make_mesh(MeshConfig())


def gathered(x: jax.Array) -> jax.Array:
    """`x` whole along the mesh axes that split the batch: what parameters are, where they meet the batch."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty:
        return x
    return jax.reshard(x, _partition([tuple(a for a in axes_of(p) if a not in RULES.batch) for p in sharding.spec]))


def placed_as(like: jax.Array, x: jax.Array) -> jax.Array:
    """`x` with the sharding of `like`: for gradients, as an einsum forgets the axis of a dim of size 1."""
    sharding = jax.typeof(like).sharding
    return x if sharding.mesh.empty else jax.reshard(x, sharding)


def abstract_on(mesh: jax.sharding.Mesh, make: Callable[[], Any]) -> Any:
    """Shape, dtype and sharding on `mesh` of each leaf that `make` would return; nothing is computed."""

    def on_devices(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, leaf.sharding.spec) if leaf.sharding else replicated(mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with jax.set_mesh(mesh):
        return jax.tree.map(on_devices, jax.eval_shape(make))


def replicated(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """The sharding that keeps a whole copy on every device."""
    return jax.NamedSharding(mesh, P())
