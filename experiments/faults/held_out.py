"""Is the loss on a sample of held-out text that of all held-out text, whatever the order and lengths of documents?

Command:   python experiments/faults/held_out.py [--package CHECKOUT] [--salts 200]

For each text a small model is trained by the command line. `pma evaluate` on 8k tokens must be within three of its
standard errors of `pma evaluate` on all held-out text (a single draw may be two away). The loss on 32k tokens of all
held-out text must be within two in at least 90% of the salts of the hash that orders documents; and on 32k tokens of
the part `report`, which has a third of the documents, in 85% if these are at least 30. A package without salts reads
the same text for each. The exit status is 1 if a cell fails.
"""

import argparse
import json
import os
import random
import re
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# Share of the salts. A part holds a third of the documents: of very different lengths, too few for a better estimate.
NEEDED = {"all": 0.9, "report": 0.85, "the first documents": 0.9}
MINIMUM_DOCUMENTS = 30
DOCUMENTS = 500
WORDS = [stem + end for stem in ("ar", "ben", "cor", "dal", "em") for end in ("a", "io", "um", "ette")]
KEYS = {
    "data.source": "files",
    "data.held_out_percent": 60,
    "model.width": 32,
    "model.layers": 1,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.head_dim": 16,
    "model.hidden": 64,
    "training.sequence_length_tokens": 64,
    "training.batch_size_sequences": 32,
    "training.total_tokens": 409_600,
    "schedule.peak_rate": 1e-2,
    "schedule.warmup_tokens": 8192,
    "checkpoint.interval_tokens": 409_600,
    "checkpoint.state_interval_tokens": 409_600,
    "evaluation.tokens": 8192,
    "evaluation.batch_size_sequences": 64,
    "preview.windows": "()",
}
# Prints a JSON object: the loss on all held-out text, and for each part the loss and standard error of each salt.
SALTS = """
import dataclasses, json, sys
import jax, numpy as np
from pma_jax.data.sampling import ALL, REPORT, sample_text
from pma_jax.evaluation import held_out
from pma_jax.model.decoder import abstract_params, graph_definition
from pma_jax.runs import snapshots
from pma_jax.runs.directory import newest_snapshot
from pma_jax.runtime.mesh import make_mesh
snapshot, salts, size = newest_snapshot(sys.argv[1]), int(sys.argv[2]), 64
config = snapshot.config
mesh, tokens = make_mesh(config.mesh), held_out.prepare_tokens(config)
params = snapshots.restore_params(snapshot, abstract_params(config.model, mesh))
def loss(part, wanted, salt):
    sample = sample_text(tokens, part, wanted, config.training.sequence_length_tokens, salt)
    with jax.set_mesh(mesh):
        batches, graph = held_out.put_sample(sample, size, mesh), graph_definition(config.model)
    return held_out.Evaluator(sample, batches, graph, mesh)(params)
whole = loss(ALL, tokens.validation.tokens, 0).loss
found = {part: [dataclasses.astuple(loss(part, 32768, salt)) for salt in range(salts)] for part in (ALL, REPORT)}
count = {part: sample_text(tokens, part, 64, 64).part_documents for part in found}
print(json.dumps({"whole": whole, "salts": found, "documents": count}))
"""


