"""Token ids in a bucket, of which only the ranges that are asked for are read.

Shapes: T tokens, n indices, b windows, W tokens of a window.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.storage.paths import file_system


class BucketIds:
    """A vector of ids in an object, which is read like a read-only array.

    Args:
        path: The address of the object: little-endian ids.
        dtype: Their type.
        size: Their number, T.
    """

    ndim = 1

    def __init__(self, path: Path, dtype: np.dtype, size: int):
        self.dtype, self.size = dtype, size
        self._address = str(path)
        self._system, self._key = file_system(self._address)  # fsspec's systems may be used by several threads

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return the ids in a slice, or at indices of any shape, which are read as runs of neighbours."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self.size)
            assert step == 1
            return self.read_ranges([start], [max(start, stop)])[0]
        flat_n = np.asarray(index).reshape(-1)
        if not flat_n.size:
            return np.empty(np.shape(index), self.dtype)
        step_n = np.diff(flat_n)
        bounds = [0, *(np.flatnonzero((step_n < 0) | (step_n > 1)) + 1).tolist(), flat_n.size]
        runs = [flat_n[start:stop] for start, stop in itertools.pairwise(bounds)]
        ranges = self.read_ranges([int(run[0]) for run in runs], [int(run[-1]) + 1 for run in runs])
        found = [ids[run - run[0]] for ids, run in zip(ranges, runs, strict=True)]
        return np.concatenate(found).reshape(np.shape(index))

    def read_windows(self, starts_b: np.ndarray, window_tokens: int) -> np.ndarray:
        """Read ids [start, start + window_tokens) for each start, at the same time; return them as [b, W]."""
        starts = starts_b.tolist()
        return np.stack(self.read_ranges(starts, [start + window_tokens for start in starts]))

    def read_ranges(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        """Read ids [start, stop) for each pair, at the same time.

        Raises:
            OSError: A range cannot be read.
        """
        item = self.dtype.itemsize
        wanted = [i for i, (start, stop) in enumerate(zip(starts, stops, strict=True)) if stop > start]
        contents = self._system.cat_ranges(
            [self._key] * len(wanted),
            [starts[i] * item for i in wanted],
            [stops[i] * item for i in wanted],
            on_error="raise",
        )
        ranges = [np.empty(0, self.dtype)] * len(starts)
        for i, content in zip(wanted, contents, strict=True):
            if len(content) != (stops[i] - starts[i]) * item:
                raise OSError(f"{self._address} is shorter than its description says")
            ranges[i] = np.frombuffer(content, self.dtype)
        return ranges
