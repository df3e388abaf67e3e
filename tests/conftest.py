"""Eight simulated CPU devices for every test, `--slow` for the long ones, and one tiny finished run to read."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

# Each test process compiles a program once: a tiny run takes 2 seconds instead of 16. Gone when the session ends.
_compiled = tempfile.TemporaryDirectory(prefix="pma-tests-compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def pytest_unconfigure():
    _compiled.cleanup()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder with the tiny corpus and its token cache: `tiny.config(workspace)` trains on it."""
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="session")
def finished(workspace):
    """The tiny run, trained to its horizon without interruption. To be read, not changed: copy it first."""
    import tiny

    from pma_jax.training.loop import train

    return train(tiny.config(workspace), workspace / "finished")


@pytest.fixture
def compiled_in_a_hurry():
    """XLA's optimisations are off in this test: for many programs that each run a few times."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
