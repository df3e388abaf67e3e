"""The command line `pma VERB …`: `main` runs it, `pma_jax.cli.arguments.parser` describes it."""

from pma_jax.cli.command import main

__all__ = ["main"]
