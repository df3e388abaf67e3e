"""Which checkpoints `pma merge` takes from directories as trainers leave them, in which order, and what it refuses.

Each case is a directory, the words of the command after `pma merge`, and what must come of it: the inputs, oldest
first, or a message. `make` explains the words of a directory.
"""
# ruff: noqa: E501 (the tables have one line per case)

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from pma_jax.cli import main

SHARD = "model-00001-of-00002.safetensors"


def make(root, words):
    """Create a directory. A word is a path; a prefix says what it is, if not a checkpoint with safetensors.

    `empty:` a directory; `text:` a directory with a log; `file:`; `link:NAME=TARGET`; `bin:` a pickle; `index:` an index
    without its shards; `shard:` one of two shards; `merge:` an earlier merge; `state=N:` with trainer_state.json at step
    N; `orbax:` an Orbax item with one zarr array; `run:` a run of pma_jax.
    """
    for word in words.split():
        kind, _, name = word.rpartition(":")
        path = root / name.partition("=")[0] if kind == "link" else root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            path.symlink_to(name.partition("=")[2])
        elif kind == "file":
            path.write_text("text")
        elif kind == "orbax":
            write_orbax(path)
        else:
            path.mkdir(exist_ok=True)
            if kind == "text":
                (path / "events.log").write_text("text")
            elif kind == "bin":
                (path / "pytorch_model.bin").write_bytes(b"\x80")
            elif kind == "index":
                index = {"weight_map": {"w": SHARD}}
                (path / "model.safetensors.index.json").write_text(json.dumps(index))
            elif kind == "run":
                (path / "run.json").write_text("{}")
                (path / "config.json").write_text("{}")
            elif kind != "empty":
                write(path / (SHARD if kind == "shard" else "model.safetensors"))
            if kind == "merge":
                (path / "provenance.json").write_text("{}")
            if kind.startswith("state="):
                state = {"global_step": int(kind[6:]), "log_history": [{"loss": float("nan")}]}
                (path / "trainer_state.json").write_text(json.dumps(state))


def write(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.arange(4, dtype=np.float32)}, file)


def write_orbax(path):
    """Write the tree of an Orbax item as the library does with zarr and without OCDBT."""
    array = path / "w"
    array.mkdir(parents=True)
    dtype = {"dtype": "<f4", "shape": [4], "chunks": [4], "fill_value": None, "filters": None, "compressor": None}
    (array / ".zarray").write_text(json.dumps(dtype | {"order": "C", "zarr_format": 2, "dimension_separator": "."}))
    (array / "0").write_bytes(np.arange(4, dtype="<f4").tobytes())
    entry = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    (path / "_METADATA").write_text(json.dumps({"tree_metadata": {"('w',)": entry}, "use_zarr3": False}))


@pytest.fixture
def merge(tmp_path, monkeypatch, capsys):
    """Return a function that makes a directory and plans a merge in it: exit status, inputs, notes or the error."""
    monkeypatch.chdir(tmp_path)

    def run(tree, command):
        make(tmp_path, tree)
        capsys.readouterr()
        try:
            status = main(["merge", *command.split(), "--out", "OUT", "--dry-run", "--json"])
        except SystemExit as left:
            status = left.code
        out, err = capsys.readouterr()
        if status != 0:
            assert len(err.splitlines()) == 1 and err.startswith("error: "), err
            return status, [], err
        plan = json.loads(out)
        paths = [entry["source"].removeprefix(f"{tmp_path}/") for entry in plan["inputs"]]
        return status, paths, "\n".join(plan["notes"])

    return run


SUITE = "s/step1 s/step2 s/step10"
ORDERED = ["s/step1", "s/step2", "s/step10"]
STAGES = "s/stage1-step10000-tokens40B s/stage1-step20000-tokens80B s/stage2-ingredient1-step2000-tokens6B"
STAGED = STAGES.split()
ANNEAL = "s/step1000 s/step2000 s/step1500-anneal"

