"""`pma launch`: from the options to a job on other machines, checked before it starts."""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.launch import batch_script, jobset
from pma_jax.launch.batch_script import BatchSetting
from pma_jax.launch.jobset import JobSetting
from pma_jax.launch.machines import Machines, gpu_hosts, tpu_slices
from pma_jax.storage.paths import is_bucket

# Options and arguments of the verbs that name directories.
_PATHS = ("workdir", "run", "source", "target", "snapshot", "model", "weights", "out")
_LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # of each node of a cluster


def plan(options: argparse.Namespace) -> tuple[JobSetting, Machines, list[str]]:
    """Return the job, its machines, and the words of the command that each host runs.

    Raises:
        UserError: The command cannot run on these machines, or an option is not one that the cluster takes.
    """
    machines = machines_of(options)
    command = ["pma", *_command(options, machines.hosts)]
    setting = kubernetes_setting(options, options.name or _name(options))
    check_paths(_paths(options.command_options), setting)
    return setting, machines, command


def machines_of(options: argparse.Namespace) -> Machines:
    """Return the machines that --topology, or --gpus and --gpu-type, describe."""
    if options.gpu_type is not None and options.gpus is None:
        raise UserError("--gpu-type is for --gpus")
    return tpu_slices(options.topology) if options.gpus is None else gpu_hosts(options.gpus, options.gpu_type)


def kubernetes_setting(options: argparse.Namespace, name: str) -> JobSetting:
    """Return what a cluster needs to know of the job `name`.

    Raises:
        UserError: An option is not one that Kubernetes takes.
    """
    names = {"--queue": options.queue, "--namespace": options.namespace, "--service-account": options.service_account}
    for option, text in names.items():
        if text is not None:
            jobset.check_label(option, text)
    if not re.fullmatch(r"[\w][\w./:@-]*", options.image, re.ASCII):
        raise UserError(f"--image {options.image[:80]!r} is not the name of a container image, such as registry/pma:1")
    return JobSetting(
        name=jobset.check_name(name),
        image=options.image,
        queue=options.queue,
        namespace=options.namespace or "default",
        max_restarts=options.max_restarts,
        service_account=options.service_account,
        is_spot=options.spot,
        environment=_pairs(options.env, "=", "--env NAME=VALUE"),
        volumes=_pairs(options.volume, ":", "--volume CLAIM:PATH", is_key_last=True),
    )


def launch_on_slurm(options: argparse.Namespace) -> None:
    """Submit the command as a batch job of SLURM; with `--dry-run`, print the script.

    Raises:
        UserError: The command cannot run on these nodes, or SLURM does not take it.
    """
    setting = _batch_setting(options)
    command = [sys.executable, "-m", "pma_jax.cli", *_command(options, setting.tasks)]
    _check_shared(options.command_options, setting.nodes)
    script = batch_script.make_script(setting, command)
    if options.dry_run:
        print(script, end="")
        return
    print(f"submitted job {batch_script.submit(script, setting.name)} with the name {setting.name}")


def _batch_setting(options: argparse.Namespace) -> BatchSetting:
    if options.gpus is None:
        nodes, gpus_per_node = options.nodes, 0
    else:
        nodes = options.nodes or gpu_hosts(options.gpus, None).hosts
        gpus_per_node, rest = divmod(options.gpus, nodes)
        if rest or not gpus_per_node:
            raise UserError(f"--gpus {options.gpus} is not a multiple of --nodes {nodes}: nodes have equal shares")
    keys = [key.replace("_", "-") for key, _ in options.slurm]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(f"--slurm {repeated} is given twice; keep one")
    name = jobset.check_name(options.name or _name(options))
    values = dict(zip(keys, (value for _, value in options.slurm), strict=True))
    return BatchSetting(name, nodes, gpus_per_node, values, options.max_restarts)


def _command(options: argparse.Namespace, processes: int) -> list[str]:
    """Return the words after `pma` that each of the processes runs."""
    verb = options.command_options
    if processes == 1:
        return options.command
    if not hasattr(verb, "distributed"):
        raise UserError(f"`pma {verb.verb}` runs in one process, and this is a job of {processes}")
    return options.command + ([] if verb.distributed else ["--distributed"])


