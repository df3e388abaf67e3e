"""Worker processes on this machine that merge units in parallel.

Threads that sum blocks contend for the interpreter's lock many thousand times per second: two are 1.4 times as fast as
one, and three are slower than two. Processes do not contend. A worker is a fresh interpreter, whatever the merging
process has loaded (JAX, a notebook). It receives the plan once and then one unit at a time through a pipe; when the
pipe is closed, because the merge has finished or was killed, the worker exits.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pma_jax.merging.engine import sums
from pma_jax.merging.engine.journal import Record
from pma_jax.merging.engine.plan import Unit
from pma_jax.merging.engine.units import MergeJob, merge_plain

_CODE = "import sys; from pma_jax.merging.engine.workers import serve; serve(int(sys.argv[1]))"


@contextlib.contextmanager
def start_worker(job: MergeJob) -> Iterator[Callable[[int, Unit], Record]]:
    """A process that merges units: the function that has it do one, and waits.

    The function raises what `merge_plain` raises there, and ChildProcessError when the process has ended: what is done
    stays.
    """
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE, str(theirs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # what some installation prints at its start is no answer
        # A pool of BLAS's own would only spin: each process does its part on one core.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        pass_fds=(theirs,),
        process_group=0,  # Ctrl-C is for the process that merges
    )
    os.close(theirs)
    asks, answers = process.stdin, os.fdopen(ours, "rb")
    assert asks is not None

    def merge(number: int, unit: Unit) -> Record:
        try:
            pickle.dump((number, unit), asks)
            asks.flush()
            answer = pickle.load(answers)
        except (EOFError, OSError, pickle.UnpicklingError):
            status = process.wait()
            raise ChildProcessError(
                f"a process that helped to merge ended with status {status}"
                f"{' (killed: out of memory?)' if status == -9 else ''}; the same command goes on from what is done"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended: `merge` says so
            pickle.dump((job.plan, job.places), asks)
            asks.flush()
        yield merge
    finally:
        process.kill()
        process.communicate()
        answers.close()


def serve(descriptor: int) -> None:
    """What a helper does: units from standard input, records to the pipe `descriptor`."""
    asks, answers = sys.stdin.buffer, os.fdopen(descriptor, "wb")
    with contextlib.suppress(EOFError, BrokenPipeError):
        plan, places = pickle.load(asks)
        job = MergeJob(plan, sums.kernel_weights(plan.coefficients), places)
        scratch = sums.new_scratch(len(plan.recipes), len(plan.sources), plan.block_elements)
        while True:
            number, unit = pickle.load(asks)
            answer: Any
            try:
                answer = merge_plain(job, number, unit, scratch)
            except (ValueError, OSError) as error:
                answer = error
            pickle.dump(answer, answers)
            answers.flush()
