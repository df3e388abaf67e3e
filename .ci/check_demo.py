"""Check the demo's result: merging recovers what annealing gains, and every preview helps."""

import json
import sys
from pathlib import Path

MINIMUM_RECOVERED_SHARE = 0.8

report = json.loads(Path(sys.argv[1]).read_text())
share = report["recovered_share"]
below, total = report["previews_below_raw"], report["previews_total"]
print(f"the best SMA window recovers {share:.1%} of the annealing gain; {below} of {total} previews are below raw")
if share < MINIMUM_RECOVERED_SHARE:
    sys.exit(f"error: the best SMA window recovers {share:.1%}, less than {MINIMUM_RECOVERED_SHARE:.0%}")
if below < total or not total:
    sys.exit(f"error: {total - below} of {total} previews are not below the raw loss at the same tokens")
