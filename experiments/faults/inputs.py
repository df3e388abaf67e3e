"""A workspace with one of every file that `pma` reads, and the cells of `bad_inputs.py`: a file and a command."""

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

BATCH = 256  # tokens
KEYS = {
    "data": {"source": "files", "files": ("text/*.txt",), "held_out_percent": 30.0, "cache_dir": "cache"},
    "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "hidden": 32},
    "training": {
        "total_tokens": 12 * BATCH,
        "sequence_length_tokens": 32,
        "batch_size_sequences": 8,
        "log_interval_tokens": BATCH,
    },
    "checkpoint": {"interval_tokens": 4 * BATCH, "state_interval_tokens": 4 * BATCH, "keep_states": 3, "window": 2},
    "evaluation": {"tokens": 256, "batch_size_sequences": 8},
    "preview": {"windows": (2,)},
}
CONFIG = (
    "from pma_jax import config\n\n\ndef get_config():\n    c = config.defaults()\n"
    f"    c.update({KEYS!r})\n    return c\n"
)
SPIKE = {
    "kind": "spike",
    "tokens": 9 * BATCH,
    "step": 9,
    "verdict": "irrecoverable",
    "onset_tokens": 8 * BATCH,
    "loss": 9.0,
    "peak_loss": 9.0,
    "median_loss": 5.0,
    "spread_nats": 0.1,
}
EVENT = {
    "number": 1,
    "attempt": 1,
    "spike": SPIKE,
    "recipe": "sma",
    "merged": [{"path": "snapshots/4", "step": 4, "tokens": 4 * BATCH}],
    "coefficients": [1.0],
    "tokens": 4 * BATCH,
    "step": 4,
    "position_there": 32,
    "position": 32,
    "optimizer": "reset",
    "optimizer_step": None,
    "aside": {},
    "done": True,
}


