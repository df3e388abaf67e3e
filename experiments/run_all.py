"""All experiments that share trunks, one after the other; what is done already is not done again.

Command:   python experiments/run_all.py --runs runs/science

    --only stable_phase,learning_rate   these alone
    --tiny --out FOLDER                 the whole set in a minute or two, to see that it runs; its numbers say nothing
    --list                              what there is, and what has results

Trained runs and evaluated merges are kept in --runs, so that a second call takes up where the first was cut, and a
third only draws tables and figures anew. Everything else goes to every script: --seeds, --config.KEY=VALUE.
One that fails is told, and the others go on; the exit status is then 1.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
# In the order that trains soonest what others read.
QUESTIONS = (
    "stable_phase",
    "merging_and_annealing",
    "weights",
    "interval_and_window",
    "why_it_works",
    "forecasts",
    "learning_rate",
    "pma_init",
    "other_averagers",
)


def main() -> int:
    """Run the scripts; exit status 0: all did their work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs, shared by all")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="Q,Q", help="these questions alone")
    parser.add_argument("--out", type=Path, help="write results to OUT/QUESTION instead of beside the scripts")
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
    failed, began = [], time.monotonic()
    for number, name in enumerate(chosen, start=1):
        print(f"[{number} of {len(chosen)}] {name}", file=sys.stderr, flush=True)
        words = ["--runs", str(options.runs), *rest]
        if options.out:
            words += ["--out", str(options.out / name)]
        since = time.monotonic()
        status = subprocess.run([sys.executable, str(FOLDER / name / "script.py"), *words], check=False).returncode
        if status:
            failed.append(name)
        verdict = f"failed with status {status}" if status else "done"
        print(
            f"[{number} of {len(chosen)}] {name}: {verdict} in {(time.monotonic() - since) / 60:.1f} minutes, "
            f"{(time.monotonic() - began) / 60:.1f} in all",
            file=sys.stderr,
            flush=True,
        )
    if failed:
        print(f"error: {', '.join(failed)} failed: see above, and give the same command again", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
