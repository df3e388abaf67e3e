"""Configure the test session: simulated CPU devices, `--slow`, a compilation cache, and one finished tiny run.

A process simulates eight devices, or as many as `PMA_TEST_DEVICES` says. `make test` runs the tests marked `mesh` with
eight and all others with one, which compiles and steps several times faster; with eight every test passes.
"""

import gc
import importlib.metadata
import os
import signal
from pathlib import Path

# A job in the background of a shell script ignores SIGINT, and so would every command that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEVICES = int(os.environ.setdefault("PMA_TEST_DEVICES", "8"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the cost of the tests' small programs is compilation, which takes a third less without XLA's optimisations,
# and a third of that with its earlier emitters of fused loops. `.ci/run` runs the tests that compare bits a second time
# as users' programs are compiled (JAX_DISABLE_MOST_OPTIMIZATIONS=0).
unoptimized = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") not in ("0", "false")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={DEVICES}"]
    # A process ends at a flag that its XLA does not know.
    if unoptimized and importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

# All test processes and later sessions share compiled programs: a tiny run takes 2 s instead of 16 s.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))
# XLA logs an error line about its tuning preferences for each program that it loads from the cache.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# Disable deadlines: on a busy machine an example may take arbitrarily long.
hypothesis.settings.register_profile(
    "untimed", max_examples=50, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow and long too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow or long: run with --slow")
    for item in items:
        if item.keywords.keys() & {"slow", "long"}:
            item.add_marker(skip)


def pytest_collection_finish():
    # The garbage collector takes 5% of the time if it visits all imported modules again and again.
    gc.freeze()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """Return a folder for the tiny corpus and its token cache: `tiny.config(workspace)` trains on it."""
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="session")
def finished(workspace):
    """Train the tiny run to its horizon without interruption. Read-only: copy it before changing it."""
    import tiny

    from pma_jax.training.loop import train

    return train(tiny.config(workspace), workspace / "finished")


@pytest.fixture(scope="session")
def finished_with_block_means(finished, tmp_path_factory):
    """Return a copy of the finished run with a block mean at each point. Read-only: copy it before changing it."""
    import shutil

    import tiny

    from pma_jax.runs.directory import open_run

    run = open_run(shutil.copytree(finished.path, tmp_path_factory.mktemp("block_means") / "run"))
    tiny.write_block_means(run)
    return run
