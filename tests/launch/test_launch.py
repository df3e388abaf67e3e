"""`pma launch`: manifests against files that were read by eye and the schema, and their commands as real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import kubernetes_server
import processes
import pytest
import yaml

from pma_jax.cli import main
from pma_jax.config.errors import UserError
from pma_jax.launch.machines import gpu_hosts, tpu_slices

MANIFESTS = Path(__file__).parent / "manifests"
TRAIN = ["--", "train", "--config", "dense_1b", "--workdir", "gs://bucket/runs/dense_1b"]
LAUNCH = ["launch", "--engine", "gke", "--image", "registry/pma:1"]
CASES = {
    "two_slices": [*LAUNCH, "--topology", "2*v6e:4x4", "--queue", "tpus", *TRAIN, "--config.training.seed=3"],
    "one_host_spot": [*LAUNCH, "--topology", "v5e:2x2", "--spot", "--name", "small", *TRAIN],
    "gpus": [
        *LAUNCH,
        *("--gpus", "16", "--gpu-type", "nvidia-h100-80gb", "--namespace", "research", "--service-account", "trainer"),
        *("--env", "NAME=a=b", "--volume", "claim:/mnt/data", "--max-restarts", "0"),
        *("--", "merge", "/mnt/data/run", "--last", "10", "--out", "gs://bucket/merged", "--distributed"),
    ],
}


def manifest(arguments, capsys):
    capsys.readouterr()
    assert main([*arguments[: arguments.index("--")], "--dry-run", *arguments[arguments.index("--") :]]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_those_that_were_read_by_eye(name, capsys):
    assert manifest(CASES[name], capsys) == (MANIFESTS / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_unchanged_by_the_schema(name, capsys):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    made = yaml.safe_load(manifest(CASES[name], capsys))
    assert models.JobsetV1alpha2JobSet.from_dict(made).to_dict() == made
    # The schema drops a key that it does not know, at any depth.
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rulez"] = []
    assert models.JobsetV1alpha2JobSet.from_dict(made).to_dict() != made


@pytest.mark.parametrize(
    ("topology", "groups", "hosts", "chips", "accelerator"),
    [
        ("v6e:1x1", 1, 1, 1, "tpu-v6e-slice"),
        ("v5e:2x4", 1, 2, 4, "tpu-v5-lite-podslice"),
        ("3*v6e:16x16", 3, 64, 4, "tpu-v6e-slice"),
        ("v5p:4x4x8", 1, 32, 4, "tpu-v5p-slice"),
        ("v5p:4x8x12", 1, 96, 4, "tpu-v5p-slice"),
        ("v4:2x2x1", 1, 1, 4, "tpu-v4-podslice"),
        ("tpu7x:2x2x2", 1, 2, 4, "tpu7x"),
    ],
)
def test_hosts_of_slices(topology, groups, hosts, chips, accelerator):
    machines = tpu_slices(topology)
    assert (machines.groups, machines.hosts_per_group, machines.devices_per_host) == (groups, hosts, chips)
    assert machines.hosts == groups * hosts
    assert machines.node_labels["cloud.google.com/gke-tpu-accelerator"] == accelerator


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v6e:4x4x4", "v6e has no slices of the shape 4x4x4: give one of 1x1, 2x2"),
        ("v6e:4x12", "v6e has no slices of the shape 4x12"),
        ("v5p:4x4", "v5p has no slices of the shape 4x4"),
        ("v5p:8x4x4", "v5p has no slices of the shape 8x4x4"),
        ("2*v6e:2x2", "joins slices of a single host, which GKE cannot"),
        ("v9:4x4", "unknown topology 'v9:4x4'"),
        ("0*v6e:4x4", "unknown topology"),
    ],
)
def test_slices_that_do_not_exist_are_refused(topology, message):
    with pytest.raises(UserError) as raised:
        tpu_slices(topology)
    assert message in str(raised.value)


def test_hosts_of_gpus():
    assert (gpu_hosts(4, None).hosts, gpu_hosts(4, None).devices_per_host) == (1, 4)
    assert (gpu_hosts(24, "x").hosts, gpu_hosts(24, "x").devices_per_host) == (3, 8)
    with pytest.raises(UserError, match="--gpus 12 is not a multiple of the 8 GPUs of a host"):
        gpu_hosts(12, None)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([*LAUNCH, "--topology", "v6e:4x4"], 2, "give it after --, such as -- train"),
        ([*LAUNCH, *TRAIN], 2, "one of the arguments --topology --gpus is required"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--gpus", "8", *TRAIN], 2, "not allowed with argument"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--gpu-type", "x", *TRAIN], 1, "--gpu-type is for --gpus"),
        (["launch", "--engine", "gke", "--topology", "v6e:4x4", *TRAIN], 2, "required: --image"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--", "train", "--config", "demo"], 2, "required: --workdir"),
        ([*LAUNCH, "--topology", "v6e:4x4", *TRAIN, "--config.training.sede=3"], 1, "training.sede"),
        ([*LAUNCH, "--gpus", "8", "--", "grid", "--config", "demo", "--root", "gs://b/x"], 2, "starts others"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--", "report", "gs://b/run"], 1, "`pma report` runs in one process"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--", "train", "--config", "demo", "--workdir", "runs/x"], 1,
         "runs/x is a path of this machine"),
        ([*LAUNCH, "--gpus", "8", "--volume", "c:/mnt", "--", "fork", "/mntx/run", "--at-tokens", "9", "--workdir",
          "gs://b/y"], 1, "/mntx/run is a path of this machine"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--name", "Big_Run", *TRAIN], 1, "the name 'Big_Run' is not one"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--name", "x" * 41, *TRAIN], 1, "at most 40"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--env", "NAME", *TRAIN], 1, "--env 'NAME': give --env NAME=VALUE once"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--env", "A=1", "--env", "A=2", *TRAIN], 1, "--env 'A=2'"),
        ([*LAUNCH, "--gpus", "8", "--queue", "Tpus", *TRAIN], 1, "--queue 'Tpus' is not a name of Kubernetes"),
        ([*LAUNCH[:3], "--gpus", "8", "--image", "a b", *TRAIN], 1, "--image 'a b' is not the name of a container"),
        ([*LAUNCH, "--topology", "v6e:4x4", "--max-restarts", "-1", *TRAIN], 2, "--max-restarts"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments, status, message, capsys):
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert captured.out == ""


def test_a_sweep_of_a_run_writes_into_the_run(capsys):
    sweep = [*LAUNCH, "--topology", "v6e:4x4", "--", "sweep", "gs://bucket/run"]
    assert "- sweep\n" in manifest(sweep, capsys)
    assert main([*sweep, "--score", "program {}"]) == 1
    assert "sweep is a path of this machine" in capsys.readouterr().err


def test_a_run_that_does_not_fit_is_refused(capsys):
    pytest.importorskip("libtpu")
    at = CASES["one_host_spot"].index("--")
    assert main([*CASES["one_host_spot"][:at], "--dry-run", *TRAIN]) == 1
    assert "the run does not fit in the memory of v5e:2x2" in capsys.readouterr().err


@pytest.mark.slow
def test_the_rendered_command_runs_on_as_many_processes(finished, capsys):
    """The pods of the manifest as local processes, with the variables that Kubernetes would resolve."""
    folder = finished.path.parent
    arguments = [*LAUNCH, "--gpus", "16", "--volume", f"claim:{folder}", "--", "evaluate", str(finished.path), "--json"]
    made = yaml.safe_load(manifest(arguments, capsys))
    job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    assert job["completions"] == 2 and container["command"][-1] == "--distributed"
    host = f"{made['metadata']['name']}-workers-0-0.{made['metadata']['name']}:8476"
    port, started = processes.free_port(), []
    for index in range(job["completions"]):
        values = {variable["name"]: variable.get("value", str(index)) for variable in container["env"]}
        assert values["JAX_COORDINATOR_ADDRESS"] == host
        values |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "PYTHONPATH": os.pathsep.join(sys.path)}
        values["XLA_FLAGS"] = processes.xla_flags(2)
        command = [sys.executable, "-m", "pma_jax.cli", *container["command"][1:]]
        started.append(
            subprocess.Popen(
                command, env=os.environ | values, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    results = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], results
    assert main(["evaluate", str(finished.path), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert json.loads(results[0][0])[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-5)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with kubernetes_server.serve(tmp_path, monkeypatch) as server:
        yield server


def test_a_jobset_is_created_once(cluster, capsys):
    expected = yaml.safe_load((MANIFESTS / "two_slices.yaml").read_text())
    assert main(CASES["two_slices"]) == 0
    assert cluster.created == {expected["metadata"]["name"]: expected}
    assert f"created {expected['metadata']['name']}: 2 slices of 4 hosts" in capsys.readouterr().out
    assert main(CASES["two_slices"]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "exists in the namespace default" in error


@pytest.mark.parametrize(("status", "message"), [(404, "the cluster has no JobSets"), (403, "(403)")])
def test_a_refusal_of_the_cluster_is_one_line(cluster, capsys, status, message):
    cluster.status = status
    assert main(CASES["one_host_spot"]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in error


def test_without_a_configured_cluster_is_one_line(tmp_path, monkeypatch, capsys):
    loader = pytest.importorskip("kubernetes").config.kube_config
    monkeypatch.setattr(loader, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    assert main(CASES["gpus"]) == 1
    assert "no cluster is configured" in capsys.readouterr().err
