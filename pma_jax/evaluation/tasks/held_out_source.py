"""The held-out documents of a run, as text.

They are decoded from the prepared tokens, so they are exactly those that the run was not trained on, divided into the
same parts as for losses (data/sampling.py), and a large corpus is not read again.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from pma_jax.config import Config
from pma_jax.data import shards
from pma_jax.data.sampling import order_documents
from pma_jax.data.tokenizer import Tokenizer, load_tokenizer
from pma_jax.runtime import hosts


@dataclasses.dataclass(frozen=True)
class HeldOutText:
    """A part of the held-out text of a corpus."""

    tokens: shards.TokenSet
    part: str  # one of `data.sampling.PARTS`, or `ALL`

    def read(self, limit: int) -> Iterator[str]:
        """Yield the first `limit` documents of the part, in the order of samples; each text once."""
        tokenizer = load_tokenizer(self.tokens.directory / "tokenizer.json")
        ends_D = self.tokens.held_out_documents["end"].astype(np.int64)
        seen: set[str] = set()
        for index in order_documents(self.tokens, self.part)[:limit]:
            start = ends_D[index - 1] if index else 0
            text = _decode(tokenizer, self.tokens.validation.ids[start : ends_D[index] - 1].astype(np.int64))
            if text not in seen:
                seen.add(text)
                yield text


def open_held_out_text(config: Config | None, part: str) -> HeldOutText:
    """Open a part of the held-out text of a run's corpus; of the default configuration's if `config` is None.

    Raises:
        UserError: The corpus cannot be read.
    """
    data = (config or Config()).data
    return HeldOutText(shards.prepare_tokens(data, progress=hosts.is_first_process()), part)


def _decode(tokenizer: Tokenizer, ids_T: np.ndarray) -> str:
    """Decode a document; the ids of its prompt are stored as complements (data/shards.py)."""
    ids_T = np.where(ids_T < 0, ~ids_T, ids_T)
    if tokenizer.is_bytes:
        return ids_T.astype(np.uint8).tobytes().decode()
    return tokenizer.backend.decode(ids_T.tolist(), skip_special_tokens=False)