def check_memory(options: argparse.Namespace) -> list[str]:
    """Check that a run fits into the memory of the TPUs, by `pma plan`.

    Returns:
        Notes on what could not be checked.

    Raises:
        UserError: It does not fit, or its mesh or batch does not fit the devices.
    """
    verb = options.command_options
    if verb.verb != "train" or options.topology is None:
        return []
    if verb.config.endswith(".py") and not Path(verb.config).is_file():
        return [f"{verb.config} is not on this machine: whether the run fits into memory was not checked"]
    config = configuration.resolve(configuration.load(verb.config), verb.overrides)
    return check_runs_fit([("the run", config)], verb.config, options.topology)


def check_runs_fit(runs: Sequence[tuple[str, Config]], config_name: str, slices: str) -> list[str]:
    """Check that runs, given by name and configuration, fit into the memory of TPU slices; as `check_memory` does."""
    notes = [f"{config_name} must be in the image, at the same path"] if config_name.endswith(".py") else []
    if importlib.util.find_spec("libtpu") is None:
        return [*notes, "whether the run fits into memory was not checked: pip install 'pma-jax[plan]'"]
    from pma_jax.planning import aot, run_plan

    topology = aot.tpu_topology(slices)
    planned = set()
    for name, config in runs:
        # Rates and seeds do not affect the program.
        program = dataclasses.replace(
            config,
            schedule=dataclasses.replace(config.schedule, peak_rate=1.0),
            training=dataclasses.replace(config.training, seed=0),
        )
        if program in planned:
            continue
        planned.add(program)
        # The bandwidths and the share do not affect the memory.
        estimates = run_plan.plan_run(
            config, topology, storage_bytes_per_second=1e9, host_bytes_per_second=1e9, annealing_share=0.2
        )
        if messages := run_plan.out_of_memory_messages(estimates):
            raise UserError(f"{name} does not fit in the memory of {slices}: {'; '.join(messages)}")
    return notes


def _name(options: argparse.Namespace) -> str:
    """Return a name for a command: its verb, the last part of its directory, and a digest of all words."""
    command = options.command
    directory = next((word for word in command if is_bucket(word)), next(iter(_paths(options.command_options)), ""))
    words = re.sub(r"[^a-z0-9]+", "-", f"{command[0]}-{PurePosixPath(directory).name}".lower()).strip("-")
    digest = hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()[:8]
    return f"pma-{words[: jobset.MAX_NAME_CHARACTERS - 13].strip('-')}-{digest}"


def _paths(verb: argparse.Namespace) -> list[str]:
    # The sweep of a run writes into the run, and not into the default of --out.
    is_of_run = verb.verb == "sweep" and verb.score is None and len(verb.source) == 1 and verb.out == "sweep"
    values = [getattr(verb, name, None) or () for name in _PATHS if not (is_of_run and name == "out")]
    return [path for value in values for path in ([value] if isinstance(value, str) else value)]


def _check_shared(verb: argparse.Namespace, nodes: int) -> None:
    """Check that no directory of a command is in a folder that each node has for itself."""
    for path in _paths(verb) if nodes > 1 else ():
        if not is_bucket(path) and any(Path(path).absolute().is_relative_to(folder) for folder in _LOCAL_FOLDERS):
            raise UserError(f"{path} is on the disk of one node: give a path on a disk that all {nodes} nodes share")


def check_paths(paths: Sequence[str], setting: JobSetting) -> None:
    """Check that directories exist for the pods of a job, whose own disks are lost with them."""
    for path in paths:
        is_mounted = any(PurePosixPath(path).is_relative_to(folder) for folder in setting.volumes)
        if not is_bucket(path) and not is_mounted and not path.startswith("hf://"):
            raise UserError(
                f"{path} is a path of this machine, and the disk of a pod is lost with it: give a gs:// address, "
                "or mount a volume with --volume CLAIM:PATH"
            )


def _pairs(texts: Sequence[str], separator: str, form: str, is_key_last: bool = False) -> dict[str, str]:
    """Split texts at their first separator into a dict; `is_key_last`: the second part is the key."""
    pairs = {}
    for text in texts:
        first, _, second = text.partition(separator)
        key, value = (second, first) if is_key_last else (first, second)
        if not first or not second or key in pairs:
            raise UserError(f"{form.split()[0]} {text!r}: give {form} once for each")
        pairs[key] = value
    return pairs
