"""The machines of a job on a Kubernetes cluster: slices of TPUs, or hosts with GPUs. Does not import JAX."""

import dataclasses
import math
from collections.abc import Mapping

from pma_jax.config.errors import UserError
from pma_jax.planning.cost import CHIPS, CHIPS_PER_HOST, parse_topology

# TPU -> (value of GKE's label for its nodes, dims of its topologies), as in "Plan TPUs in GKE"
# (cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus).
_ACCELERATORS = {
    "v4": ("tpu-v4-podslice", 3),
    "v5e": ("tpu-v5-lite-podslice", 2),
    "v5p": ("tpu-v5p-slice", 3),
    "v6e": ("tpu-v6e-slice", 2),
    "tpu7x": ("tpu7x", 3),
}
GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Machines:
    """Equal groups of equal hosts. Hosts of a group share a fast network.

    Attributes:
        groups: Slices; 1 for GPUs.
        hosts_per_group: Hosts of each; one process runs on each host.
        resource: Kubernetes' name of the devices.
        devices_per_host: Number of devices of each host.
        node_labels: The labels of nodes that can run the job.
    """

    groups: int
    hosts_per_group: int
    resource: str
    devices_per_host: int
    node_labels: Mapping[str, str]

    @property
    def hosts(self) -> int:
        """Number of hosts, and so of processes."""
        return self.groups * self.hosts_per_group

    @property
    def is_tpu(self) -> bool:
        """Whether the devices are TPUs."""
        return self.resource == "google.com/tpu"


def tpu_slices(topology: str) -> Machines:
    """Return the hosts of TPU slices such as `v6e:4x4`, or `2*v6e:4x4` for two.

    Raises:
        UserError: No such topology exists, GKE has no nodes for it, or single-host slices were to be joined.
    """
    slices, chip, shape = parse_topology(topology)
    accelerator, dims = _ACCELERATORS[chip]
    is_multiple = all(size % 4 == 0 for size in shape) and list(shape) == sorted(shape)
    name = "x".join(map(str, shape))
    # Slices of three dims exist in every shape of multiples of 4, in ascending order.
    if len(shape) != dims or (name not in CHIPS[chip].topologies and not (dims == 3 and is_multiple)):
        raise UserError(f"{chip} has no slices of the shape {name}: give one of {', '.join(CHIPS[chip].topologies)}")
    chips = math.prod(shape)
    per_host = min(chips, CHIPS_PER_HOST)
    hosts = chips // per_host
    if slices > 1 and hosts == 1:
        raise UserError(f"{topology} joins slices of a single host, which GKE cannot: give one larger slice")
    labels = {"cloud.google.com/gke-tpu-accelerator": accelerator, "cloud.google.com/gke-tpu-topology": name}
    return Machines(slices, hosts, "google.com/tpu", per_host, labels)


def gpu_hosts(gpus: int, gpu_type: str | None) -> Machines:
    """Return the hosts of a number of GPUs, `GPUS_PER_HOST` on each.

    Args:
        gpus: Number of GPUs in all.
        gpu_type: GKE's name of the type, such as nvidia-h100-80gb; None: nodes of any.

    Raises:
        UserError: The number of GPUs would leave a host with fewer than the others.
    """
    per_host = min(gpus, GPUS_PER_HOST)
    if gpus % per_host:
        raise UserError(f"--gpus {gpus} is not a multiple of the {GPUS_PER_HOST} GPUs of a host")
    labels = {} if gpu_type is None else {"cloud.google.com/gke-accelerator": gpu_type}
    return Machines(1, gpus // per_host, "nvidia.com/gpu", per_host, labels)
