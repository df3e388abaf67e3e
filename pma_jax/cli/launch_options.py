"""The verb `launch` and its options. Does not import JAX."""

import argparse
import sys
from typing import Any

from pma_jax.cli import values

ENGINES = ("gke", "slurm")
# Options of one engine, by the name of the attribute.
OWN_OPTIONS = {
    "gke": ("topology", "gpu_type", "image", "queue", "namespace", "service_account", "spot", "env", "volume"),
    "slurm": ("nodes", "slurm"),
}


def launch(options: argparse.Namespace) -> None:
    r"""Run one command on many hosts of a cluster, and start it again after a failure that may pass.

    Example:
        pma launch --engine gke --topology '2*v6e:4x4' --image us-docker.pkg.dev/my/repo/pma --queue tpus --dry-run \
            -- train --config dense_1b --workdir gs://my-bucket/runs/dense_1b
    """
    from pma_jax.cli import run_launch

    if options.engine == "slurm":
        run_launch.launch_on_slurm(options)
        return
    from pma_jax.launch import jobset

    setting, machines, command = run_launch.plan(options)
    for note in run_launch.check_memory(options):
        print(f"note: {note}", file=sys.stderr)
    manifest = jobset.make_jobset(setting, machines, command)
    if options.dry_run:
        print(jobset.to_yaml(manifest), end="")
        return
    from pma_jax.launch.kubernetes_cluster import Cluster

    Cluster().create(manifest)
    print(f"created {jobset.describe(setting, machines, command)}")
    print(f"kubectl get jobset {setting.name} --namespace {setting.namespace}")


def add_options(verb: argparse.ArgumentParser, append_once: type[argparse.Action]) -> None:
    """Add the options of `pma launch` to its parser."""
    verb.usage = (
        "pma launch --engine gke (--topology T | --gpus N) --image IMAGE [options] -- VERB …\n"
        "       pma launch --engine slurm (--gpus N | --nodes N) --slurm time=MINUTES [options] -- VERB …"
    )
    verb.add_argument(
        "--engine",
        choices=ENGINES,
        required=True,
        help="gke: a JobSet on a Kubernetes cluster; slurm: a batch job (docs/slurm.md)",
    )
    verb.add_argument(
        "--nodes",
        type=values.positive,
        metavar="N",
        help="slurm: hosts with equal shares of --gpus (without it, 8 each); without --gpus, one process on the CPUs "
        "of each",
    )
    verb.add_argument(
        "--slurm",
        action=append_once,
        type=values.parameter,
        default=(),
        metavar="KEY=VALUE",
        help="slurm: an option of sbatch, such as time=240 (minutes, required), partition=gpu, account=lab, "
        "cpus-per-task=8; may be repeated",
    )
    verb.add_argument("--name", help="of the job (default: from the command, the same for the same command)")
    add_machine_options(verb, append_once)
    verb.add_argument("--dry-run", action="store_true", help="print the manifest or the script, and start nothing")


def add_machine_options(verb: argparse.ArgumentParser | Any, append_once: type[argparse.Action]) -> None:
    """Add the options that describe the machines of jobs on a cluster."""
    machines = verb.add_mutually_exclusive_group()
    machines.add_argument("--topology", metavar="CHIP:SHAPE", help="TPUs, such as v6e:4x4; 2*v6e:4x4 is two slices")
    machines.add_argument("--gpus", type=values.positive, metavar="N", help="GPUs in all, 8 on each host")
    verb.add_argument("--gpu-type", metavar="TYPE", help="GKE's name of the GPUs, such as nvidia-h100-80gb")
    verb.add_argument("--image", help="container image with pma (docs/cloud_tpu.md builds one)")
    verb.add_argument("--queue", metavar="NAME", help="Kueue's queue of the namespace (default: none, start at once)")
    verb.add_argument("--namespace", help="of Kubernetes (default: default)")
    verb.add_argument("--service-account", metavar="NAME", help="of Kubernetes, with access to the bucket")
    verb.add_argument("--spot", action="store_true", help="use spot nodes")
    verb.add_argument(
        "--max-restarts",
        type=values.whole,
        default=50,
        metavar="N",
        help="start again at most so often after a lost peer, a preemption or a signal (default 50)",
    )
    for name, form, text in (
        ("--env", "NAME=VALUE", "an environment variable of the processes"),
        ("--volume", "CLAIM:PATH", "mount a PersistentVolumeClaim at a path of the pods"),
    ):
        verb.add_argument(name, action=append_once, default=(), metavar=form, help=f"{text}; may be repeated")


def find_misuse(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the options of `pma launch` for their engine, in one line."""
    other = next(engine for engine in ENGINES if engine != options.engine)
    if given := next((name for name in OWN_OPTIONS[other] if getattr(options, name)), None):
        return f"--{given.replace('_', '-')} is for --engine {other}"
    if options.engine == "slurm":
        return None if options.gpus or options.nodes else "one of the arguments --gpus --nodes is required"
    if not (options.topology or options.gpus):
        return "one of the arguments --topology --gpus is required"
    return None if options.image is not None else "the following arguments are required: --image"


def split_command(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the words of `pma launch` at `--` into those of launch and those of the command that it runs."""
    if argv[:1] != ["launch"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
