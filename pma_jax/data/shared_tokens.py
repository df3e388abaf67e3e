"""Tokens that processes share, on a disk that all hosts see or in a bucket. Unlike data/shards.py, imports JAX."""

from pma_jax import config
from pma_jax.data import shards
from pma_jax.runtime import hosts
from pma_jax.storage.paths import as_path, exists


def prepare_tokens_in_all(data: config.DataConfig) -> shards.TokenSet:
    """Do as `prepare_tokens` in all processes; those that share the cache of the first do not read the corpus.

    A collective operation: all processes must call it.
    """
    directory = hosts.broadcast_from_first(lambda: str(shards.prepare_tokens(data).directory))
    if hosts.is_first_process() or exists(as_path(directory) / shards.META_FILE):
        return shards.open_tokens(directory)
    return shards.prepare_tokens(data, progress=False)  # the host has a disk of its own
