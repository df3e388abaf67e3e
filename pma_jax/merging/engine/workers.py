"""Other processes of this machine that do units of a merge.

Threads that add blocks meet at the interpreter's lock many thousand times a second: two are 1.4 times as fast as one,
and three slower than two. Processes do not meet. A helper is a fresh interpreter, whatever runs in the one that merges
(JAX, a notebook), which gets the plan once and then a unit at a time through its pipe; when that is closed, because the
merge is over or was killed, it ends.
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
from pma_jax.merging.engine.units import Run, merge_plain

_CODE = "import sys; from pma_jax.merging.engine.workers import serve; serve(int(sys.argv[1]))"


@contextlib.contextmanager
def helper(run: Run) -> Iterator[Callable[[int, Unit], Record]]:
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
            pickle.dump((run.plan, run.places), asks)
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
        run = Run(plan, sums.weights_of(plan.coefficients), places)
        scratch = sums.new_scratch(len(plan.recipes), len(plan.sources), plan.block_elements)
        while True:
            number, unit = pickle.load(asks)
            answer: Any
            try:
                answer = merge_plain(run, number, unit, scratch)
            except (ValueError, OSError) as error:
                answer = error
            pickle.dump(answer, answers)
            answers.flush()
