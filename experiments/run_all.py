"""Run all experiments, in order; finished work is not repeated.

Command:   python experiments/run_all.py --runs runs/science

    --jobs 2                            train two runs at a time, each on half of the cores; faster for small models,
                                        which do not use two cores fully
    --estimate                          only estimate the machine time of each and of all together, and name the runs
                                        that are cached
    --only stable_phase,learning_rate   only these experiments
    --tiny --out FOLDER                 all of them in a minute or two, to check that they run; the numbers mean nothing
    --list                              list the experiments, and which have results

Each experiment first prints an estimate of its machine time, and which of its runs are cached. --runs stores trained
runs and evaluated merges: the same command resumes an interrupted call, and after a completed one only redraws tables
and figures. All other options, such as --jobs, --seeds and --config.KEY=VALUE, are passed to every script. If a script
fails, the failure is reported, the others continue, and the exit status is 1. A second size of an experiment, with
fewer seeds, is measured by another call of its script, unless the command line gives --sizes or --seeds.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pma_jax.launch.job import Job, Step
from pma_jax.launch.local import run_jobs
from pma_jax.runtime.signals import Stopped
from pma_jax.storage.json_files import read_json
from pma_jax.studies.estimate import Counted

FOLDER = Path(__file__).parent
# Ordered so that runs that several experiments use are trained first; the settings of all are those of tuning.
QUESTIONS = (
    "tuning",
    "annealing",
    "anytime",
    "stable_phase",
    "learning_rate",
    "merging_and_annealing",
    "weights",
    "pma_init",
    "interval_and_window",
    "forecasts",
    "why_it_works",
    "tasks",
    "batch_and_precision",
    "replicas",
    "spike_recovery",
    "growth",
)
# Experiment -> size and seeds of the call that adds a second size to its results.
SECOND_SIZES = {"anytime": ("--sizes", "science_long", "--seeds", "0,1,2,3,4")}


def main() -> int:
    """Run the scripts and return the exit status: 0 if all succeeded, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="directory of runs, shared by all experiments")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="Q,Q", help="only these experiments")
    parser.add_argument("--out", type=Path, help="write results to OUT/NAME instead of next to the scripts")
    parser.add_argument("--list", action="store_true", help="list the experiments, and which have results")
    options, rest = parser.parse_known_args()
    available = [name for name in QUESTIONS if (FOLDER / name / "script.py").exists()]
    unknown = sorted(set(options.only or ()) - set(available))
    if unknown:
        parser.error(f"unknown experiment {', '.join(unknown)}: choose from {', '.join(available)}")
    chosen = [name for name in available if not options.only or name in options.only]
    if options.list:
        for name in chosen:
            print(f"{name:24} {'has results' if (FOLDER / name / 'results.json').exists() else 'no results yet'}")
        return 0
    if not options.runs:
        parser.error("--runs is missing: give the directory of the runs")
    try:
        if "--estimate" in rest:
            failed = estimate_all(chosen, rest, options.runs, options.out)
        else:
            failed = run_scripts(list_calls(chosen, rest), options.runs, options.out)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.status
    if failed:
        print(
            f"error: {', '.join(failed)} failed: fix the errors above and run the same command again", file=sys.stderr
        )
    return 1 if failed else 0


def estimate_all(names: Sequence[str], options: Sequence[str], runs: Path, out: Path | None) -> list[str]:
    """Estimate experiments one after the other, so that a run that several need counts once, and print the sum.

    Returns:
        The titles of the calls that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder, "counted.json")
        failed = run_scripts(list_calls(names, [*options, "--counted", str(counted)]), runs, out)
        if counted.exists():
            hours = read_json(counted, Counted)["hours"]
            left_out = f", without {', '.join(failed)}" if failed else ""
            print(f"all: about {hours:.2f} machine hours{left_out}")
    return failed


def list_calls(names: Sequence[str], options: Sequence[str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """List the calls of scripts, in order: title -> (experiment, options).

    Args:
        names: Experiments, in order.
        options: Passed to every script.
    """
    given = {word.partition("=")[0] for word in options}
    calls = {name: (name, tuple(options)) for name in names}
    if given & {"--sizes", "--seeds", "--tiny", "--redraw"}:
        return calls
    add = () if "--estimate" in given else ("--add",)  # a script refuses both
    for name in names:
        if second := SECOND_SIZES.get(name):
            calls[f"{name} {' '.join(second)}"] = (name, (*options, *second, *add))
    return calls


def run_scripts(calls: Mapping[str, tuple[str, Sequence[str]]], runs: Path, out: Path | None) -> list[str]:
    """Run calls of experiments, one after the other, with the local engine of `pma grid`.

    Args:
        calls: As `list_calls` returns them.
        runs: Directory of runs, shared by all experiments.
        out: Directory of the results, one subdirectory per experiment; None: next to each script.

    Returns:
        The titles of the calls that failed.
    """

    def job(title: str, name: str, options: Sequence[str]) -> Job:
        arguments = ["--runs", str(runs), *options, *(["--out", str(out / name)] if out else [])]
        return Job(title, (Step(name, (sys.executable, str(FOLDER / name / "script.py"), *arguments)),))

    jobs = [job(title, *call) for title, call in calls.items()]
    return list(run_jobs(jobs, 1, lambda line: print(line, file=sys.stderr, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
