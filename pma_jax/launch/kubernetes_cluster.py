"""Create a JobSet on the cluster of kubectl's current context (the extra `gke`)."""

import importlib
from typing import Any

from pma_jax.config.errors import UserError, first_line
from pma_jax.launch.jobset import GROUP, PLURAL, VERSION


def create_jobset(manifest: dict[str, Any]) -> None:
    """Create a JobSet. Its name must be free in its namespace, so that no job is started twice.

    Raises:
        UserError: The package kubernetes or a cluster is missing, or the cluster refuses the JobSet.
    """
    try:
        kubernetes: Any = importlib.import_module("kubernetes")
        urllib3: Any = importlib.import_module("urllib3")  # with which it connects
    except ImportError as error:
        raise UserError(
            "pma launch needs the client of Kubernetes, which is not installed: pip install 'pma-jax[gke]', or pass "
            "the output of --dry-run to `kubectl apply -f -`"
        ) from error
    try:
        kubernetes.config.load_kube_config()
    except kubernetes.config.ConfigException as error:
        raise UserError(
            f"no cluster is configured ({first_line(error)}): run `gcloud container clusters get-credentials` first"
        ) from error
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    try:
        kubernetes.client.CustomObjectsApi().create_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, manifest
        )
    except kubernetes.client.ApiException as error:
        if error.status == 409:
            raise UserError(
                f"a JobSet {name} exists in the namespace {namespace}: it runs, or delete it with "
                f"`kubectl delete jobset {name} --namespace {namespace}`"
            ) from error
        if error.status == 404:
            raise UserError("the cluster has no JobSets: install the JobSet controller (docs/cloud_tpu.md)") from error
        raise UserError(f"the cluster refuses the JobSet {name}: {error.reason} ({error.status})") from error
    except urllib3.exceptions.HTTPError as error:
        raise UserError(f"the cluster cannot be reached: {first_line(error)}") from error
