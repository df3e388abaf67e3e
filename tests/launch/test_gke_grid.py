"""`pma grid --engine gke`: one JobSet per run, submitted once; and the command of its pods as real processes."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_server
import processes
import pytest
import tiny
import yaml

from pma_jax.cli import main
from pma_jax.launch.job import read_record
from pma_jax.runs.directory import open_run

MANIFEST = Path(__file__).parent / "manifests" / "grid.yaml"
VARY = ["--vary", "training.seed=0,1,2"]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with kubernetes_server.serve(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def grid(tmp_path, workspace, capsys):
    """Return a function that calls `pma grid --engine gke` on three tiny runs: its status, output and errors."""
    config = tiny.write_config(tmp_path / "config.py", workspace)
    fixed = ["--config", config, "--root", tmp_path / "root", "--volume", f"claim:{tmp_path}"]

    def call(*arguments, machines=("--gpus", 8), vary=VARY):
        words = ["grid", "--engine", "gke", *fixed, "--image", "registry/pma:1", *machines, *vary, *arguments]
        capsys.readouterr()
        return main(list(map(str, words))), *capsys.readouterr()

    return call


def manifests(grid, *arguments, **options):
    status, out, error = grid("--dry-run", *arguments, **options)
    assert status == 0, error
    return list(yaml.safe_load_all(out))


def test_manifest_is_the_one_that_was_read_by_eye_and_unchanged_by_the_schema(capsys):
    arguments = ["grid", "--engine", "gke", "--config", "demo", "--root", "/data/grid", "--volume", "claim:/data"]
    arguments += ["--vary", "schedule.peak_rate=1e-3", "--vary", "preview.windows=(3,6)", "--dry-run"]
    arguments += ["--image", "registry/pma:1", "--topology", "2*v6e:4x4", "--queue", "tpus", "--spot"]
    arguments += ["--then", "sweep --windows 3,6", "--then", "export --out {}/model", "--config.training.seed=3"]
    assert main(arguments) == 0
    made = capsys.readouterr().out
    assert made == MANIFEST.read_text()
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert models.JobsetV1alpha2JobSet.from_dict(yaml.safe_load(made)).to_dict() == yaml.safe_load(made)


def test_each_run_is_submitted_once_and_again_when_its_jobset_has_ended(grid, cluster, finished, tmp_path):
    done = tmp_path / "root" / "training.seed=0"
    shutil.copytree(finished.path, done, ignore=shutil.ignore_patterns("lock"))
    expected = {made["metadata"]["name"]: made for made in manifests(grid)}
    assert len(expected) == 2  # the finished run needs none
    status, _, error = grid()
    assert (status, cluster.created) == (
        0,
        expected,
    ) and "created 2 JobSets; 0 are queued or run, 1 runs are done" in error
    suspended, failed = cluster.created.values()
    suspended["spec"]["suspend"] = True
    assert "created 0 JobSets; 2 are queued or run" in grid()[2]
    failed["status"] = {"terminalState": "Failed"}
    rows = {row["name"]: row for row in json.loads(grid("--status", "--json")[1])}
    assert [rows[f"training.seed={seed}"]["state"] for seed in range(3)] == ["finished", "queued", "failed"]
    assert f"kubectl describe jobset {failed['metadata']['name']}" in rows["training.seed=2"]["line"]
    assert "created 1 JobSets; 1 are queued or run" in grid()[2]
    assert "status" not in cluster.created[failed["metadata"]["name"]]


def test_states_of_many_jobsets_are_read_page_by_page(grid, cluster):
    assert grid()[0] == 0 and len(cluster.created) == 3
    rows = json.loads(grid("--status", "--json")[1])
    assert [row["state"] for row in rows] == ["running"] * 3


@pytest.mark.parametrize(
    ("gpus", "arguments", "message"),
    [
        (8, ["--parallel", "2"], "--parallel is not for --engine gke"),
        (8, ["--slurm", "time=5"], "--slurm needs --engine slurm"),
        (8, ["--host", "0"], "--host is for the processes of a job on several hosts"),
        (12, [], "--gpus 12 is not a multiple of the 8 GPUs"),
        (8, ["--namespace", "A_B"], "--namespace 'A_B' is not a name of Kubernetes"),
        (16, ["--then", "export --out {}/m", "--then", "sweep --windows 3"],
         "--then 'sweep --windows 3' runs on all hosts, and 'export --out {}/m' before it on the first only"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(grid, gpus, arguments, message):
    status, out, error = grid(*arguments, machines=("--gpus", gpus))
    assert status == 1 and message in error and error.count("\n") == 1 and out == ""


def test_options_of_the_engine_are_required_and_refused_for_others(tmp_path, capsys):
    words = ["grid", "--config", "demo", "--root", str(tmp_path / "root"), *VARY]
    for more, message in (
        (["--engine", "gke", "--image", "a"], "--engine gke needs --topology or --gpus"),
        (["--engine", "gke", "--gpus", "8"], "--engine gke needs --image"),
        (["--image", "a"], "--image needs --engine gke"),
        (["--engine", "gke", "--image", "a", "--gpus", "8"], f"{tmp_path / 'root'} is a path of this machine"),
    ):
        assert main([*words, *more]) == 1
        assert message in capsys.readouterr().err
    assert main([*words, "--host", "first"]) == 2 and not (tmp_path / "root").exists()


@pytest.mark.slow
def test_the_pods_of_two_hosts_train_sweep_and_export_together(grid, tmp_path):
    """The pods of one run as local processes, with the variables that Kubernetes would resolve; one is killed once."""
    then = ["--then", "sweep --windows 2", "--then", "export --out {}/model"]
    made = manifests(grid, *then, machines=("--gpus", 16), vary=["--vary", "training.seed=1"])
    container = made[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    run = tmp_path / "root" / "training.seed=1"
    pods = start_pods(container)
    wait_for(run / "metrics.jsonl")
    pods[1].kill()
    statuses, errors = end(pods)
    assert statuses[0] in (75, 143), errors  # neither 1 nor 2, after which the JobSet would not start again
    for _ in range(2):  # the rest, and nothing
        statuses, errors = end(start_pods(container))
        assert statuses == [0, 0], errors
        assert read_record(run) == {"done": ["train", *then[1::2]], "failed": None}
    assert (run / "sweep.json").is_file() and (run / "model" / "model.safetensors").is_file()
    assert open_run(run).config.is_run_complete(open_run(run).newest_resumable_state.tokens)
    log = (run / "job.log").read_text()
    assert [log.count(f"$ pma {verb}") for verb in ("train", "sweep", "export")] == [2, 1, 1]


def start_pods(container):
    """Start the command of a container in two processes, as Kubernetes would."""
    port, started = processes.free_port(), []
    for index in range(2):
        indices = {"PMA_SLICE": "0", "PMA_HOST_OF_SLICE": str(index), "JAX_PROCESS_ID": str(index)}
        values = {v["name"]: v.get("value") or indices[v["name"]] for v in container["env"]}
        words = list(container["command"])
        for name, value in values.items():
            words = [word.replace(f"$({name})", value) for word in words]
        values |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "PYTHONPATH": os.pathsep.join(sys.path)}
        values |= {"XLA_FLAGS": processes.xla_flags(2)}
        command = [sys.executable, "-m", "pma_jax.cli", *words[1:]]
        started.append(subprocess.Popen(command, env=os.environ | values, stderr=subprocess.PIPE, text=True))
    return started


def end(pods):
    """Wait for pods; return their exit statuses and errors."""
    errors = [pod.communicate(timeout=300)[1] for pod in pods]
    return [pod.returncode for pod in pods], errors


def wait_for(path, seconds=120):
    """Wait until a file exists."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.05)
