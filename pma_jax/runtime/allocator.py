"""How this process's C allocator treats freed memory. Imports nothing: call it before JAX starts its threads."""

import ctypes
import sys

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory for the next allocation instead of giving it back; False where there is no glibc.

    XLA on CPU allocates the buffers of a step anew each time. Left alone, glibc maps them and unmaps them, and the
    kernel clears every page again: a third of the CPU time of a step of a small model. What the process once held, it
    then holds until it ends: right for training, wrong for a merge, whose promise is a bound on memory. Call it before
    threads start, as each thread would otherwise get an arena of its own, too small for the buffers of a step.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(_M_ARENA_MAX, 1), mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)])
