"""Speed of task scores against lm-eval's `hf` backend: the same model, requests and batch, on this machine's CPU.

    pip install -e '.[eval,torch]'
    python experiments/benchmarks/tasks.py [--width 256] [--requests 200]

A Llama of random float32 weights reads bytes, at most 256 at once. The requests are those of the packaged tasks, made
from Python's standard library: `choices` are the answers of `pma:docstring` and `pma:last_line` (log-likelihoods),
`texts` are their prompts as whole texts (rolling log-likelihoods), and `generation` continues the prompts by 32 bytes.
Each round measures both backends in turn, after one round that compiles. Prints one JSON object: median requests per
second of each, and their ratio (ours / `hf`; the bar is 1.0 for each kind). It also checks that the numbers agree.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from pma_jax import config as configuration
from pma_jax.evaluation.harness_model import HarnessModel
from pma_jax.evaluation.snapshot_tokenizer import tokenizer_of_snapshot
from pma_jax.evaluation.task_scores import quiet
from pma_jax.evaluation.tasks.load import load_tasks
from pma_jax.evaluation.token_scores import make_model
from pma_jax.interop import hf
from pma_jax.model.decoder import init_params
from pma_jax.runs.directory import create_run
from pma_jax.runs.snapshots import Snapshot, read_snapshot, save_snapshot
from pma_jax.runtime.mesh import make_mesh

LENGTH, BATCH, GENERATED = 256, 16, 32


def make_backends(folder: Path, width: int) -> dict[str, object]:
    """Write a snapshot of random weights and its export; return a model of lm-eval for each."""
    model = {"width": width, "layers": 8, "heads": width // 64, "kv_heads": width // 64, "head_dim": 64}
    model |= {"hidden": 4 * width, "compute_dtype": "float32", "vocabulary_size": 256}
    training = {"sequence_length_tokens": LENGTH, "batch_size_sequences": BATCH, "total_tokens": 2**20}
    config = configuration.resolve(
        {"model": model, "training": training, "evaluation": {"batch_size_sequences": BATCH}}
    )
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        params = init_params(config.model, jax.random.key(0))
    run = create_run(folder / "run", config, {})
    with run.writer("snapshots") as writer:
        save_snapshot(writer, params, Snapshot(run.path, 1, LENGTH * BATCH, None, config))
    snapshot = read_snapshot(run.path / "snapshots" / "1")
    hf.export_snapshot(str(snapshot.path), folder / "exported")
    with quiet():
        peer = HFLM(pretrained=str(folder / "exported"), device="cpu", dtype="float32", batch_size=BATCH)
    return {
        "pma_jax": HarnessModel(make_model(config, params, mesh), tokenizer_of_snapshot(snapshot, config)),
        "hf": peer,
    }


def make_requests(count: int) -> dict[str, tuple[str, list[Instance]]]:
    """Return the method of lm-eval's models and its requests, by name; each has about `count` requests."""
    tasks = load_tasks(["pma:docstring", "pma:last_line"])["tasks"]
    asked: list[tuple[str, str]] = []
    for task in tasks.values():
        with quiet():
            task.build_all_requests(limit=-(-count // 8), rank=0, world_size=1)
        asked += [instance.args for instance in task.instances]
    prompts = list(dict.fromkeys(context for context, _ in asked))
    options = {"until": [], "max_gen_toks": GENERATED, "do_sample": False}

    def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
        return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]

    return {
        "choices": ("loglikelihood", instances("loglikelihood", asked)),
        "texts": ("loglikelihood_rolling", instances("loglikelihood_rolling", [(p,) for p in prompts])),
        "generation": ("generate_until", instances("generate_until", [(p, options) for p in prompts])),
    }


def check_equal(ours: list, theirs: list) -> None:
    """Raise RuntimeError if the backends disagree; of generated texts, some ties may differ."""
    if isinstance(ours[0], str):
        different = sum(a != b for a, b in zip(ours, theirs, strict=True))
        if different > len(ours) // 50:
            raise RuntimeError(f"{different} of {len(ours)} texts differ")
        return
    values = [np.array([np.atleast_1d(r)[0] for r in results]) for results in (ours, theirs)]
    if not np.allclose(*values, rtol=1e-5, atol=1e-4):
        raise RuntimeError(f"log-likelihoods differ by {np.abs(values[0] - values[1]).max()}")


def main() -> None:
    """Measure, and print the medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="width of the model, a multiple of 64 (default 256)")
    parser.add_argument("--requests", type=int, default=200, help="about how many log-likelihoods (default 200)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        backends = make_backends(Path(folder), arguments.width)
    result = {}
    for name, (method, requests) in make_requests(arguments.requests).items():
        seconds: dict[str, list[float]] = {backend: [] for backend in backends}
        answers = {}
        for round_number in range(arguments.rounds + 1):
            for backend, model in backends.items():
                began = time.perf_counter()
                with quiet():
                    answers[backend] = getattr(model, method)(requests, disable_tqdm=True)
                if round_number:
                    seconds[backend].append(time.perf_counter() - began)
        check_equal(answers["pma_jax"], answers["hf"])
        rates = {backend: len(requests) / statistics.median(values) for backend, values in seconds.items()}
        ranges = {b: [len(requests) / x for x in (max(values), min(values))] for b, values in seconds.items()}
        ratio = rates["pma_jax"] / rates["hf"]
        result[name] = {"requests": len(requests), "per_second": rates, "range_per_second": ranges, "ratio": ratio}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
