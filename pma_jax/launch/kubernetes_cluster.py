"""JobSets on the cluster of kubectl's current context (the extra `gke`): create, list and delete them."""

import contextlib
import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pma_jax.config.errors import UserError, first_line
from pma_jax.launch.jobset import GROUP, PLURAL, VERSION

QUEUED, RUNNING, COMPLETED, FAILED, DELETED = "queued", "running", "completed", "failed", "deleted"
_DELETION_SECONDS = 400  # longer than the time that pods have to save their states
_POLL_SECONDS = 0.5
_PAGE = 500  # JobSets per request


class Cluster:
    """A connection to the cluster.

    Raises:
        UserError: The package kubernetes or a configured cluster is missing. Each method raises it if the cluster
            refuses, or cannot be reached.
    """

    def __init__(self) -> None:
        try:
            self._kubernetes: Any = importlib.import_module("kubernetes")
            self._urllib3: Any = importlib.import_module("urllib3")  # with which it connects
        except ImportError as error:
            raise UserError(
                "the client of Kubernetes is not installed: pip install 'pma-jax[gke]', or pass the output of "
                "--dry-run to `kubectl apply -f -`"
            ) from error
        try:
            self._kubernetes.config.load_kube_config()
        except self._kubernetes.config.ConfigException as error:
            raise UserError(
                f"no cluster is configured ({first_line(error)}): run `gcloud container clusters get-credentials` first"
            ) from error
        self._objects = self._kubernetes.client.CustomObjectsApi()

    def create(self, manifest: Mapping[str, Any]) -> None:
        """Create a JobSet. Its name must be free in its namespace, so that no job is started twice."""
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        taken = (
            f"a JobSet {name} exists in the namespace {namespace}: it runs, or delete it with "
            f"`kubectl delete jobset {name} --namespace {namespace}`"
        )
        with self._report(f"refuses the JobSet {name}", {409: taken}):
            self._objects.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, manifest)

    def states(self, namespace: str, label: str) -> dict[str, str]:
        """Map the names of the JobSets with a label (KEY=VALUE) to their states."""
        states, token = {}, None
        while token != "":
            with self._report("does not list its JobSets"):
                page = self._objects.list_namespaced_custom_object(
                    GROUP, VERSION, namespace, PLURAL, label_selector=label, limit=_PAGE, _continue=token
                )
            states |= {item["metadata"]["name"]: _state(item) for item in page["items"]}
            token = page.get("metadata", {}).get("continue") or ""
        return states

    def delete(self, name: str, namespace: str) -> None:
        """Delete a JobSet, and wait until its name is free."""
        gone = {404: ""}
        with self._report(f"does not delete the JobSet {name}", gone):
            self._objects.delete_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, name, propagation_policy="Foreground"
            )
        end = time.monotonic() + _DELETION_SECONDS
        while time.monotonic() < end:
            is_gone = True
            with self._report(f"does not show the JobSet {name}", gone):
                self._objects.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
                is_gone = False
            if is_gone:
                return
            time.sleep(_POLL_SECONDS)
        raise UserError(f"the JobSet {name} is still being deleted: run the same command again later")

    @contextlib.contextmanager
    def _report(self, refusal: str, messages: Mapping[int, str] | None = None) -> Iterator[None]:
        """Raise the exceptions of the client as a UserError; `messages` by HTTP status, "" if it is no error."""
        try:
            yield
        except self._kubernetes.client.ApiException as error:
            default = f"the cluster {refusal}: {error.reason} ({error.status})"
            if error.status == 404:
                default = "the cluster has no JobSets: install the JobSet controller (docs/cloud_tpu.md)"
            if message := (messages or {}).get(error.status, default):
                raise UserError(message) from error
        except self._urllib3.exceptions.HTTPError as error:
            raise UserError(f"the cluster cannot be reached: {first_line(error)}") from error


def _state(item: Mapping[str, Any]) -> str:
    """Return the state of a JobSet; Kueue suspends those that wait for machines."""
    if "deletionTimestamp" in item["metadata"]:
        return DELETED
    ended = item.get("status", {}).get("terminalState")
    if ended:
        return COMPLETED if ended == "Completed" else FAILED
    return QUEUED if item["spec"].get("suspend") else RUNNING
