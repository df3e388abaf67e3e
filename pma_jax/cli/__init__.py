"""The command line `pma VERB …`: `main` runs it, `parser` describes it."""

from pma_jax.cli.arguments import parser
from pma_jax.cli.command import main

__all__ = ["main", "parser"]
