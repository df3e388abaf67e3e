"""Tell failures of storage apart: data that are damaged, failures that may pass, and failures that will not.

Libraries report a failed system call in many types, and Orbax hides it behind errors of its own, as their cause. A
failure counts as damage only if nothing in its chain of causes says that the data could not be accessed.
"""

import errno
import re
from collections.abc import Iterator

from pma_jax.config.errors import DamageError, StorageError, TemporaryError, UserError

EXIT_FAILED = 1
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later

# Numbers of system errors after which the same command may succeed. Not EPIPE: the reader of the output has gone.
_TEMPORARY_ERRORS = {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ESTALE}
_TEMPORARY_ERRORS |= {errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.ETIMEDOUT}
_TEMPORARY_ERRORS |= {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH}
# Numbers of system errors that say that a file is absent, or that damaged metadata name an impossible file or offset.
_ABSENCE_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_ABSENCE_CLASSES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # Orbax raises them without a number
_PARSE_CLASSES = (ValueError, LookupError, EOFError, OverflowError)  # what parsers raise for unexpected content

# Errors of TensorStore begin with a status, and may contain the number of a system error or of an HTTP response.
_DAMAGE_STATUSES = {
    "NOT_FOUND",
    "DATA_LOSS",
    "OUT_OF_RANGE",
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "UNIMPLEMENTED",
}
_TEMPORARY_STATUSES = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"}
_OTHER_STATUSES = {"UNKNOWN", "INTERNAL", "CANCELLED", "PERMISSION_DENIED", "UNAUTHENTICATED"}
_STATUS = re.compile(f"({'|'.join(sorted(_DAMAGE_STATUSES | _TEMPORARY_STATUSES | _OTHER_STATUSES))}): ")
_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")
_HTTP_STATUS = re.compile(r"http_response_code='(\d+)'")

_ERROR_OF_THIS_PROCESS = re.compile("RESOURCE_EXHAUSTED|INVALID_ARGUMENT|UNIMPLEMENTED")
_LOST_PROCESS = re.compile("[A-Z_]+: .*(Gloo|coordination service|CoordinationService|[Bb]arrier|heartbeat)", re.DOTALL)

# Exceptions of aiohttp, httpx, requests and google-auth for a connection that failed.
_CONNECTION_CLASSES = {"ClientConnectionError", "ClientPayloadError", "ConnectionError", "NetworkError"}
_CONNECTION_CLASSES |= {"Timeout", "TimeoutError", "TimeoutException", "TransportError"}


def is_temporary(error: BaseException) -> bool:
    """Return whether trying again may help: a time-out, a lost connection, a busy server, too many open files."""
    return any(map(_is_temporary_itself, _chain(error)))


def exit_status(error: BaseException) -> int:
    """Return the exit status of a command that ends with `error`: 75 if trying again may help, else 1."""
    return EXIT_TRY_AGAIN if is_temporary(error) else EXIT_FAILED


def is_damage(error: BaseException) -> bool:
    """Return whether an exception of a library that reads stored data says that the data are absent or unparsable."""
    chain = list(_chain(error))
    is_known = any(isinstance(cause, (*_PARSE_CLASSES, *_ABSENCE_CLASSES)) for cause in chain)
    return is_known and not any(map(_is_failed_access, chain))


def as_read_error(error: Exception, message: str) -> Exception:
    """Return the exception to raise for one of a library that reads stored data.

    Args:
        error: What the library raised.
        message: Text of the result, one line.

    Returns:
        `error` itself if it is a `UserError` or a `StorageError`, else a new `DamageError` or `StorageError`.
    """
    if isinstance(error, (UserError, StorageError)):
        return error
    return DamageError(message) if is_damage(error) else StorageError(message, is_temporary(error))


def deciding_cause(error: BaseException) -> BaseException:
    """Return the exception in the chain of causes that says that data could not be accessed, or else the last."""
    chain = list(_chain(error))
    return next(filter(_is_failed_access, chain), chain[-1])


def is_storage_failure(error: BaseException) -> bool:
    """Return whether an exception of a library that writes says that the storage failed; else it is a bug."""

    def is_of_storage(cause: BaseException) -> bool:
        if type(cause).__name__ == "JaxRuntimeError":
            return False
        return isinstance(cause, OSError) or _is_failed_access(cause) or _status(cause) is not None

    return any(map(is_of_storage, _chain(error)))


def is_lost_process(error: BaseException) -> bool:
    """Return whether an exception of JAX says that another process of the job was lost, or a device failed.

    Collectives raise JaxRuntimeError or, on CPU, ValueError.
    """
    return any(
        type(cause).__name__ in ("JaxRuntimeError", "ValueError")
        and not _ERROR_OF_THIS_PROCESS.match(str(cause))
        and (type(cause).__name__ == "JaxRuntimeError" or bool(_LOST_PROCESS.match(str(cause))))
        for cause in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, as a traceback shows them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _text_of_library(error: BaseException) -> str:
    """Return the text of a library's exception; "" for ours, which may quote a file."""
    return "" if isinstance(error, (UserError, StorageError)) else str(error)


def _system_error(error: BaseException) -> int | None:
    """Return the number of the system error that an exception reports, or None."""
    if isinstance(error, OSError) and isinstance(error.errno, int):
        return error.errno
    found = _SYSTEM_ERROR.search(_text_of_library(error))
    return int(found[1]) if found else None


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status that an exception of a bucket or a hub reports, or None."""
    found = _HTTP_STATUS.search(_text_of_library(error))
    if found:
        return int(found[1])
    # gcsfs and google-api-core: code; aiohttp: status; requests and httpx: response.status_code.
    values = [getattr(error, name, None) for name in ("code", "status", "status_code")]
    values.append(getattr(getattr(error, "response", None), "status_code", None))
    return next((int(value) for value in values if isinstance(value, int) and 400 <= value < 600), None)


def _status(error: BaseException) -> str | None:
    """Return the status with which the text of TensorStore's exceptions begins, or None."""
    found = _STATUS.match(_text_of_library(error))
    return found[1] if found else None


def _is_temporary_itself(error: BaseException) -> bool:
    if isinstance(error, StorageError | TemporaryError):
        return isinstance(error, TemporaryError) or error.is_temporary
    number, http, status = _system_error(error), _http_status(error), _status(error)
    if number is not None:
        return number in _TEMPORARY_ERRORS
    if http is not None:
        return http in (408, 429) or http >= 500
    if status == "RESOURCE_EXHAUSTED":
        # TensorStore (ValueError): a quota of a bucket. XLA (RuntimeError): a device has too little memory.
        return isinstance(error, ValueError)
    classes = {kind.__name__ for kind in type(error).__mro__}
    return status in _TEMPORARY_STATUSES or (bool(classes & _CONNECTION_CLASSES) and "BrokenPipeError" not in classes)


def _is_failed_access(error: BaseException) -> bool:
    """Return whether an exception says that data could not be accessed, and not that they are wrong."""
    if isinstance(error, (StorageError, MemoryError)) or _is_temporary_itself(error):
        return True
    number, http = _system_error(error), _http_status(error)
    if number is not None:
        return number not in _ABSENCE_ERRORS
    if http is not None:
        return http != 404
    is_other_os_error = isinstance(error, OSError) and not isinstance(error, _ABSENCE_CLASSES)
    return is_other_os_error or _status(error) in _OTHER_STATUSES
