"""Failures of storage: which say that data are damaged, and after which trying again may help."""

import errno
import json
import pickle
import types

import jax
import numpy as np
import pytest

from pma_jax.config.errors import DamageError, StorageError, UserError
from pma_jax.runtime.failures import as_read_error, exit_status, is_damage, is_lost_process, is_temporary


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def http(name: str, **fields) -> Exception:
    error = type(name, (Exception,), {})("the server said no")
    for field, value in fields.items():
        setattr(error, field, value)
    return error


def of_json(text: str) -> Exception:
    try:
        json.loads(text)
    except ValueError as error:
        return error
    raise AssertionError


TENSORSTORE = "Error opening \"zarr3\" driver: Failed to open: \"a/b\" [os_error_code='{}'] [source locations='x.cc:1']"
TEMPORARY = [
    *(OSError(getattr(errno, name), "text") for name in ("EMFILE", "ENFILE", "ESTALE", "ETIMEDOUT", "ECONNRESET")),
    ValueError("RESOURCE_EXHAUSTED: " + TENSORSTORE.format(errno.EMFILE)),
    ValueError("ABORTED: " + TENSORSTORE.format(errno.ESTALE)),
    ValueError("UNAVAILABLE: Error reading gs://bucket/object"),
    ValueError("RESOURCE_EXHAUSTED: too many requests"),
    ValueError("UNKNOWN: HTTP [http_response_code='503']"),
    TimeoutError("read"),
    ConnectionResetError("by peer"),
    http("HttpError", code=503),
    http("HttpError", code=429),
    http("ClientResponseError", status=500),
    http("HfHubHTTPError", response=types.SimpleNamespace(status_code=504)),
    type("ConnectTimeout", (type("TimeoutException", (Exception,), {}),), {})("no code"),
    type("ServerDisconnectedError", (type("ClientConnectionError", (Exception,), {}),), {})(),
    caused(KeyError("no handler"), OSError(errno.EMFILE, "Too many open files")),
    caused(UserError("cannot write a/b"), OSError(errno.ESTALE, "Stale file handle")),
    StorageError("process 1 failed: Too many open files", is_temporary=True),
]
LASTING = [
    *(OSError(getattr(errno, name), "text") for name in ("EIO", "EACCES", "ENOSPC", "ENOMEM", "EROFS", "EPIPE")),
    ValueError("UNKNOWN: " + TENSORSTORE.format(errno.EIO)),
    ValueError("PERMISSION_DENIED: " + TENSORSTORE.format(errno.EACCES)),
    ValueError("RESOURCE_EXHAUSTED: " + TENSORSTORE.format(errno.ENOSPC)),
    ValueError("INTERNAL: something"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"),
    MemoryError(),
    RuntimeError("can't start new thread"),
    http("HttpError", code=403),
    caused(KeyError("no handler"), MemoryError()),
    caused(FileNotFoundError("no item"), PermissionError(errno.EACCES, "Permission denied")),
    StorageError("process 1 failed: Input/output error"),
]
DAMAGE = [
    OSError(errno.ENOENT, "No such file or directory"),
    NotADirectoryError("a file instead of a directory"),
    FileNotFoundError("Checkpoint path does not exist"),
    ValueError("DATA_LOSS: Error reading shard entry: CRC-32C checksum verification failed"),
    ValueError("NOT_FOUND: " + TENSORSTORE.format(errno.ENOENT)),
    ValueError("INVALID_ARGUMENT: Error parsing object"),
    KeyError("params"),
    of_json("{"),
    of_json(""),
    caused(KeyError("no handler"), ValueError("OUT_OF_RANGE: Requested byte range [0, 5) is not valid")),
    http("HttpError", code=404),
]
named = {"ids": lambda value: f"{type(value).__name__} {value}"[:60]}


@pytest.mark.parametrize("error", TEMPORARY, **named)
def test_failure_that_may_pass(error):
    assert is_temporary(error) and exit_status(error) == 75 and not is_damage(error)


@pytest.mark.parametrize("error", LASTING, **named)
def test_failure_that_stays_and_says_nothing_about_the_data(error):
    assert not is_temporary(error) and exit_status(error) == 1 and not is_damage(error)
    raised = as_read_error(error, "cannot read x")
    assert raised is error if isinstance(error, StorageError) else type(raised) is StorageError


@pytest.mark.parametrize("error", [e for e in DAMAGE if not hasattr(e, "code")], **named)
def test_damage(error):
    assert is_damage(error) and not is_temporary(error)
    assert type(as_read_error(error, "cannot read x")) is DamageError


def test_suppressed_context_and_own_messages_are_not_causes():
    try:
        try:
            raise BlockingIOError(errno.EAGAIN, "the lock is held")
        except BlockingIOError:
            raise UserError("in use by another process") from None
    except UserError as error:
        assert exit_status(error) == 1
    assert exit_status(UserError("the file says os_error_code='24'")) == 1
    assert not is_damage(caused(DamageError("x"), OSError(errno.EIO, "y")))


def test_storage_error_survives_a_pipe_between_processes():
    error = pickle.loads(pickle.dumps(StorageError("one line", is_temporary=True)))
    assert str(error) == "one line" and error.is_temporary
    assert not np.any([is_temporary(OSError("text")), is_damage(OSError("text"))])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: something of the device"), True),
        (caused(UserError("cannot write"), jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out")), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ValueError("the barrier of Gloo"), False),
        (UserError("UNKNOWN: Gloo"), False),
    ],
    **named,
)
def test_lost_process(error, expected):
    assert is_lost_process(error) == expected
