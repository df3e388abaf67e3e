"""Previews: merges of a run's newest snapshots, from copies of them in host memory."""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pma_jax.merging.averager import weighted_sum
from pma_jax.merging.recipes import coefficients


class Window:
    """A buffer of the newest `size` consecutive snapshots: their parameters in host memory, with their shardings.

    Args:
        size: Number of snapshots.
        are_consecutive: Function of the tokens of two snapshots, the older first: whether the run saves none between.
    """

    def __init__(self, size: int, are_consecutive: Callable[[int, int], bool]):
        self.size, self._are_consecutive = size, are_consecutive
        self._newest: collections.deque[tuple[int, Any]] = collections.deque(maxlen=size)

    @property
    def tokens(self) -> list[int]:
        """Token counts of the snapshots, oldest first."""
        return [tokens for tokens, _ in self._newest]

    def add(self, tokens: int, params: Any) -> None:
        """Copy `params` (arrays on devices) to host memory; they may be donated afterwards.

        If a snapshot is missing between the newest one and this one, the window starts again with this one, because a
        merge with a gap would be another merge than its name says.
        """
        if self._newest and not self._are_consecutive(self._newest[-1][0], tokens):
            self._newest.clear()
        if self.size:
            self._newest.append((tokens, _to_memory_kind(params, "pinned_host")))

    def merges(self, recipe: str, windows: Sequence[int]) -> Iterator[tuple[str, Any]]:
        """Yield (`RECIPE:N`, merge of the N newest snapshots, on the devices) for each N of `windows`, smallest first.

        An N that is greater than the number of snapshots in the buffer is skipped.
        """
        newest = list(self._newest)
        for n in sorted(n for n in windows if n <= len(newest)):
            tokens = [t for t, _ in newest[-n:]]
            params = [_to_memory_kind(p, "device") for _, p in newest[-n:]]
            yield f"{recipe}:{n}", weighted_sum(params, coefficients(recipe, tokens))


def _to_memory_kind(params: Any, memory_kind: str) -> Any:
    """Copy arrays to this kind of memory, each shard on its own device.

    Each process moves its own shards: on an array that several processes share, jax.device_put runs a compiled program,
    and XLA in jaxlib 0.10.1 rejects that program if the array is replicated.
    """
    shards = jax.tree.map(lambda x: [shard.data for shard in x.addressable_shards], params)
    moved = jax.device_put(shards, jax.tree.map(lambda x: x.sharding.with_memory_kind(memory_kind), shards))
    return jax.tree.map(
        lambda x, own: jax.make_array_from_single_device_arrays(x.shape, x.sharding.with_memory_kind(memory_kind), own),
        params,
        moved,
    )
