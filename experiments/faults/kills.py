"""Kill `pma` at every phase of every verb that writes, run the same command again, and compare everything it made.

    python experiments/faults/kills.py --kills 300 --seed 0            # all cells
    python experiments/faults/kills.py --kills 40 --only train merge

Each verb is run once without a kill. Its events (writes, renames, removals, flushes) are counted by phase. Then it is
killed at a random event of each phase in turn and at random times, and the same command follows: for training, many
kills in one run. What is compared, bitwise: every record of metrics.jsonl apart from wall times, previews included;
the published snapshots, block means and states after each kill and at the end (retention, archive) with the digests of
their arrays; all arrays against their digests; and the files that merges, exports and imports write.

Prints the kills by verb and phase. The exit status is 1 if anything was lost or differs.
"""

import argparse
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import forked
import run_cells
import verb_cells
from bench import Bench, Lost

CELLS = run_cells.CELLS | verb_cells.CELLS


def main(arguments: list[str] | None = None) -> int:
    """Run the cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="number of kills, spread over the cells")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(CELLS), choices=CELLS, metavar="CELL", help=", ".join(CELLS))
    parser.add_argument("--package", type=Path, default=Path(__file__).parents[2], help="repository to test")
    parser.add_argument("--folder", type=Path, help="where to work; removed at the end (default: a temporary folder)")
    options_ = parser.parse_args(arguments)
    root = Path(options_.folder or tempfile.mkdtemp(prefix="pma-kills-")).resolve()
    share = options_.kills / sum(CELLS[cell][1] for cell in options_.only)
    failures = []
    try:
        bench = Bench(root, forked.preload(options_.package), random.Random(options_.seed))
        bench.make_references()
        for cell in options_.only:
            kill, weight = CELLS[cell]
            try:
                kill(bench, cell, max(round(share * weight), 1))
            except Lost as error:
                failures.append(f"{cell}: {error}")
            except Exception:
                failures.append(f"{cell}: {traceback.format_exc()}")
            counts = {phase: count for (name, phase), count in sorted((+bench.kills).items()) if name == cell}
            print(f"{cell}: {sum(counts.values())} kills: {counts}", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for failure in failures:
        print(f"LOST: {failure}", file=sys.stderr)
    print(
        f"{sum(bench.kills.values())} kills, {len(bench.kills)} cells of verb and phase, {len(failures)} verbs failed"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
