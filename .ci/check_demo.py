"""Check the demo's report: merges recover most of what the better annealed branch gains, and every preview helps."""

import json
import sys
from pathlib import Path

MINIMUM_DOCUMENTS = 10  # that the held-out text is sampled from
MINIMUM_RECOVERED_SHARE = 0.8
MINIMUM_BLOCK_GAIN = 0.02  # share that the best merge of block means recovers beyond the best SMA of points

report = json.loads(Path(sys.argv[1]).read_text())
losses = {run["annealing"]["shape"]: (run["select_loss"], run["loss"]) for run in report["annealed_runs"]}
if losses.keys() != {"cosine", "linear"} or report["annealed_loss"] != min(losses.values())[1]:
    sys.exit(f"error: shares must refer to the better of a cosine and a linear branch on select, not to {losses}")
text = report["held_out"] or {}
if text.get("part") != "report" or text["documents"] < MINIMUM_DOCUMENTS:
    sys.exit(f"error: losses must be on at least {MINIMUM_DOCUMENTS} documents of the part report: {report['judged']}")
share = report["recovered_share"]
below, total = report["previews_below_raw"], report["previews_total"]
print(
    f"the best SMA recovers {share:.1%} of the gain of the better annealing; {below} of {total} previews are below raw"
)
if share < MINIMUM_RECOVERED_SHARE:
    sys.exit(f"error: the best SMA window recovers {share:.1%}, less than {MINIMUM_RECOVERED_SHARE:.0%}")
if below < total or not total:
    sys.exit(f"error: {total - below} of {total} previews are not below the raw loss at the same tokens")
gained = report["block_points_gained"]
print(f"the best merge of block means recovers {gained * 100:+.1f} points more")
if gained < MINIMUM_BLOCK_GAIN:
    sys.exit(f"error: block means gain {gained:.1%}, less than {MINIMUM_BLOCK_GAIN:.0%}")