# name: (directory, command, inputs oldest first, words of the notes)
TAKEN = {
    "numbers, not text": (SUITE, "s", ORDERED, ""),
    "last of a directory": (SUITE, "s --last 2", ORDERED[1:], ""),
    "HF": ("s/checkpoint-500 s/checkpoint-1500 s/checkpoint-1000", "s --last 2", ["s/checkpoint-1000", "s/checkpoint-1500"], ""),
    "HF, named": ("checkpoint-1500 checkpoint-500 checkpoint-1000", "checkpoint-1500 checkpoint-500 checkpoint-1000 --last 2", ["checkpoint-1000", "checkpoint-1500"], "ordered by steps"),
    "checkpoint_N": ("s/checkpoint_90 s/checkpoint_100", "s", ["s/checkpoint_90", "s/checkpoint_100"], ""),
    "N": ("s/90 s/100", "s --last 1", ["s/100"], ""),
    "step=N": ("s/step=90 s/step=100", "s --last 1", ["s/step=100"], ""),
    "step_N": ("s/step_90 s/step_100", "s --last 1", ["s/step_100"], ""),
    "step-N": ("s/step-90 s/step-100", "s --last 1", ["s/step-100"], ""),
    "iter_000N": ("s/iter_0000090 s/iter_0000100", "s --last 1", ["s/iter_0000100"], ""),
    "global_stepN": ("s/global_step90 s/global_step100", "s --last 1", ["s/global_step100"], ""),
    "baN": ("s/ep0-ba90-rank0 s/ep1-ba100-rank0", "s --last 1", ["s/ep1-ba100-rank0"], ""),
    "ckpt_N": ("s/ckpt_90 s/ckpt-100", "s --last 1", ["s/ckpt-100"], ""),
    "big_vision": ("s/checkpoint.bv-000000090 s/checkpoint.bv-000000100", "s --last 1", ["s/checkpoint.bv-000000100"], ""),
    "several ways to write steps": ("s/step1000 s/checkpoint-500 s/1500 s/iter_0002000", "s --recipe wma", ["s/checkpoint-500", "s/step1000", "s/1500", "s/iter_0002000"], ""),
    "parent of an item": ("orbax:1000/items orbax:500/items orbax:900/default", "1000/items 500/items 900/default --last 2 --across-stages", ["900/default", "1000/items"], ""),
    "parent of a model": ("checkpoint-900/model checkpoint-1000/model", "checkpoint-1000/model checkpoint-900/model --last 1", ["checkpoint-1000/model"], ""),
    "parent of a file": ("checkpoint-900 checkpoint-1000", "checkpoint-1000/model.safetensors checkpoint-900/model.safetensors --last 1", ["checkpoint-1000/model.safetensors"], ""),
    "items in a directory": ("orbax:s/1000/items orbax:s/500/items", "s --last 1", ["s/1000"], ""),
    "models in a directory": ("s/checkpoint-900/model s/checkpoint-1000/model", "s --last 1", ["s/checkpoint-1000/model"], ""),
    "ranks": ("s/global_step90/mp_rank_00 s/global_step100/mp_rank_00", "s --last 1", ["s/global_step100/mp_rank_00"], ""),
    "k": ("s/step9k s/step10k s/step8500", "s --recipe wma", ["s/step8500", "s/step9k", "s/step10k"], ""),
    "tokens in several units": ("s/step2-tokens900M s/step3-tokens1B s/step1-tokens800000K", "s --tokens 850M:1B", ["s/step2-tokens900M", "s/step3-tokens1B"], ""),
    "tokens to": ("s/step1-tokens10B s/step2-tokens20B s/step3-tokens30B", "s --tokens :2e10", ["s/step1-tokens10B", "s/step2-tokens20B"], ""),
    "tokens after": ("s/step1-tokens10B s/step2-tokens20B s/step3-tokens30B", "s --tokens 20B:", ["s/step2-tokens20B", "s/step3-tokens30B"], ""),
    "tokens between": ("s/step1-tokens10B s/step2-tokens20B s/step3-tokens30B", "s --tokens 0.015T:2.5e10", ["s/step2-tokens20B"], ""),
    "tokens per step": (SUITE, "s --tokens-per-step 2M --tokens 4M:", ORDERED[1:], ""),
    "epochs": ("s/epoch_2 s/epoch_10 s/epoch_1", "s --last 2", ["s/epoch_2", "s/epoch_10"], ""),
    "epochs and steps": ("s/epoch=9-step=90 s/epoch=10-step=100", "s --last 1", ["s/epoch=10-step=100"], ""),
    "losses in names": ("s/epoch=0-step=90-val_loss=2.31 s/epoch=1-step=100-val_loss=2.11", "s --last 1", ["s/epoch=1-step=100-val_loss=2.11"], ""),
    "model size in names": ("s/llama-3-8b-step90 s/llama-3-8b-step100", "s --last 1", ["s/llama-3-8b-step100"], ""),
    "model size after the step": ("s/step90-7B s/step100-7B s/step80-7B", "s --last 2", ["s/step90-7B", "s/step100-7B"], "several steps have the same tokens"),
    "trainer_state": ("state=90:a state=100:b state=80:c", "a b c --last 2", ["a", "b"], ""),
    "trainer_state agrees": ("state=90:s/checkpoint-90 state=100:s/checkpoint-100", "s --last 1", ["s/checkpoint-100"], ""),
    "trainer_state differs": ("state=90:s/checkpoint-95 state=100:s/checkpoint-100", "s --last 2", ["s/checkpoint-95", "s/checkpoint-100"], "its name says step 95 and trainer_state.json 90; 90 is used"),
    "final": (SUITE + " s/final", "s", ORDERED, "final (no step in the name)"),
    "best and last": (SUITE + " s/best s/last s/checkpoint-final", "s", ORDERED, "best, checkpoint-final, last (no step in the name)"),
    "temporary of HF": (SUITE + " s/tmp-checkpoint-11", "s", ORDERED, "tmp-checkpoint-11 (temporary"),
    "temporary of Orbax": (SUITE + " s/11.orbax-checkpoint-tmp-1716 s/step12.orbax-checkpoint-tmp", "s", ORDERED, "step12.orbax-checkpoint-tmp (temporary"),
    "other temporaries": (SUITE + " s/step11.tmp s/step12.partial s/temp_step13", "s", ORDERED, "temp_step13 (temporary"),
    "link to a sibling": (SUITE + " link:s/latest=step10", "s --last 2", ORDERED[1:], "latest (a link to step10)"),
    "link with a number to a sibling": (SUITE + " link:s/step11=step10", "s --last 2", ORDERED[1:], "step11 (a link to step10)"),
    "link to nothing": (SUITE + " link:s/step11=gone", "s", ORDERED, "step11 (a link to nothing)"),
    "link under another step": (SUITE + " t/step5 link:s/step11=../t/step5", "s", ORDERED, "step11 (a link to step5)"),
    "two links to one": (SUITE + " t/x link:s/step11=../t/x link:s/step12=../t/x", "s", [*ORDERED, "s/step11"], "step12 (the same directory as step11)"),
    "directory of links": (SUITE + " link:t/step2=../s/step2 link:t/step10=../s/step10", "t", ["t/step2", "t/step10"], ""),
    "earlier merge": (SUITE + " merge:s/sma-3", "s", ORDERED, "sma-3 (an earlier merge"),
    "earlier merge with a step": (SUITE + " merge:s/step9-merged", "s", ORDERED, "step9-merged (an earlier merge"),
    "files and logs": (SUITE + " file:s/README.md file:s/train.log text:s/runs", "s", ORDERED, "README.md, runs, train.log (not a checkpoint)"),
    "root beside what is not read": ("s bin:s/checkpoint-5 empty:s/checkpoint-6 text:s/runs", "s", ["s"], "checkpoint-5 (its format is not read); checkpoint-6 (incomplete: it is empty)"),
    "hidden": (SUITE + " s/.step11 text:s/.cache", "s", ORDERED, ".cache, .step11 (hidden)"),
    "a run": (SUITE + " run:s/run-1", "s", ORDERED, "run-1 (a run)"),
    "base model": (SUITE + " s/llama-3-8b s/v2", "s", ORDERED, "llama-3-8b, v2 (no step in the name)"),
    "date": (SUITE + " s/2024-01-05 s/checkpoint-20240106", "s", ORDERED, "2024-01-05, checkpoint-20240106 (no step in the name)"),
    "empty": (SUITE + " empty:s/step11", "s", ORDERED, "step11 (incomplete: it is empty)"),
    "index without shards": (SUITE + " index:s/step11", "s", ORDERED, "step11 (incomplete: 1 files of its index are missing)"),
    "one shard of two": (SUITE + " shard:s/step11", "s", ORDERED, "step11 (incomplete: 1 of 2 files, and no index)"),
    "pickles": (SUITE + " bin:s/step11", "s", ORDERED, "step11 (its format is not read)"),
    "last stage only": (STAGES, "s --last 1", STAGED[2:], "restart between the stages"),
    "tokens of one stage": (STAGES, "s --tokens 20B:90B --recipe wma", STAGED[:2], ""),
    "tokens of one stage, every": (STAGES, "s --tokens 20B:90B --every 40B", STAGED[:2], ""),
    "tokens across stages": (STAGES, "s --tokens 5B:90B --across-stages", STAGED, "crosses a boundary"),
    "tokens of a given order": (STAGES, f"{STAGED[1]} {STAGED[0]} --order given --tokens 20B:", STAGED[1::-1], "although the tokens are"),
    "rounded tokens": ("s/step1000-tokens7B s/step2000-tokens7B s/step3000-tokens8B s/step4000-tokens9B", "s --tokens :8B", ["s/step1000-tokens7B", "s/step2000-tokens7B", "s/step3000-tokens8B"], "ordered by steps"),
    "across stages": (STAGES, "s --across-stages --recipe wma", STAGED, "crosses a boundary"),
    "across stages, last": (STAGES, "s --across-stages --last 2", STAGED[1:], "restart between the stages"),
    "across stages, named": (STAGES, f"{STAGED[2]} {STAGED[0]} {STAGED[1]} --across-stages", STAGED, "crosses a boundary"),
    "stages in directories": ("stage1/step10 stage1/step20 stage2/step5", "stage2 stage1 --across-stages --last 2", ["stage1/step20", "stage2/step5"], ""),
    "annealed last": (ANNEAL, "s --across-stages --last 2", ["s/step2000", "s/step1500-anneal"], "crosses a boundary"),
    "stages with one count": ("s/stage1-step10 s/stage2-step20 s/stage2-step30", "s --last 2", ["s/stage2-step20", "s/stage2-step30"], ""),
    "runs allowed": ("a/step10 b/step20", "a/step10 b/step20 --across-stages --recipe wma", ["a/step10", "b/step20"], "crosses"),
    "same step twice, named": ("s/step10 s/step0010", "s/step10 s/step0010", ["s/step10", "s/step0010"], "the same position"),
    "twins allowed": ("a/step10 b/step10", "a/step10 b/step10 --across-stages", ["a/step10", "b/step10"], "the same position"),
    "order unknown, equal weights": ("s/a s/b s/c", "s/b s/a s/c", ["s/b", "s/a", "s/c"], "their order is not known"),
    "order unknown, all": ("s/a s/b", "s/b s/a --last 2", ["s/b", "s/a"], "their order is not known"),
    "order unknown, weights of one": ("s/a s/b", "s/b s/a --recipe weights:0.5,0.5", ["s/b", "s/a"], ""),
    "order given": ("s/a s/b s/c", "s/b s/a s/c --order given --last 2", ["s/a", "s/c"], ""),
    "order given, recipe": ("s/a s/b s/c", "s/b s/a s/c --order given --recipe ema:alpha=0.2", ["s/b", "s/a", "s/c"], ""),
    "order given against steps": (SUITE, "s/step10 s/step2 s/step1 --order given --last 2", ["s/step2", "s/step1"], "although the steps are 10, 2, 1"),
    "order given as by steps": (SUITE, "s/step1 s/step2 s/step10 --order given --recipe decay:shape=linear", ORDERED, ""),
    "order given of directories": (SUITE + " t/step4 t/step3", "t s --order given --across-stages", ["t/step3", "t/step4", *ORDERED], ""),
    "weights in order": (SUITE, "s/step1 s/step2 s/step10 --recipe weights:0.2,0.3,0.5", ORDERED, ""),
    "merge and checkpoint": ("merge:out s/step5", "out s/step5", ["out", "s/step5"], "their order is not known"),
}  # fmt: skip

