"""The GKE engine: each run of a grid as one JobSet of Kubernetes, in a queue of Kueue.

The pods of a JobSet run `pma grid` for their one run. It does what is left of the job, and records it in the
directory of the run; a JobSet that starts again therefore goes on where it was. Kubernetes knows which JobSets are
queued or run: their names follow from the directories of the runs, and a label from the root of the grid.
"""

from collections.abc import Mapping, Sequence

from pma_jax.config.errors import UserError
from pma_jax.launch import combinations, kubernetes_cluster
from pma_jax.launch.combinations import GridRun
from pma_jax.launch.jobset import HOST
from pma_jax.launch.kubernetes_cluster import Cluster

LABEL = "pma-grid"


def pod_command(run: GridRun, config_name: str, root: str, then: Sequence[str], hosts: int) -> list[str]:
    """Return the command that each host of a run's JobSet runs.

    Args:
        run: The run.
        config_name: A configuration file in the image, or the name of a shipped one.
        root: The directory of the grid.
        then: The verbs after the training.
        hosts: Hosts of the JobSet.

    Raises:
        UserError: A value cannot be written as `--vary KEY=VALUE`.
    """
    # A value with commas is a list, and is written in brackets.
    vary = [f"{key}=({value})" if "," in value else f"{key}={value}" for key, value in run.varied.items()]
    if combinations.combine(vary, ()) != [dict(run.varied)]:
        raise UserError(f"{run.name}: --engine gke cannot pass such a value to a pod: choose another")
    fixed = run.overrides[: len(run.overrides) - len(run.varied)]
    words = ["pma", "grid", "--config", config_name, "--root", root]
    words += [word for text in vary for word in ("--vary", text)]
    words += [word for text in then for word in ("--then", text)]
    words += ["--host", HOST] if hosts > 1 else []
    return words + [f"--config.{override}" for override in fixed]


def submit(
    cluster: Cluster, manifests: Mapping[str, dict], states: Mapping[str, str], namespace: str
) -> tuple[list[str], list[str]]:
    """Create the JobSets that are neither queued nor running, and return their names, and the names of the others.

    A JobSet that has ended although its job is not done is deleted and created again.

    Args:
        cluster: The cluster.
        manifests: Manifests of the jobs that are not done, by the name of the JobSet.
        states: The states of the grid's JobSets by name, as `Cluster.states` returns them.
        namespace: Kubernetes' namespace.
    """
    created, active = [], []
    for name, manifest in manifests.items():
        state = states.get(name)
        if state in (kubernetes_cluster.QUEUED, kubernetes_cluster.RUNNING):
            active.append(name)
            continue
        if state is not None:
            cluster.delete(name, namespace)
        cluster.create(manifest)
        created.append(name)
    return created, active
