"""Which checkpoints a run keeps: two rules, of snapshots and of states, as Orbax's preservation policies."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from pma_jax.config import Config


@dataclasses.dataclass(frozen=True)
class KeepWindows:
    """Orbax preservation: the newest `keep_windows` times N snapshots, and those at the archive's token marks."""

    config: Config

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One decision a checkpoint, oldest first."""
        del context
        keep = self.config.checkpoint
        newest = keep.keep_windows * keep.window if keep.keep_windows else len(checkpoints)
        archive = keep.archive_interval_tokens
        return [
            i >= len(checkpoints) - newest or bool(archive and self.config.is_mark(c.metrics["tokens"], archive))
            for i, c in enumerate(checkpoints)
        ]


@dataclasses.dataclass(frozen=True)
class KeepStates:
    """Orbax preservation: the newest `keep_states` states, and those that the configuration names."""

    config: Config

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One decision a checkpoint, oldest first."""
        del context
        newest = self.config.checkpoint.keep_states
        return [
            i >= len(checkpoints) - newest or self.config.is_named_state(c.metrics["tokens"])
            for i, c in enumerate(checkpoints)
        ]
