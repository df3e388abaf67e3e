"""Requests and bytes of each verb on a bucket, and how they grow with the number of snapshots.

    python experiments/benchmarks/bucket_requests.py [--snapshots 6 12 24] [--out requests.json]

The bucket is a real server of Google Cloud Storage's interface on this machine (fake-gcs-server, of the extra `test`),
behind a proxy that records each request. For each number of snapshots, a tiny run is trained into the bucket, and each
verb runs on it once. "growth" is the exponent of the number of requests over the number of snapshots, from the two
largest runs: 1 is linear, and 2 would be a verb that lists or reads all snapshots once for each of them. "metadata" is
the greatest number of times that the metadata of one checkpoint were read. Orbax reads them two to four times when it
restores arrays, without telling what it read; what pma_jax itself reads is the rest.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the server and its proxy are those of the tests

import fake_gcs  # noqa: E402
import tiny  # noqa: E402

METADATA = "_CHECKPOINT_METADATA"
# Name of a row -> the command; {} is the run.
VERBS = {
    "train": ["train", "--config", "CONFIG", "--workdir", "{}"],
    "train, finished": ["train", "--config", "CONFIG", "--workdir", "{}"],
    "inspect": ["inspect", "{}"],
    "evaluate": ["evaluate", "{}"],
    "watch --once": ["watch", "{}", "--once", "--windows", "2,3"],
    "sweep": ["sweep", "{}", "--windows", "2,3"],
    "merge": ["merge", "{}", "--last", "4", "--out", "{}-merged"],
    "merge --on mesh": ["merge", "{}", "--last", "4", "--out", "{}-merged-on-mesh", "--on", "mesh"],
    "export": ["export", "{}-merged", "--out", "{}-exported"],
    "fork": ["fork", "{}", "--at-tokens", str(tiny.HORIZON // 3), "--workdir", "{}-fork"],
    "report": ["report", "{}"],
    "inspect --verify": ["inspect", "{}", "--verify"],
    "inspect --verify, merge": ["inspect", "{}-merged", "--verify"],
}


def count(requests: Sequence[Any]) -> dict[str, Any]:
    """Return the numbers and bytes of a command's requests."""
    reads = Counter(r.name for r in requests if r.kind == "read" and r.status < 300 and r.name.endswith(METADATA))
    return {
        "requests": len(requests),
        **{kind: sum(r.kind == kind for r in requests) for kind in ("list", "stat", "read", "write", "copy", "delete")},
        "megabytes down": round(sum(r.downloaded for r in requests) / 1e6, 3),
        "megabytes up": round(sum(r.uploaded for r in requests) / 1e6, 3),
        "metadata": max(reads.values(), default=0),
    }


def measure(snapshots: int, folder: Path, server: str) -> dict[str, dict[str, Any]]:
    """Train a run with this many snapshots, and return the counts of each verb."""
    steps = tiny.HORIZON // tiny.BATCH_TOKENS
    changes = {"checkpoint__interval_tokens": steps // snapshots * tiny.BATCH_TOKENS, "checkpoint__window": 2}
    config = tiny.write_config(folder / f"config_{snapshots}.py", folder, **changes)
    proxy, rows = fake_gcs.Proxy(server), {}
    try:
        for name, words in VERBS.items():
            command = [w.replace("{}", f"gs://bucket/run{snapshots}").replace("CONFIG", config) for w in words]
            fake_gcs.run(proxy, *command)
            rows[name] = count(proxy.take())
            print(f"{snapshots} snapshots: {name}: {rows[name]}", file=sys.stderr, flush=True)
    finally:
        proxy.close()
    return rows


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, nargs="+", default=[6, 12, 24], help="divisors of 24, ascending")
    parser.add_argument("--out", type=Path, help="write the counts as JSON")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder, fake_gcs.serve("bucket") as server:
        counts = {n: measure(n, Path(folder), server) for n in options.snapshots}
    if options.out:
        options.out.write_text(json.dumps(counts, indent=1) + "\n")
    *_, smaller, largest = options.snapshots
    print("| verb | " + " | ".join(f"requests, {n} snapshots" for n in counts) + " | growth | list / stat / read /"
          " write / copy / delete | MB down / up | metadata |")  # fmt: skip
    print("|" + "---|" * (len(counts) + 5))
    for verb in VERBS:
        last = counts[largest][verb]
        growth = math.log(last["requests"] / counts[smaller][verb]["requests"]) / math.log(largest / smaller)
        kinds = " / ".join(str(last[kind]) for kind in ("list", "stat", "read", "write", "copy", "delete"))
        numbers = " | ".join(str(counts[n][verb]["requests"]) for n in counts)
        size = f"{last['megabytes down']:g} / {last['megabytes up']:g}"
        print(f"| `{verb}` | {numbers} | {growth:.2f} | {kinds} | {size} | {last['metadata']} |")


if __name__ == "__main__":
    main()
