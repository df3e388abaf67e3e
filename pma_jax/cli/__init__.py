"""The command line: `pma VERB …`."""

from pma_jax.cli.verbs import main

__all__ = ["main"]
