"""`pma grid --engine gke`: the JobSets of a grid, their submission and their states."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from pma_jax.cli import run_launch
from pma_jax.config.errors import UserError
from pma_jax.launch import gke, jobset, kubernetes_cluster, progress
from pma_jax.launch.combinations import GridRun, grid_name
from pma_jax.launch.job import Job
from pma_jax.launch.jobset import JobSetting
from pma_jax.launch.kubernetes_cluster import Cluster
from pma_jax.storage.paths import absolute_path

_STATES = {kubernetes_cluster.QUEUED: progress.QUEUED, kubernetes_cluster.RUNNING: progress.RUNNING}


def check(options: argparse.Namespace, runs: Sequence[GridRun]) -> None:
    """Check the options of --engine gke before anything starts.

    Raises:
        UserError: An option is missing or wrong, or a run does not fit into the memory of the TPUs.
    """
    if not (options.topology or options.gpus):
        raise UserError("--engine gke needs --topology or --gpus: the machines of each run")
    if options.image is None:
        raise UserError("--engine gke needs --image: the container image with pma (docs/cloud_tpu.md builds one)")
    if "parallel" in getattr(options, "given", ()):
        raise UserError("--parallel is not for --engine gke: the quota of the queue decides how many runs train")
    run_launch.check_paths([options.root], _setting(options, runs[0]))
    if options.topology and not options.status:
        configs = [(run.name, run.config) for run in runs]
        for note in run_launch.check_runs_fit(configs, options.config, options.topology):
            print(f"note: {note}", file=sys.stderr)


def format_manifests(options: argparse.Namespace, runs: Sequence[GridRun], jobs: Sequence[Job]) -> str:
    """Return the manifests of the runs that are not done as YAML, for `kubectl apply -f -`."""
    return "---\n".join(map(jobset.to_yaml, _manifests(options, runs, jobs).values())).rstrip("\n")


def submit(options: argparse.Namespace, runs: Sequence[GridRun], jobs: Sequence[Job]) -> None:
    """Create the JobSets of the runs that are not done, queued or running."""
    manifests, cluster = _manifests(options, runs, jobs), Cluster()
    namespace = options.namespace or JobSetting.namespace
    created, active = gke.submit(cluster, manifests, cluster.states(namespace, _label(options)), namespace)
    done = len(runs) - len(manifests)
    print(f"created {len(created)} JobSets; {len(active)} are queued or run, {done} runs are done", file=sys.stderr)


def states(options: argparse.Namespace, runs: Sequence[GridRun]) -> dict[str, tuple[str, str]]:
    """Return what the cluster says of each run, by its name: a state of `launch/progress.py`, and a line."""
    namespace = options.namespace or JobSetting.namespace
    found = Cluster().states(namespace, _label(options))
    result = {}
    for run in runs:
        state = found.get(run.job_name)
        if state in _STATES:
            result[run.name] = (_STATES[state], f"JobSet {run.job_name}")
        elif state == kubernetes_cluster.FAILED:
            shown = f"kubectl describe jobset {run.job_name} --namespace {namespace}"
            result[run.name] = (progress.FAILED, f"the JobSet failed without a record of the run: `{shown}`")
    return result


def _label(options: argparse.Namespace) -> str:
    return f"{gke.LABEL}={grid_name(absolute_path(options.root))}"


def _setting(options: argparse.Namespace, run: GridRun) -> JobSetting:
    setting = run_launch.kubernetes_setting(options, run.job_name)
    return dataclasses.replace(setting, labels={gke.LABEL: grid_name(absolute_path(options.root))})


def _manifests(options: argparse.Namespace, runs: Sequence[GridRun], jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """Return the manifests of the runs that are not finished, by the name of the JobSet."""
    machines = run_launch.machines_of(options)
    return {
        run.job_name: jobset.make_jobset(
            _setting(options, run),
            machines,
            gke.pod_command(run, options.config, options.root, options.then, machines.hosts),
        )
        for run, job in zip(runs, jobs, strict=True)
        if progress.read_progress(run, job).state != progress.FINISHED
    }
