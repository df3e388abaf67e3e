"""A second process finds every program of a run in `runtime.compile_cache_dir`, on a disk and in a bucket."""

import json
import os
import subprocess
import sys

import local_bucket
import pytest
import tiny

from pma_jax import config
from pma_jax.config.errors import UserError
from pma_jax.runs.directory import open_run
from pma_jax.training.loop import train

# Trains a run in a new process, and prints how many programs JAX compiled, and how many it loaded from its cache.
CODE = """
import collections, json, os, sys
if "LOCAL_BUCKETS" in os.environ:
    import local_bucket
    local_bucket.install()
import jax
from pma_jax import config
from pma_jax.training.loop import train
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
train(config.from_json(open(sys.argv[1]).read()), sys.argv[2])
print(json.dumps([events[f"/jax/compilation_cache/cache_{kind}"] for kind in ("misses", "hits")]))
"""


def count_programs(config_file, workdir, environment):
    """Return the numbers of programs that a new process compiles, and that it loads, to train the run in `workdir`."""
    without_cache = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    command = tiny.python(CODE, config_file, workdir)
    environment = without_cache | {"PYTHONPATH": os.pathsep.join(["tests", *sys.path])} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_another_run_and_a_resumed_one_compile_nothing(workspace, tmp_path, place):
    (tmp_path / "bucket").mkdir()
    server, environment = local_bucket.serve(tmp_path)
    cache = "gs://bucket/compiled" if place == "bucket" else str(tmp_path / "bucket" / "compiled")
    config_file = tmp_path / "config.json"
    config_file.write_text(config.to_json(tiny.config(workspace, runtime__compile_cache_dir=cache)))
    compiled, _ = count_programs(config_file, tmp_path / "first", environment if place == "bucket" else {})
    assert compiled > 5
    assert len(list((tmp_path / "bucket" / "compiled").glob("*-cache"))) == compiled
    if place == "disk":
        assert count_programs(config_file, tmp_path / "second", {}) == [0, compiled]

    run = open_run(tmp_path / "first")
    for saved in run.states + run.snapshots:
        if saved.step > 8:
            saved.path.rmtree()
    again, loaded = count_programs(config_file, tmp_path / "first", environment if place == "bucket" else {})
    assert again == 0 and loaded > 0
    server.shutdown()


def test_cache_directory_that_cannot_be_created_is_one_line_before_the_run_is_created(workspace, tmp_path):
    (tmp_path / "file").write_text("")
    keys = tiny.config(workspace, runtime__compile_cache_dir=str(tmp_path / "file" / "compiled"))
    with pytest.raises(UserError, match=r"^runtime.compile_cache_dir .*/file/compiled: .*Not a directory"):
        train(keys, tmp_path / "run")
    assert not (tmp_path / "run").exists()
