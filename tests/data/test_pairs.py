"""Pairs of signature and docstring to body: what is extracted, how it is stored, and what the loss counts."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.data import corpus, documents, shards
from pma_jax.data.pairs import extract_function_pairs
from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.model.decoder import apply, graph_definition
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.loop import train

SOURCE = '''
import os


@decorated
def one(a,
        b=1):
    """Adds."""
    # why
    return a + b


class C:
    async def two(self):
        r"""Two lines,
        and a \\d.
        """

        x = """kept
as it is"""
        return x

    def no_docstring(self):
        return 1

    def only_a_docstring(self):
        """Nothing follows."""

    def beside(self):
        """On one line."""; return 1

def outer():
    """Outer."""
    def inner():
        """Inner."""
        return 2
    return inner
'''


def test_functions_with_docstrings_are_extracted():
    actual = list(extract_function_pairs(SOURCE, 1000))
    assert actual[0] == ('def one(a,\n        b=1):\n    """Adds."""\n', "    # why\n    return a + b\n")
    assert actual[2:] == [
        (
            'def outer():\n    """Outer."""\n',
            '    def inner():\n        """Inner."""\n        return 2\n    return inner\n',
        ),
        ('def inner():\n    """Inner."""\n', "    return 2\n"),
    ]
    prompt, body = actual[1]
    assert prompt.startswith("    async def two(self):\n") and prompt.endswith('        """\n'), (
        "text at the margin keeps the function's indentation"
    )
    assert body == '\n        x = """kept\nas it is"""\n        return x\n'


def test_pairs_longer_than_the_limit_are_skipped():
    actual = list(extract_function_pairs(SOURCE, 1000))
    longest = max(len((prompt + body).encode()) for prompt, body in actual)
    assert len(list(extract_function_pairs(SOURCE, longest))) == len(actual)
    assert len(list(extract_function_pairs(SOURCE, longest - 1))) == len(actual) - 1


@pytest.mark.parametrize("source", ["def f(:\n", "print 1\n", "x = 1\n", "", "a\0b", "(" * 5000])
def test_source_without_functions_gives_no_pairs(source):
    assert list(extract_function_pairs(source, 1000)) == []


def test_other_newlines_and_form_feeds():
    source = 'def f():\r\n    """D."""\r\n    return "a\x0cb"\r\n'
    assert list(extract_function_pairs(source, 1000)) == [('def f():\n    """D."""\n', '    return "a\x0cb"\n')]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    glob, cache = tiny.write_functions(folder / "text", 60), str(folder / "cache")
    keys = {"source": "files", "files": (glob,), "held_out_percent": 20.0, "cache_dir": cache, "task": "functions"}
    return configuration.DataConfig(**keys)


def test_prompts_are_stored_separately_from_targets(data):
    tokens = shards.prepare_tokens(data, progress=False)
    assert tokens.train.ids.dtype == np.int16
    pairs = [
        (document.name, document.prompt, document.text)
        for document in corpus.open_corpus(data).read()
        if not documents.is_held_out(document.name, 20)
    ]
    stored = tokens.train.ids
    assert tokens.train.documents == len(pairs) == list(stored).count(0)
    ends = np.flatnonzero(stored == 0)
    for begin, end, (_, prompt, body) in zip([0, *(ends + 1)], ends, pairs, strict=False):
        ids = stored[begin:end]
        assert bytes((~ids[ids < 0]).tolist()).decode() == prompt
        assert bytes(ids[ids >= 0].tolist()).decode() == body
    assert tokens.train.utf8_bytes == tokens.train.tokens


def test_same_sources_as_text_are_other_tokens(data):
    text = shards.prepare_tokens(dataclasses.replace(data, task="text"), progress=False)
    pairs = shards.prepare_tokens(data, progress=False)
    longest = max(len(document.full_text) for document in corpus.open_corpus(data).read())
    shorter = shards.prepare_tokens(dataclasses.replace(data, pair_bytes=longest - 1), progress=False)
    assert len({text.digest, pairs.digest, shorter.digest}) == 3
    assert text.corpus_digest == pairs.corpus_digest and shorter.train.tokens < pairs.train.tokens
    assert {d.name for d in corpus.open_corpus(data).read()} == {f"{i:04d}.txt" for i in range(60)}


@pytest.mark.slow
def test_training_learns_only_the_bodies(data, workspace, tmp_path):
    keys = {f"data__{key}": getattr(data, key) for key in ("source", "files", "cache_dir", "task")}
    config = tiny.config(
        workspace, **keys, training__sequence_length_tokens=64, evaluation__tokens=300, preview__windows=()
    )
    run = train(config, tmp_path / "run")
    mesh = make_mesh(config.mesh)
    params = tiny.read(run.snapshots[-1])
    evaluator = make_evaluator(config, mesh, SELECT)
    with jax.set_mesh(mesh):
        graph, nats, count = graph_definition(config.model), 0.0, 0
        for batch in evaluator.batches:
            shown = np.asarray(batch)
            assert (shown < 0).any() and (shown > 0).any()
            logits = np.asarray(apply(graph, jax.device_put(params), np.where(shown < 0, ~shown, shown)[:, :-1]))
            log_p = np.float64(logits) - np.log(np.exp(np.float64(logits)).sum(axis=-1, keepdims=True))
            for row, position in np.argwhere(shown[:, 1:] >= 0):
                nats -= log_p[row, position, shown[row, position + 1]]
                count += 1
    assert run.snapshots[-1].loss == pytest.approx(nats / count, rel=1e-5)
    assert evaluator(params).loss == pytest.approx(nats / count, rel=1e-5)
    assert run.snapshots[-1].loss < run.snapshots[0].loss - 0.1, "bodies are similar"


def test_sources_of_an_installed_package_are_read():
    names = [document.name for document in corpus.open_corpus(configuration.DataConfig(package="optax")).read()]
    assert "__init__.py" in names and "contrib/__init__.py" in names
    for package in ("no_such_package", "os", "optax.contrib"):
        with pytest.raises(ValueError, match=f"no package '{package}' is installed"):
            corpus.open_corpus(configuration.DataConfig(package=package))
