"""Show that Python 3.11 can give one object two `__dict__`, after which the garbage collector crashes.

    python experiments/fuzz/instance_dict_race.py

Attributes of an object are stored without a dict until `__dict__` is read, for example by pickle. Python 3.11 then
allocates the dict, and only afterwards records that the object has one. The allocation can start a garbage collection,
whose callbacks (JAX has one) can switch threads; if the other thread reads `__dict__` of the same object, there are two
dicts of the same values. One is overwritten and never freed, the values are freed with the other, and a later
collection reads them: SIGSEGV, far from its cause. Python 3.10, 3.12 and 3.13 are not affected.

A merge with several worker processes did this when its threads pickled the same job (merging/engine/workers.py). The
exit status is 1 if an object had two.
"""

import gc
import sys
import threading


class Record:
    """An object whose attributes are stored without a dict at first."""

    def __init__(self):
        self.path, self.offset, self.nbytes = "leaf", 0, 1


def count_objects_with_two_dicts(count: int = 2000) -> int:
    """Read `__dict__` of the same objects in two threads, and count those that gave each thread another dict."""
    objects = [Record() for _ in range(count)]
    dicts, barrier = [[], []], threading.Barrier(2)

    def read(thread: int) -> None:
        barrier.wait()
        dicts[thread] = [record.__dict__ for record in objects]

    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(first is not second for first, second in zip(*dicts, strict=True))


def main() -> int:
    """Print what was found, and return the exit status."""
    gc.callbacks.append(lambda phase, info: sum(range(50)))  # Python code, in which the interpreter may switch threads
    gc.set_threshold(1, 1, 1)
    sys.setswitchinterval(1e-6)
    found = sum(count_objects_with_two_dicts() for _ in range(20))
    print(f"Python {sys.version.split()[0]}: {found} of 40,000 objects had two __dict__")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