TRAINER = "s s/checkpoint-500 s/checkpoint-1000"
# name: (directory, command, words of the error)
REFUSED = {
    "root of a Trainer": (TRAINER, "s", "s/model.safetensors for its own"),
    "root of a Trainer, last": (TRAINER, "s --last 2", "such as s/checkpoint-1000"),
    "root of a Trainer among others": (TRAINER + " t/step1", "t s", "holds a checkpoint of its own"),
    "root with Orbax": ("orbax:s s/step5", "s", "holds a checkpoint of its own"),
    "stages": (STAGES, "s", "crosses a boundary"),
    "stages, last": (STAGES, "s --last 2", "crosses a boundary"),
    "stages, named": (STAGES, " ".join(STAGED), "crosses a boundary"),
    "stages by their directories, named": ("stage1/step10 stage2/step5", "stage1/step10 stage2/step5", "crosses a boundary"),
    "stages without steps": ("s/olmo-stage1 s/olmo-stage2", "s/olmo-stage1 s/olmo-stage2", "crosses a boundary"),
    "anneal": (ANNEAL, "s", "crosses a boundary"),
    "anneal, named": (ANNEAL, "s/step1000 s/step1500-anneal", "crosses a boundary"),
    "anneal of steps": ("s/step1000-anneal s/step500", "s --last 2", "crosses a boundary"),
    "seeds": ("s/seed1-step10 s/seed2-step20", "s", "crosses a boundary"),
    "learning rates": ("s/lr3e-4-step10 s/lr1e-4-step20", "s", "crosses a boundary"),
    "runs": ("a/step10 b/step20", "a b", "crosses a boundary"),
    "runs, named": ("a/step10 b/step20", "a/step10 b/step20", "crosses a boundary"),
    "parallel runs": ("s/run-1 s/run-2", "s/run-1 s/run-2", "crosses a boundary"),
    "tokens of several stages": (STAGES, "s --tokens 5B:90B", "crosses a boundary"),
    "tokens of no stage": (STAGES, "s --tokens 200B:", "no checkpoint is in"),
    "every, across stages": (STAGES, "s --every 40B --across-stages", "choose a range of one stage with --tokens"),
    "last of an unknown order": ("s/a s/b s/c", "s/b s/a s/c --last 2", "their order is not known"),
    "wma of an unknown order": ("s/a s/b s/c", "s/b s/a s/c --recipe wma", "--order given"),
    "ema of an unknown order": ("s/a s/b", "s/b s/a --recipe ema:alpha=0.2", "their order is not known"),
    "window of an unknown order": ("s/a s/b s/c", "s/b s/a s/c --recipe sma:2", "their order is not known"),
    "weights of an unknown order": ("s/a s/b", "s/b s/a --recipe weights:0.3,0.7", "their order is not known"),
    "one without a step": (SUITE + " s/final", "s/step1 s/step2 s/final --last 2", "the steps of"),
    "steps and epochs": ("s/step10 s/epoch_2", "s --last 1", "their order is not known"),
    "two numbers": ("s/checkpoint_1_1000 s/checkpoint_2_500", "s/checkpoint_1_1000 s/checkpoint_2_500 --last 1", "their order is not known"),
    "dates": ("s/2024-01-05 s/2024-01-06", "s/2024-01-05 s/2024-01-06 --last 1", "their order is not known"),
    "sizes": ("s/llama-3-8b s/llama-3-70b", "s/llama-3-8b s/llama-3-70b --last 1", "their order is not known"),
    "versions": ("s/v1 s/v2", "s/v1 s/v2 --recipe wma", "their order is not known"),
    "directory of models": ("s/llama-3-8b s/llama-3-70b", "s", "no step in the name"),
    "directory of final only": ("s/final", "s", "no step in the name"),
    "directory of merges": ("merge:s/sma-5 merge:s/wma", "s", "an earlier merge"),
    "directory of temporaries": ("s/tmp-checkpoint-5", "s", "temporary"),
    "directory of incomplete ones": ("empty:s/step5 shard:s/step6", "s", "incomplete"),
    "directory of directories": ("s/a/step5 s/b/step6", "s", "holds directories of checkpoints (a, b)"),
    "directory of pickles": ("bin:s/step5 bin:s/step6", "s", "AutoModelForCausalLM"),
    "directory of a run": ("run:s/demo", "s", "demo (a run)"),
    "tokens and steps contradict": ("s/step10-tokens9B s/step20-tokens8B", "s --last 1", "contradict"),
    "epochs and steps contradict": ("s/epoch=0-step=20 s/epoch=1-step=10", "s --recipe wma", "contradict"),
    "trainer_state and names contradict": ("state=20:s/checkpoint-5 state=10:s/checkpoint-6", "s --last 1", "contradict"),
    "same step twice": ("s/step10 s/checkpoint-10", "s", "two checkpoints of"),
    "same step twice, named": ("s/step10 s/step0010", "s/step10 s/step0010 --recipe wma", "have the same position"),
    "same step twice, last": ("s/step10 s/step0010", "s/step10 s/step0010 --last 1", "at 10 steps is not known"),
    "twins": ("a/step10 b/step10", "a/step10 b/step10", "crosses a boundary"),
    "twins, unequal": ("a/step10 b/step10", "a/step10 b/step10 --across-stages --recipe wma", "have the same position"),
    "twins, last": ("a/step10 b/step10", "a/step10 b/step10 --across-stages --last 1", "is not known"),
    "given twice": (SUITE, "s/step1 s/step1", "is given twice"),
    "given twice, written otherwise": (SUITE, "s/step1 ./s/../s/step1/", "is given twice, also as"),
    "given twice, by a link": (SUITE + " link:latest=s/step10", "s/step10 latest", "is given twice, also as latest"),
    "given twice, in a directory": (SUITE, "s s/step10", "is given twice"),
    "weights, not in order": (SUITE, "s/step10 s/step2 s/step1 --recipe weights:0.5,0.3,0.2", "in another order"),
    "order given of an unknown directory": ("s/step1 s/epoch_1", "s --order given", "whose order is not known"),
    "tokens of an order that is given": ("s/a s/b", "s/a s/b --order given --tokens 1:2", "cannot select by tokens"),
    "decay of an order that is given": ("s/a s/b s/c", "s/a s/b s/c --order given --recipe decay:shape=linear", "computes weights from tokens"),
    "lagfree of epochs": ("s/epoch_1 s/epoch_2 s/epoch_3", "s --recipe lagfree:lag=0.5", "computes weights from tokens"),
    "tokens of steps": (SUITE, "s --tokens 1:2", "--tokens-per-step"),
    "tolerance alone": (SUITE, "s/step1 s/step2 --tolerance 5", "requires every_tokens"),
    "too many tokens per step": ("s/step999999999 s/step5", "s --tokens-per-step 9e18", "are too many"),
}  # fmt: skip
# Of the command line alone: status 2.
MISUSED = {
    "--tokens-per-step 0": "not above 0 tokens",
    "--every 0": "not above 0 tokens",
    "--tokens :": "not a range",
    "--tokens 3B:2B": "is an empty range",
    "--tokens 1e999999999:": "not a whole number",
    "--every 1.5": "not a whole number",
    "--every 20G": "not a whole number",
    "--last 1 --last 2": "--last: is given twice",
    "--subtree a --subtree=a": "--subtree: is given twice",
    "--dtype keep --dtype float32": "--dtype: is given twice",
    "--memory-limit 1GiB --memory-limit 1GiB": "given twice",
    "--las 2": "unknown --las 2 (did you mean --last?)",
    "--order newest": "invalid choice",
}


