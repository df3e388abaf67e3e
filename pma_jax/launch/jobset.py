"""A job of many hosts as a JobSet of Kubernetes (jobset.x-k8s.io/v1alpha2), in a queue of Kueue.

Each slice of TPUs is one Job of the set, with one pod per host. What a failure means follows from the exit status of
`pma`: 1 and 2 would come again, so the set fails; after any other (75: a peer was lost; 130, 143: stopped with a
state saved; a preempted pod) all pods start again, and the command resumes.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from pma_jax.config.errors import UserError
from pma_jax.launch.machines import Machines

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
# JobSet appends the group's name, two indices and five random characters to the name of a pod, which has at most 63.
MAX_NAME_CHARACTERS = 40
_REPLICATED_JOB = "workers"
_FINAL_STATUSES = (1, 2)  # failed, called wrongly: the same command would fail again
_COORDINATOR_PORT = 8476  # of JAX's coordination service, in the pod of process 0
HOST = "$(PMA_SLICE)-$(PMA_HOST_OF_SLICE)"  # in a command: the slice and the host of the pod, such as 0-0
# After SIGTERM `pma` saves a state and exits; then Kubernetes kills it. Spot nodes end sooner.
_GRACE_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class JobSetting:
    """What a cluster needs to know of a job, besides its machines and command.

    Attributes:
        name: Name of the JobSet: a label of DNS (RFC 1123) of at most `MAX_NAME_CHARACTERS`.
        image: Container image with `pma`.
        queue: Kueue's queue in the namespace; None: the cluster's scheduler starts the job at once.
        namespace: Kubernetes' namespace.
        max_restarts: How often all pods may start again.
        service_account: Kubernetes' account with access to the bucket; None: the namespace's default.
        is_spot: Whether to use spot nodes, which may be taken away at any time.
        environment: Environment variables of the processes.
        volumes: Path in the pods -> name of a PersistentVolumeClaim.
        labels: Labels of the JobSet, besides Kueue's.
    """

    name: str
    image: str
    queue: str | None = None
    namespace: str = "default"
    max_restarts: int = 50
    service_account: str | None = None
    is_spot: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    volumes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


def check_name(name: str) -> str:
    """Return a name that a JobSet may have.

    Raises:
        UserError: It is not a label of DNS, or too long.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > MAX_NAME_CHARACTERS:
        raise UserError(
            f"the name {name[:80]!r} is not one that Kubernetes takes: give --name with at most {MAX_NAME_CHARACTERS} "
            "lower-case letters, digits and -, from a letter to a letter or digit"
        )
    return name


def check_label(option: str, text: str) -> None:
    """Check the value of an option that names an object of Kubernetes.

    Raises:
        UserError: It is not a label of DNS (RFC 1123).
    """
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise UserError(
            f"{option} {text[:80]!r} is not a name of Kubernetes: give at most 63 lower-case letters, digits and -"
        )


def make_jobset(setting: JobSetting, machines: Machines, command: Sequence[str]) -> dict[str, Any]:
    """Return the manifest of a JobSet that runs `command` on every host.

    Args:
        setting: The job's name, image and place.
        machines: The hosts.
        command: The words of the command, with `--distributed` if there are several hosts.
    """
    labels = dict(setting.labels)
    if setting.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = setting.queue
    annotations = {}
    if machines.is_tpu and machines.groups > 1:
        # Each slice on a node pool of its own: the hosts of one slice must be in one, and no two slices share one.
        annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] = "cloud.google.com/gke-nodepool"
    metadata = {"name": setting.name, "namespace": setting.namespace}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "JobSet",
        "metadata": metadata | {k: v for k, v in (("labels", labels), ("annotations", annotations)) if v},
        "spec": {
            # The Job fails on a final status (`_job`), but JobSet restarts a failed Job for any reason without a rule.
            "failurePolicy": {
                "maxRestarts": setting.max_restarts,
                "rules": [
                    {
                        "name": "finalStatus",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": _REPLICATED_JOB,
                    "replicas": machines.groups,
                    "template": {"spec": _job(setting, machines, command)},
                }
            ],
        },
    }


def to_yaml(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as YAML, for `kubectl apply -f -`."""
    return yaml.safe_dump(dict(manifest), sort_keys=False, width=1000)


def _job(setting: JobSetting, machines: Machines, command: Sequence[str]) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": machines.hosts_per_group,
        "parallelism": machines.hosts_per_group,
        "backoffLimit": 0,  # one pod alone cannot join a running computation: the JobSet starts all of them again
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": _REPLICATED_JOB,
                        "operator": "In",
                        "values": list(_FINAL_STATUSES),
                    },
                }
            ]
        },
        "template": {"spec": _pod(setting, machines, command)},
    }


def _pod(setting: JobSetting, machines: Machines, command: Sequence[str]) -> dict[str, Any]:
    claims = [
        {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
        for i, claim in enumerate(setting.volumes.values())
    ]
    mounts = [{"name": f"volume-{i}", "mountPath": path} for i, path in enumerate(setting.volumes)]
    if not machines.is_tpu:  # NCCL shares memory between the GPUs of a host; a container has 64 MiB without this
        claims.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    container = {
        "name": _REPLICATED_JOB,
        "image": setting.image,
        "command": list(command),
        "resources": {"limits": {machines.resource: str(machines.devices_per_host)}},
    }
    environment = _environment(setting, machines, command)
    container |= {key: value for key, value in (("env", environment), ("volumeMounts", mounts)) if value}
    selector = {**machines.node_labels, **({"cloud.google.com/gke-spot": "true"} if setting.is_spot else {})}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # as podFailurePolicy requires
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
    }
    optional = {"nodeSelector": selector, "serviceAccountName": setting.service_account, "volumes": claims}
    return pod | {key: value for key, value in optional.items() if value}


_SLICE = "metadata.labels['jobset.sigs.k8s.io/job-index']"
_HOST_OF_SLICE = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def _environment(setting: JobSetting, machines: Machines, command: Sequence[str]) -> list[dict[str, Any]]:
    """Return the variables of a container. GKE sets those by which JAX finds the hosts of TPU slices."""
    variables: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in setting.environment.items()]
    if not machines.is_tpu and machines.hosts > 1:
        # JobSet gives pod I of Job 0 this name in its headless service.
        coordinator = f"{setting.name}-{_REPLICATED_JOB}-0-0.{setting.name}:{_COORDINATOR_PORT}"
        variables += [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": coordinator},
            {"name": "JAX_NUM_PROCESSES", "value": str(machines.hosts)},
            _field("JAX_PROCESS_ID", _HOST_OF_SLICE),
        ]
    if HOST in command:
        variables += [_field("PMA_SLICE", _SLICE), _field("PMA_HOST_OF_SLICE", _HOST_OF_SLICE)]
    return variables


def _field(name: str, path: str) -> dict[str, Any]:
    """Return a variable with the value of a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def describe(setting: JobSetting, machines: Machines, command: Sequence[str]) -> str:
    """Return one line about what a JobSet starts."""
    groups = f"{machines.groups} slices of " if machines.groups > 1 else ""
    devices = f"{machines.devices_per_host} {machines.resource}"
    hosts = f"{machines.hosts_per_group} host{'s' if machines.hosts_per_group > 1 else ''}"
    return f"{setting.name}: {groups}{hosts} with {devices} each run `{shlex.join(command)}`"
