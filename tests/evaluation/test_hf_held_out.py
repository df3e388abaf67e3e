"""`pma evaluate` of Hugging Face models: the held-out loss of an exported snapshot is that of the snapshot."""

import json
import os
import shutil
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from pma_jax.cli import main
from pma_jax.config.errors import UserError
from pma_jax.data.tokenizer import byte_tokenizer
from pma_jax.evaluation import hf_held_out
from pma_jax.evaluation.targets import evaluate_targets
from pma_jax.evaluation.task_targets import score_targets
from pma_jax.interop import hf


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    """Return the directory of the tiny run's newest snapshot as transformers loads it."""
    out = tmp_path_factory.mktemp("exported") / "model"
    hf.export_snapshot(finished.snapshots[-1].path, out)
    return out


def overrides(run, **data) -> list[str]:
    """Return the overrides with which the default configuration has the run's text."""
    data = {"source": "files", "files": run.config.data.files[0], "cache_dir": run.config.data.cache_dir} | data
    keys = {f"data.{key}": value for key, value in data.items()}
    keys |= {"data.held_out_percent": 20, "evaluation.tokens": 500, "training.sequence_length_tokens": 32}
    return [f"{key}={value}" for key, value in keys.items()]


def test_the_loss_of_an_exported_snapshot_is_that_of_the_snapshot(finished, exported, tmp_path):
    pytest.importorskip("torch")
    functions = tiny.write_functions(tmp_path / "functions")  # only the targets of bodies are counted
    for data, part in ({}, "report"), ({}, "all"), ({"task": "functions", "files": functions}, "select"):
        keys = overrides(finished, **data)
        paths = [finished.snapshots[-1].path, exported]
        own, other = evaluate_targets(paths, keys, part)
        assert own.keys() == other.keys()
        assert (own["held_out"]["part"], other["held_out"]) == (part, own["held_out"])
        assert own["held_out"]["documents"] > 1
        for key in ("loss", "standard_error", "perplexity", "bits_per_byte"):
            assert other[key] == pytest.approx(own[key], rel=1e-5), key
        assert other["difference"] == pytest.approx(0, abs=1e-5)
        assert other["tokens"] is None
        assert any("may have been trained on this text" in note for note in other["notes"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_of_a_family_that_we_do_not_have_is_that_of_its_logits_in_float64(finished, tmp_path, dtype):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.GPTNeoXConfig(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes)
    model = transformers.GPTNeoXForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (row,) = evaluate_targets([tmp_path], overrides(finished))
    sample = hf_held_out.read_text(str(tmp_path), overrides(finished), "report")[1]
    with torch.no_grad():
        logits = model(torch.tensor(np.maximum(sample.windows[:, :-1], 0)).long()).logits.double().numpy()
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    nats = -np.take_along_axis(log_p, np.maximum(sample.windows[:, 1:], 0)[..., None], axis=-1)[..., 0]
    assert row["loss"] == pytest.approx(nats[sample.documents >= 0].mean(), rel=1e-6)


def test_the_table_and_the_numbers(finished, exported, capsys):
    pytest.importorskip("torch")
    words = ["evaluate", str(exported), *(f"--config.{key}" for key in overrides(finished))]
    (row,) = evaluate_targets([exported], overrides(finished))
    assert main(words) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split()[1] == "-" and f"{row['loss']:.4f}" in table[1]
    assert main([*words, "--numbers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    names = ("loss", "standard_error", "perplexity", "bits_per_byte")
    assert json.loads(lines[0]) == {name: row[name] for name in names} | {"held_out": row["held_out"]["digest"]}


def test_other_text_is_not_compared(finished, exported):
    pytest.importorskip("torch")
    with pytest.raises(UserError, match="cannot be compared: their held-out text differs"):
        evaluate_targets([finished.path, exported], ["evaluation.tokens=400"])


def test_models_that_cannot_read_the_text_are_refused(finished, exported, tmp_path):
    pytest.importorskip("torch")
    from pma_jax.data.tokenizer import train_bpe

    with pytest.raises(UserError, match=r"reads \d+ tokens at once.*lower --config.training.sequence_length_tokens"):
        long = [key for key in overrides(finished) if "sequence_length" not in key]
        evaluate_targets([exported], [*long, "training.sequence_length_tokens=400"])
    file = tmp_path / "tokenizer.json"
    train_bpe([path.read_text() for path in sorted((finished.path.parent / "text").glob("*.txt"))], 300).save(file)
    with pytest.raises(UserError, match=r"gives the id \d+, and the model has 256 tokens"):
        evaluate_targets([exported], overrides(finished, tokenizer=file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.self_attn.q_proj.weight"), r"lacks 1 weights of .*1.self_attn.q_proj.*random"),
        (lambda w: w.update({"model.norm.weight": w["model.norm.weight"][1:]}), r"another shape \(model.norm.weight\)"),
        (lambda w: w["model.norm.weight"].__setitem__(0, np.nan), r"are not finite, do not use it: model.norm.weight"),
        (None, "is no model that transformers loads: .*header"),
    ],
    ids=["missing", "shape", "nan", "cut"],
)
def test_a_model_with_wrong_weights_is_not_scored(finished, exported, tmp_path, change, message):
    pytest.importorskip("torch")
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    file = model / "model.safetensors"
    if change is None:
        file.write_bytes(file.read_bytes()[:5000])
    else:
        weights = {name: np.array(values) for name, values in load_file(file).items()}
        change(weights)
        save_file(weights, file, {"format": "pt"})
    for score in (
        lambda: evaluate_targets([model], overrides(finished)),
        lambda: score_targets([model], ["pma:brackets"], [], limit=1, shots=None, part="report"),
    ):
        with pytest.raises(UserError, match=message):
            score()


def test_a_model_without_a_tokenizer_is_not_scored(exported, tmp_path):
    pytest.importorskip("torch")
    model = tmp_path / "model"
    shutil.copytree(exported, model, ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(UserError, match=r"model has no tokenizer: copy tokenizer.json and"):
        score_targets([model], ["pma:brackets"], [], limit=1, shots=None, part="report")


@pytest.mark.parametrize("output_type", ["multiple_choice", "generate_until"])
def test_a_tokenizer_that_does_not_fit_is_refused(finished, exported, tmp_path, output_type):
    pytest.importorskip("torch")
    from tokenizers import Tokenizer, models

    model = tmp_path / "model"
    shutil.copytree(exported, model)
    Tokenizer(models.WordLevel({"?": 300, "<|endoftext|>": 0}, unk_token="?")).save(str(model / "tokenizer.json"))
    (tmp_path / "task.json").write_text('{"q": "a", "choices": ["b", "c"], "answer": 0}')
    task = {
        "task": "fits",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "task.json"}},
        "test_split": "test",
        "output_type": output_type,
        "doc_to_text": "{{q}}",
        "doc_to_target": "answer",
    }
    if output_type == "multiple_choice":
        task["doc_to_choice"] = "{{choices}}"
    else:
        task["generation_kwargs"] = {"until": ["."], "do_sample": False, "max_gen_toks": 4}
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    with pytest.raises(UserError, match="the tokenizer gives the id 300, and the model has 256 tokens"):
        score_targets([model], [str(tmp_path / "task.yaml")], [], limit=None, shots=None, part="report")


def test_a_model_without_a_tokenizer_is_refused(finished, exported, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_bytes((exported / "config.json").read_bytes())
    monkeypatch.setattr("pma_jax.evaluation.hf_directory.check_installed", lambda: None)
    with pytest.raises(UserError, match=r"has no tokenizer.json: name the model's with --config.data.tokenizer=FILE"):
        evaluate_targets([tmp_path], overrides(finished))


def test_packages_that_are_missing_are_named(exported, monkeypatch, capsys):
    names = ("lm_eval", "torch", "transformers", "accelerate")
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["evaluate", str(exported)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"{' and '.join(names)}: pip install 'pma-jax[eval,torch]'" in lines[0]
