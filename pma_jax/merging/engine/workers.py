"""Worker processes on this machine that merge units in parallel.

Threads that sum blocks contend for the interpreter's lock thousands of times per second: two are 1.4 times as fast as
one, and three are slower than two. Processes do not contend. A worker is a new interpreter instead of a fork, because
the merging process may have loaded JAX or be a notebook. It receives the job once and then one unit at a time through a
pipe, and exits when the pipe is closed, because the merge has finished or was killed.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from pma_jax.merging.engine.journal import Record
from pma_jax.merging.engine.plan import Unit
from pma_jax.merging.engine.units import sequential_merger
from pma_jax.runtime import signals

_CODE = "import sys; from pma_jax.merging.engine.workers import serve; serve(int(sys.argv[1]))"


@contextlib.contextmanager
def start_worker(pickled_job: bytes) -> Iterator[Callable[[int, Unit], Record]]:
    """Start a worker process and yield a function that merges one unit in it and waits for the record.

    The function raises the exceptions of `units.merge_sequential_unit` in the worker, and ChildProcessError if the
    worker has exited. The journal keeps the units finished before.

    Args:
        pickled_job: The `MergeJob`, pickled once for all workers. Threads must not pickle objects that they share:
            pickle reads `__dict__`, and Python 3.11 can then give an object two, whose values are freed twice
            (experiments/fuzz/instance_dict_race.py).
    """
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE, str(write_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # some installations print at startup, so answers use a separate pipe
        # Each process uses one core, on which BLAS's idle threads would only spin.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        pass_fds=(write_end,),
        process_group=0,  # Ctrl-C interrupts only the merging process
    )
    os.close(write_end)
    requests, answers = process.stdin, os.fdopen(read_end, "rb")
    assert requests is not None

    def merge_unit(number: int, unit: Unit) -> Record:
        try:
            pickle.dump((number, unit), requests)
            requests.flush()
            answer = pickle.load(answers)
        except (EOFError, OSError, pickle.UnpicklingError):
            status = process.wait()
            raise ChildProcessError(
                f"a worker process of the merge exited with status {status}"
                f"{' (killed: out of memory?)' if status == -9 else ''}; run the same command again to resume"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        with contextlib.suppress(BrokenPipeError):  # the worker has exited: `merge_unit` reports it
            requests.write(pickled_job)
            requests.flush()
        with signals.before_end(process.kill):
            yield merge_unit
    finally:
        process.kill()
        process.communicate()
        answers.close()


def serve(descriptor: int) -> None:
    """Run a worker: read the job and units from standard input, and write records to the pipe `descriptor`."""
    for number in signals.SIGNALS:  # of a whole group of processes: the merging process ends this one
        signal.signal(number, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(descriptor, "wb")
    with contextlib.suppress(EOFError, BrokenPipeError), sequential_merger(pickle.load(requests)) as merge_unit:
        while True:
            number, unit = pickle.load(requests)
            try:
                answer = merge_unit(number, unit)
            except Exception as error:  # the merging process raises it
                answer = error
            pickle.dump(answer, answers)
            answers.flush()
