"""All experiments that share trunks, one after the other; what is done already is not done again.

Command:   python experiments/run_all.py --runs runs/science

    --jobs 2                            two at a time, each on its own half of the cores: for small models, where
                                        two cores do less than twice what one does
    --only stable_phase,learning_rate   these alone
    --tiny --out FOLDER                 the whole set in a minute or two, to see that it runs; its numbers say nothing
    --list                              what there is, and what has results

Trained runs and evaluated merges are kept in --runs, so that a second call takes up where the first was cut, and a
third only draws tables and figures anew. Everything else goes to every script: --seeds, --config.KEY=VALUE.
One that fails is told, and the others go on; the exit status is then 1.
"""

import argparse
import concurrent.futures
import os
import queue
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
# In the order that trains soonest what others read; of two that run at once, few wait for the same run.
QUESTIONS = (
    "stable_phase",
    "learning_rate",
    "merging_and_annealing",
    "other_averagers",
    "weights",
    "pma_init",
    "interval_and_window",
    "forecasts",
    "why_it_works",
)


def main() -> int:
    """Run the scripts; exit status 0: all did their work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs, shared by all")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="Q,Q", help="these questions alone")
    parser.add_argument("--out", type=Path, help="write results to OUT/QUESTION instead of beside the scripts")
    parser.add_argument("--jobs", type=int, default=1, help="questions at a time, each on its share of the cores (1)")
    parser.add_argument("--list", action="store_true", help="what there is, and what has results")
    options, rest = parser.parse_known_args()
    there = [name for name in QUESTIONS if (FOLDER / name / "script.py").exists()]
    unknown = sorted(set(options.only or ()) - set(there))
    if unknown:
        parser.error(f"no question is called {', '.join(unknown)}: there are {', '.join(there)}")
    chosen = [name for name in there if not options.only or name in options.only]
    if options.list:
        for name in chosen:
            print(f"{name:24} {'has results' if (FOLDER / name / 'results.json').exists() else 'no results yet'}")
        return 0
    if not options.runs:
        parser.error("give --runs FOLDER")
    if not 1 <= options.jobs <= len(cores_here()):
        parser.error(f"--jobs {options.jobs}: give 1 to {len(cores_here())}, the cores that there are")
    failed = run(chosen, options.runs, options.out, rest, options.jobs)
    if failed:
        print(f"error: {', '.join(failed)} failed: see above, and give the same command again", file=sys.stderr)
    return 1 if failed else 0


def run(names: Sequence[str], runs: Path, out: Path | None, rest: Sequence[str], jobs: int) -> list[str]:
    """Run the scripts, `jobs` at a time; returns those that failed, after all have ended."""
    began = time.monotonic()
    shares: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for share in shares_of_cores(jobs):
        shares.put(share)

    def one(numbered: tuple[int, str]) -> bool:
        number, name = numbered
        place = f"[{number} of {len(names)}] {name}"
        print(place, file=sys.stderr, flush=True)
        words = ["--runs", str(runs), *rest, *(["--out", str(out / name)] if out else [])]
        since = time.monotonic()
        status = subprocess.run([sys.executable, str(FOLDER / name / "script.py"), *words], check=False).returncode
        verdict = f"failed with status {status}" if status else "done"
        minutes = [(time.monotonic() - t) / 60 for t in (since, began)]
        print(f"{place}: {verdict} in {minutes[0]:.1f} minutes, {minutes[1]:.1f} in all", file=sys.stderr, flush=True)
        return status == 0

    with concurrent.futures.ThreadPoolExecutor(jobs, initializer=lambda: keep_to(shares.get())) as pool:
        done = list(pool.map(one, enumerate(names, start=1)))
    return [name for name, well in zip(names, done, strict=True) if not well]


def cores_here() -> list[int]:
    """The cores that this process may use; all of the machine where the system cannot bind processes to cores."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def shares_of_cores(jobs: int) -> list[set[int]]:
    """The cores of this process in `jobs` shares."""
    return [set(cores_here()[job::jobs]) for job in range(jobs)]


def keep_to(cores: set[int]) -> None:
    """Bind this thread, and the processes that it starts, to these cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    sys.exit(main())
