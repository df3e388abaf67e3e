"""The installed jaxlib has none of the defects for which pyproject.toml excludes versions.

A process without XLA_FLAGS runs each program, as a crash in XLA ends the process.
"""

import os
import subprocess
import sys

import pytest

# jax-ml/jax#39103: jaxlib 0.10.2 returns some of the rows in place of others from row 32,768 on.
PRODUCT_AND_SUM = """
x = np.random.default_rng(0).standard_normal((40_000, 3)).astype(np.float32)
m = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)
rows = jax.jit(jax.vmap(lambda row: jnp.sum((m @ row) ** 2)))(x)
np.testing.assert_allclose(rows, ((x.astype(np.float64) @ m.T) ** 2).sum(axis=1), rtol=1e-4)
"""
# jax-ml/jax#40412: jaxlib 0.10.2 crashes.
RANK_7 = """
x, y = np.random.default_rng(0).standard_normal((2, 3, 1, 2, 2, 8, 8, 8)).astype(np.float32)
np.testing.assert_allclose(jax.jit(lambda x, y: jnp.sum(x * y, axis=3))(x, y), (x * y).sum(axis=3), atol=1e-5)
"""
# jax-ml/jax#39257: jaxlib 0.10.2 and 0.11.0 crash.
RANK_8 = """
x = np.ones((10, 4, 6, 1, 1, 1, 1, 1), np.float32)
y = np.random.default_rng(0).standard_normal((10, 4, 6, 3, 3, 9, 9, 9)).astype(np.float32)
np.testing.assert_allclose(jax.jit(lambda x, y: jnp.sum(x * y, axis=2))(x, y), y.sum(axis=2), atol=1e-5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [PRODUCT_AND_SUM, RANK_7, RANK_8], ids=["product_and_sum", "rank_7", "rank_8"])
def test_xla_on_cpu_computes_what_numpy_does(program):
    code = "import jax, jax.numpy as jnp, numpy as np\n" + program
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