@pytest.mark.parametrize("name", TAKEN)
def test_these_checkpoints_are_taken(merge, name):
    tree, command, expected, words = TAKEN[name]
    status, paths, notes = merge(tree, command)
    assert (status, paths) == (0, expected), notes
    assert words in notes


@pytest.mark.parametrize("name", REFUSED)
def test_these_are_refused(merge, name):
    tree, command, words = REFUSED[name]
    status, _, error = merge(tree, command)
    assert status == 1 and words in error, (status, error)


@pytest.mark.parametrize("options", MISUSED)
def test_misuse_is_one_line_with_status_2(merge, options):
    status, _, error = merge(SUITE, f"s {options}")
    assert status == 2 and MISUSED[options] in error and error.endswith("see `pma merge --help`\n"), error


def test_each_way_that_a_refusal_names_works(merge, tmp_path):
    assert merge(TRAINER, "s")[0] == 1
    assert merge("", "s/model.safetensors")[1] == ["s/model.safetensors"]
    assert merge("", "s/checkpoint-500 s/checkpoint-1000 --last 1")[1] == ["s/checkpoint-1000"]
    shutil.rmtree(tmp_path / "s")
    assert merge("s/step5 s/step6 s/step7", "s --last 2")[1] == ["s/step6", "s/step7"]


def test_coefficients_stay_with_their_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "s/a s/b s/c")
    recipe = ["--recipe", "weights:0.2,0.3,0.5", "--order", "given", "--out", "OUT", "--dry-run", "--json"]
    assert main(["merge", "s/c", "s/a", "s/b", *recipe]) == 0
    inputs = json.loads(capsys.readouterr().out)["inputs"]
    assert [(x["source"][-1], x["coefficients"]) for x in inputs] == [("c", [0.2]), ("a", [0.3]), ("b", [0.5])]
