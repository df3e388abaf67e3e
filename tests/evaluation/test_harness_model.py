"""lm-eval scores a model on the mesh as its own `hf` backend scores the exported model."""

import dataclasses
import json
import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import pytest

pytest.importorskip("lm_eval")

import harness_tasks
import hf_models
import tiny
import tokenizers
from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from pma_jax import config as configuration
from pma_jax.config.errors import UserError
from pma_jax.evaluation.harness_model import HarnessModel
from pma_jax.evaluation.snapshot_tokenizer import tokenizer_of_snapshot
from pma_jax.evaluation.task_scores import quiet
from pma_jax.evaluation.token_scores import make_model
from pma_jax.interop import hf
from pma_jax.model.decoder import abstract_params, init_params
from pma_jax.runs import snapshots
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime.mesh import make_mesh

LENGTH = 64
FAMILIES = {
    "llama": {},
    "qwen3": {"qk_norm": True, "tie_embeddings": True},
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, monkeypatch_module):
    folder = tmp_path_factory.mktemp("tasks")
    monkeypatch_module.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    names = harness_tasks.write_tasks(folder / "tasks")
    with quiet():
        return TaskManager(include_path=str(folder / "tasks"), include_defaults=False).load(names)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def make_snapshot(folder, **model) -> Snapshot:
    """Write a snapshot of random parameters that are large enough for sharp distributions."""
    tiny_keys = tiny.keys(folder)
    fields = {**tiny_keys["model"], "compute_dtype": "float32", "vocabulary_size": 256, **model}
    training = tiny_keys["training"] | {"sequence_length_tokens": LENGTH, "batch_size_sequences": 4}
    config = configuration.resolve(tiny_keys | {"model": fields, "training": training})
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda x: np.asarray(3 * x), init_params(config.model, jax.random.key(1)))
    snapshot = Snapshot(folder / "snapshot", 1, 4 * LENGTH, None, config)
    tiny.write_snapshot(params, snapshot)
    return snapshots.read_snapshot(snapshot.path)


def make_harness(snapshot: Snapshot) -> HarnessModel:
    mesh = make_mesh(snapshot.config.mesh)
    params = snapshots.restore_params(snapshot, abstract_params(snapshot.config.model, mesh))
    model = make_model(snapshot.config, params, mesh)
    return HarnessModel(model, tokenizer_of_snapshot(snapshot, snapshot.config))


def evaluate(harness, tasks):
    with quiet():
        return evaluator.evaluate(harness, tasks, bootstrap_iters=0)


def responses(results, name):
    return [response[0] for sample in results["samples"][name] for response in sample["resps"]]


def check_equal(ours, theirs, tasks):
    for name in tasks["tasks"]:
        pairs = list(zip(responses(ours, name), responses(theirs, name), strict=True))
        assert pairs
        for our, their in pairs:
            if isinstance(our, str):
                assert our == their
            else:
                (value, *picks), (other, *other_picks) = np.atleast_1d(our), np.atleast_1d(their)
                assert value == pytest.approx(other, rel=1e-5, abs=1e-4), name
                assert picks == other_picks, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_agrees_with_the_hf_backend(tasks, family, tmp_path):
    pytest.importorskip("torch")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    snapshot = make_snapshot(tmp_path, **FAMILIES[family])
    harness = make_harness(snapshot)
    ours = evaluate(harness, tasks)
    hf.export_snapshot(snapshot.path, tmp_path / "exported")
    with quiet():
        peer = huggingface.HFLM(pretrained=str(tmp_path / "exported"), device="cpu", dtype="float32", batch_size=8)
    theirs = evaluate(peer, tasks)
    assert {task.OUTPUT_TYPE for task in tasks["tasks"].values()} == {
        *("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")
    }
    check_equal(ours, theirs, tasks)
    assert harness.truncated > 0  # some questions are longer than the model reads, and both cut them alike