def main() -> int:
    """Evaluate every text, print a line for each cell, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=Path(__file__).parents[2], help="checkout to test")
    parser.add_argument("--salts", type=int, default=200)
    options = parser.parse_args()
    failures = 0
    for name, write in TEXTS.items():
        with tempfile.TemporaryDirectory() as folder:
            failures += test_text(name, write, Path(folder), options.package.resolve(), options.salts)
    print(f"{failures} cells failed" if failures else "all cells passed")
    return int(failures > 0)


def test_text(name: str, write: Callable[[Path], None], folder: Path, package: Path, salts: int) -> int:
    """Train on a text and evaluate it; return how many cells failed."""
    (folder / "text").mkdir()
    write(folder / "text")
    keys = KEYS | {"data.files": f"{folder}/text/*.txt", "data.cache_dir": folder / "cache"}
    overrides = [f"--config.{key}={value}" for key, value in keys.items()]
    run(package, "train", "--config", "tiny", "--workdir", folder / "run", *overrides)
    sample = evaluate(package, folder / "run")
    part = ["--part", "all"] if "held_out" in sample else []
    refusal = run(package, "evaluate", folder / "run", *part, "--config.evaluation.tokens=1e8", is_refused=True)
    (available,) = re.findall(r"(?:only|predict) ([\d,]+)", refusal)
    whole = evaluate(package, folder / "run", *part, f"--config.evaluation.tokens={available.replace(',', '')}")
    error = sample.get("standard_error")
    far = error is None or abs(sample["loss"] - whole["loss"]) > 3 * error
    with_error = "no standard error" if error is None else f"± {error:.4f}"
    losses = f"{sample['loss']:.4f} {with_error} on 8k tokens, {whole['loss']:.4f} on all {available}"
    print(f"{name}: pma evaluate: {losses}: {'FAILED' if far else 'passed'}", flush=True)
    failures = int(far)
    for of_part, (within, documents) in count_salts(package, folder / "run", salts).items():
        verdict = "FAILED" if within < NEEDED[of_part] * salts else "passed"
        if documents < MINIMUM_DOCUMENTS:
            verdict = f"not required of {documents} documents"
        print(
            f"{name}: 32k tokens of {of_part}: {within} of {salts} salts within two standard errors: {verdict}",
            flush=True,
        )
        failures += verdict == "FAILED"
    return failures


def count_salts(package: Path, run_path: Path, salts: int) -> dict[str, tuple[int, int]]:
    """Return for each part in how many salts the loss is within two standard errors, and its number of documents."""
    if not (package / "pma_jax/data/sampling.py").exists():
        return {"the first documents": (0, MINIMUM_DOCUMENTS)}
    done = subprocess.run(
        [sys.executable, "-c", SALTS, str(run_path), str(salts)],
        cwd=package,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        part: (sum(abs(loss - found["whole"]) <= 2 * error for loss, error in losses), found["documents"][part])
        for part, losses in found["salts"].items()
    }


def evaluate(package: Path, *arguments: object) -> dict:
    """Return the row of `pma evaluate --json`."""
    return json.loads(run(package, "evaluate", *arguments, "--json"))[0]


def run(package: Path, *arguments: object, is_refused: bool = False) -> str:
    """Run `pma` of a checkout; return its output, or what it says if it is to refuse."""
    done = subprocess.run(
        [sys.executable, "-m", "pma_jax.cli", *map(str, arguments)],
        cwd=package,
        env=os.environ | {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if (done.returncode != 0) != is_refused:
        raise RuntimeError(f"pma {arguments[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stderr if is_refused else done.stdout


def ordinary(rng: random.Random, length: int) -> str:
    """Return a text that the model learns."""
    return " ".join(rng.choices(WORDS, k=max(length // 6, 1))) + "\n"


def strange(rng: random.Random, length: int) -> str:
    """Return a text that nothing can predict."""
    return "".join(rng.choices(string.ascii_letters + string.digits, k=length)) + "\n"


def write_strange_first(folder: Path) -> None:
    """Write small documents, of which those that sort first are strange (15%)."""
    rng = random.Random(0)
    for i in range(DOCUMENTS):
        is_strange = i < 0.15 * DOCUMENTS
        text = (strange if is_strange else ordinary)(rng, 600)
        (folder / f"{'a' if is_strange else 'b'}{i:04d}.txt").write_text(f"{i} {text}")


def write_heavy_tail(folder: Path) -> None:
    """Write documents of very different lengths (100 to 8,000 bytes), of which 15% are strange, in any order."""
    rng = random.Random(1)
    for i in range(2 * DOCUMENTS):
        length = min(int(100 * rng.paretovariate(1)), 8000)
        text = (strange if rng.random() < 0.15 else ordinary)(rng, length)
        (folder / f"{i:04d}.txt").write_text(f"{i} {text}")


def write_few(folder: Path) -> None:
    """Write few documents, long and short, of which those that sort last are strange: about 36 are held out."""
    rng = random.Random(2)
    for i in range(60):
        text = (strange if i >= 51 else ordinary)(rng, rng.choice([2000, 4000, 8000, 16_000]))
        (folder / f"{i:04d}.txt").write_text(f"{i} {text}")


TEXTS = {"strange documents first": write_strange_first, "heavy tail": write_heavy_tail, "few documents": write_few}

if __name__ == "__main__":
    sys.exit(main())