TRAIN = ("train", "--config", "mine.py", "--workdir")
LAST_STEP = "12"
RESUME = "train --config mine.py --workdir part"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A file of the workspace and a command that reads it, or a command with a list of bad arguments."""

    name: str
    file: str
    command: tuple[str, ...]
    is_json: bool = False
    bad_arguments: tuple[tuple[str, tuple[str, ...]], ...] = ()


def preload() -> Callable[[list[str]], int]:
    """Import `pma` and every module of it that exists, without starting a JAX backend; return its `main`."""
    import pma_jax

    package = Path(pma_jax.__file__).parent
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if parts[-1] not in ("__init__", "__main__"):
            importlib.import_module(".".join(parts))
    importlib.import_module("ml_collections")
    return importlib.import_module("pma_jax.cli").main


def make_workspace(folder: Path) -> None:
    """Write a corpus in three formats, and make a run, merges, Hugging Face directories and Orbax checkpoints.

    The package is the one in the first folder of `sys.path`.
    """
    temporary = folder.with_name(f"{folder.name}.making")
    (temporary / "text").mkdir(parents=True)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["alpha", "beta", "gamma", "delta"], 40)) + "\n" for _ in range(60)]
    for i, text in enumerate(texts):
        (temporary / f"text/{i:03}.txt").write_text(f"{i} {text}")
    (temporary / "lines.jsonl").write_text("".join(json.dumps({"text": t, "n": i}) + "\n" for i, t in enumerate(texts)))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts}), temporary / "table.parquet")
    (temporary / "mine.py").write_text(CONFIG)
    for command in (
        "train --config mine.py --workdir run",
        "sweep run --recipes sma --windows 2",
        "watch run --once --recipe wma",
        "merge run --last 2 --out merged",
        "merge run --last 2 --out tensors --format safetensors",
        "merge run --last 1 --out other --format safetensors",
        "export run --out hf",
        "export run --out sharded --shard-size 5KB",
    ):
        _pma(temporary, command.split())
    (temporary / "run/spikes/1").mkdir(parents=True)
    (temporary / "run/spikes/1/event.json").write_text(json.dumps(EVENT))
    shutil.copytree(temporary / "run", temporary / "part")  # a run that was stopped at step 8
    for folder_of_step in ("states", "snapshots"):
        shutil.rmtree(temporary / "part" / folder_of_step / LAST_STEP)
    _write_orbax(temporary / "orbax")
    temporary.rename(folder)


def _pma(folder: Path, arguments: Sequence[str]) -> None:
    code = "import sys; from pma_jax.cli import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": sys.path[0]}
    subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env=environment, check=True, capture_output=True
    )


def _write_orbax(folder: Path) -> None:
    code = (
        "import sys, numpy as np, orbax.checkpoint as ocp\n"
        "for step in (1, 2):\n"
        "    tree = {'params': {'w': np.full((8, 4), step, 'f4'), 'b': np.arange(3, dtype='f4')}}\n"
        "    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(f'{sys.argv[1]}/{step}', tree)\n"
    )
    subprocess.run([sys.executable, "-c", code, folder.resolve()], check=True, capture_output=True)


INPUTS: dict[str, tuple[bool, tuple[str, ...]]] = {
    # file -> (is JSON, commands that read it)
    "run/config.json": (
        True,
        (
            "inspect run",
            "merge run --last 2 --out new",
            "evaluate run",
            "watch run --once",
            "sweep run --windows 2 --recipes wma",
            "report run",
            "fork run --at-tokens 2048 --workdir new",
            "export run --out new",
        ),
    ),
    "run/run.json": (
        True,
        (
            "inspect run --json",
            "report run",
            "fork run --at-tokens 2048 --workdir new",
        ),
    ),
    "run/metrics.jsonl": (True, ("report run", "inspect run --verify")),
    "run/watch.jsonl": (True, ("report run", "watch run --once --recipe wma", "inspect run --verify")),
    "run/sweep.json": (True, ("report run", "sweep run --windows 2 --recipes wma")),
    "run/spikes/1/event.json": (True, ("report run",)),
    f"run/snapshots/{LAST_STEP}/_CHECKPOINT_METADATA": (
        True,
        (
            f"inspect run/snapshots/{LAST_STEP}",
            "inspect run",
            "merge run --last 2 --out new",
            f"evaluate run/snapshots/{LAST_STEP}",
            f"export run/snapshots/{LAST_STEP} --out new",
            "sweep run --windows 2 --recipes wma",
            "watch run --once --recipe ema:alpha=0.3",
        ),
    ),
    f"run/snapshots/{LAST_STEP}/params/_METADATA": (
        True,
        (f"inspect run/snapshots/{LAST_STEP}", "merge run --last 2 --out new", f"evaluate run/snapshots/{LAST_STEP}"),
    ),
    f"run/snapshots/{LAST_STEP}/params/manifest.ocdbt": (
        False,
        (f"inspect run/snapshots/{LAST_STEP}", "merge run --last 2 --out new", f"evaluate run/snapshots/{LAST_STEP}"),
    ),
    f"run/states/{LAST_STEP}/_CHECKPOINT_METADATA": (
        True,
        ("inspect run", "fork run --at-tokens 3072 --workdir new --config.training.total_tokens=4096"),
    ),
    "run/states/8/_CHECKPOINT_METADATA": (True, ("fork run --at-tokens 2048 --workdir new",)),
    **{
        f"part/{file}": (True, (RESUME,))
        for file in ("config.json", "run.json", "metrics.jsonl", "spikes/1/event.json")
    },
    "part/states/8/_CHECKPOINT_METADATA": (True, (RESUME,)),
    "part/snapshots/8/_CHECKPOINT_METADATA": (True, (RESUME,)),
    "part/states/8/state/_METADATA": (True, (RESUME,)),
    "part/lock": (False, (RESUME,)),
    "merged/provenance.json": (
        True,
        ("inspect merged", "inspect merged --verify", "evaluate merged", "export merged --out new"),
    ),
    "tensors/provenance.json": (True, ("inspect tensors --verify", "merge tensors other --out new")),
    "tensors/model.safetensors": (
        False,
        ("inspect tensors", "inspect tensors/model.safetensors", "merge tensors other --out new"),
    ),
    "hf/config.json": (True, ("import hf --out new", "merge hf sharded --dtype bfloat16 --out new")),
    "hf/tokenizer.json": (True, ("import hf --out new", "export run --tokenizer hf/tokenizer.json --out new")),
    "hf/model.safetensors": (False, ("import hf --out new", "inspect hf")),
    "sharded/model.safetensors.index.json": (
        True,
        ("inspect sharded", "import sharded --out new", "merge sharded hf --out new"),
    ),
    "orbax/2/_METADATA": (True, ("inspect orbax/2", "merge orbax --out new")),
    "orbax/2/_CHECKPOINT_METADATA": (True, ("inspect orbax/2", "merge orbax --out new")),
    "orbax/2/params.w/.zarray": (True, ("inspect orbax/2", "merge orbax --out new")),
    "orbax/2/params.w/0.0": (False, ("merge orbax --out new",)),
    "text/007.txt": (False, ("train --config mine.py --workdir new", "evaluate run --config.evaluation.tokens=300")),
    "lines.jsonl": (True, ("train --config mine.py --workdir new --config.data.files=lines.jsonl",)),
    "table.parquet": (False, ("train --config mine.py --workdir new --config.data.files=table.parquet",)),
    "mine.py": (False, ("train --config mine.py --workdir new",)),
}


def _file_cells() -> Iterator[Cell]:
    for file, (is_json, commands) in INPUTS.items():
        for command in commands:
            words = tuple(command.split())
            verb = " ".join(words[:1] + tuple(w for w in words if w in ("--verify", "--json", "--tokenizer")))
            yield Cell(f"{file} x {verb}", file, words, is_json)
    tokenizer = ("train", "--config", "mine.py", "--workdir", "new", "--config.data.tokenizer=hf/tokenizer.json")
    yield Cell("hf/tokenizer.json x train", "hf/tokenizer.json", tokenizer, True)


BAD_VALUES = {
    "int": (
        "nan",
        "inf",
        "-1e30",
        "1e30",
        "1e400",
        "1" + "0" * 400,
        "9" * 5000,
        "1.5",
        "true",
        "x",
        "",
        "-7",
        "99999999999",
    ),
    "float": ("nan", "inf", "-inf", "1e400", "-1e30", "9" * 5000, "true", "x", ""),
    "bool": ("2", "yes", "", "None", "nan"),
    "str": ("", "\0", "a\nb", "x" * 100_000, "/dev/zero", "/nowhere/at/all", "\udce9", ".."),
    "tuple": ("x", "nan", "1e400", "-1", "," * 50, "1," * 100_000, "(((((", ""),
}


def _override_cells() -> Iterator[Cell]:
    """Yield a cell per section of the configuration and verb, with bad values of every key."""
    from pma_jax import config

    for section, keys in config.defaults().to_dict().items():
        bad = []
        for key, default in keys.items():
            for value in BAD_VALUES[type(default).__name__]:
                if (key, value) not in ALLOWED:
                    bad.append((key, (f"--config.{section}.{key}={value}",)))
        yield Cell(f"--config.{section}.* x train", "", (*TRAIN, "new"), bad_arguments=tuple(bad))
    evaluation = tuple(
        (k, (f"--config.evaluation.{k}={v}",)) for k in ("tokens", "batch_size_sequences") for v in BAD_VALUES["int"]
    )
    yield Cell("--config.evaluation.* x evaluate", "", ("evaluate", "run"), bad_arguments=evaluation)


# Values that mean something for their key: empty lists and texts, and seeds.
ALLOWED = {
    *((key, "") for key in ("package", "hub_name", "hub_subset", "start_from", "windows", "keep_states_at_tokens")),
    ("seed", "-7"),
    ("seed", "99999999999"),
}


def make_cells() -> list[Cell]:
    """Return all cells. The configuration keys are those of the package that is first on `sys.path`."""
    return [*_file_cells(), *_override_cells()]