def write_tokenizer(folder, corpus):
    """Write a BPE that adds `<s>` before each text, as Llama's does, and its tokenizer_config.json."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    fields = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("kind", ["llama", "smollm3", "olmo2", "qwen3"])
def test_an_imported_model_reads_text_as_transformers_does(tasks, kind, tmp_path):
    pytest.importorskip("torch")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    made = dataclasses.replace(hf_models.model(kind), vocabulary_size=300)
    hf_models.write_random_hf_model(
        tmp_path / "hf", made, bos_token_id=0, eos_token_id=1, pad_token_id=1, max_position_embeddings=LENGTH
    )
    write_tokenizer(tmp_path / "hf", [harness_tasks.words(random.Random(i), 20) for i in range(50)])
    hf.import_model(str(tmp_path / "hf"), str(tmp_path / "imported"))
    snapshot = snapshots.read_snapshot(tmp_path / "imported")
    config = configuration.resolve(snapshot.config, ["model.compute_dtype=float32"])
    harness = make_harness(dataclasses.replace(snapshot, config=config))
    with quiet():
        peer = huggingface.HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=8)
    assert harness.max_length == peer.max_length
    for text in ("ara bena", "<s>ara</s> bena", "é\n", ""):
        assert harness.tok_encode(text) == peer.tok_encode(text), text
    check_equal(evaluate(harness, tasks), evaluate(peer, tasks), tasks)


class Request:
    def __init__(self, *args):
        self.args = args


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return make_harness(make_snapshot(tmp_path_factory.mktemp("model")))


def test_probabilities_of_all_next_bytes_sum_to_one(harness):
    texts = [bytes([value]).decode() for value in range(1, 128)]
    scores = harness.loglikelihood([Request("ara", text) for text in texts])
    # The rest of the vocabulary: bytes of other characters and the end of a document.
    rest = harness._mesh_model.score([([97, 114, 97, value], 1) for value in (0, *range(128, 256))])
    assert np.exp([value for value, _ in [*scores, *rest]]).sum() == pytest.approx(1, abs=1e-5)
    assert sum(is_greedy for _, is_greedy in [*scores, *rest]) == 1


def test_a_text_is_the_product_of_its_parts(harness):
    whole, first, rest = harness.loglikelihood(
        [Request("ara", " bena coro"), Request("ara", " bena"), Request("ara bena", " coro")]
    )
    assert first[0] + rest[0] == pytest.approx(whole[0], rel=1e-5)
    alone = harness.loglikelihood([Request("", "bena coro")])[0][0]
    assert harness.loglikelihood_rolling([Request("bena coro"), Request("")]) == [pytest.approx(alone, rel=1e-5), 0]


def test_an_empty_answer_is_certain(harness):
    answers = harness.loglikelihood([Request("ara", ""), Request("", ""), Request("ara", "b")])
    assert answers[:2] == [(0.0, True), (0.0, True)]
    assert answers[2][0] < 0


def test_sampling_and_long_generations_are_refused(harness):
    with pytest.raises(UserError, match="only greedy text is generated"):
        harness.generate_until([Request("ara", {"do_sample": True, "temperature": 0.8})])
    with pytest.raises(UserError, match="generates 256 tokens, and the model reads 64"):
        harness.generate_until([Request("ara", {"until": ["."]})])


def test_generated_text_ends_before_its_stop_text(harness):
    options = {"until": [], "max_gen_toks": 30}
    free = harness.generate_until([Request("ara", options)])[0]
    stop = free[4:6]
    ended = harness.generate_until([Request("ara", options | {"until": [stop]}), Request("ara", options)])
    assert ended == [free.split(stop)[0], free]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    snapshot = make_snapshot(tmp_path, vocabulary_size=128)
    with pytest.raises(UserError, match=r"has ids up to 255, but the model of .* has 128"):
        tokenizer_of_snapshot(snapshot, snapshot.config)
