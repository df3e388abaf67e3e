"""Previews: the merged model of the newest snapshots, while they are still at hand."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from pma_jax.merging.averager import average
from pma_jax.merging.recipes import coefficients


class Window:
    """The newest snapshots' parameters in host memory, sharded as they were: `size` times one model, no more."""

    def __init__(self, size: int):
        self.size = size
        self._held: collections.deque[tuple[int, Any]] = collections.deque(maxlen=size)

    def add(self, tokens: int, params: Any) -> None:
        """Copy `params` (arrays on devices) to host memory; the devices' arrays may be donated afterwards."""
        if self.size:
            self._held.append((tokens, _moved(params, "pinned_host")))

    def merges(self, recipe: str, windows: Sequence[int]) -> Iterator[tuple[str, Any]]:
        """`(recipe:N, merged parameters on the devices)` for each N that has enough snapshots, smallest first."""
        held = list(self._held)
        for n in sorted(n for n in windows if n <= len(held)):
            tokens = [t for t, _ in held[-n:]]
            params = [_moved(p, "device") for _, p in held[-n:]]
            yield f"{recipe}:{n}", average(params, coefficients(recipe, tokens))


def _moved(params: Any, memory_kind: str) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(memory_kind)), params)
