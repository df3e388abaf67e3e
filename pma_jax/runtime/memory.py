"""The resident memory of this process."""

from pathlib import Path


def resident_bytes(is_peak: bool = False) -> int | None:
    """Return the resident memory of this process, or its peak; None where the system does not tell it (not Linux)."""
    field = "VmHWM:" if is_peak else "VmRSS:"  # the peak of `getrusage` includes the process that started this one
    try:
        return int(Path("/proc/self/status").read_text().split(field)[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None
