"""Check the demo's result: merging recovers what annealing gains, and every preview helps."""

import json
import sys
from pathlib import Path

MINIMUM_RECOVERED_SHARE = 0.8
MINIMUM_BLOCK_POINTS = 0.03  # share that block means recover beyond the best SMA of points

report = json.loads(Path(sys.argv[1]).read_text())
share = report["recovered_share"]
below, total = report["previews_below_raw"], report["previews_total"]
print(f"the best SMA window recovers {share:.1%} of the annealing gain; {below} of {total} previews are below raw")
if share < MINIMUM_RECOVERED_SHARE:
    sys.exit(f"error: the best SMA window recovers {share:.1%}, less than {MINIMUM_RECOVERED_SHARE:.0%}")
if below < total or not total:
    sys.exit(f"error: {total - below} of {total} previews are not below the raw loss at the same tokens")
gained = report["block_points_gained"]
print(f"the best merge of block means recovers {gained * 100:+.1f} points more")
if gained < MINIMUM_BLOCK_POINTS:
    sys.exit(f"error: block means gain {gained:.1%}, less than {MINIMUM_BLOCK_POINTS:.0%}")
