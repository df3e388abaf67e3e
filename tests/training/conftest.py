import jax
import pytest


@pytest.fixture
def compiled_in_a_hurry():
    """XLA's optimisations are off in this test: for many programs that each run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
