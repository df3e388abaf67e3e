"""Settings of the C allocator. Imports no other module, so that it can run before JAX starts its threads."""

import ctypes
import sys

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations; return False if there is no glibc.

    XLA on CPU allocates the buffers of each step anew. By default glibc maps and unmaps them, and the kernel clears
    every page again, which takes a third of the CPU time of a small model's step. The process then never returns memory
    to the system: right for training, wrong for a merge, which promises a memory bound. Call it before threads start,
    because each thread would otherwise get its own arena, which is too small for the buffers of a step.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(_M_ARENA_MAX, 1), mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)])
