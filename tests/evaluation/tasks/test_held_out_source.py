"""The text of which questions are made: held out, of one part, and decoded as it was."""

import json

import pytest

from pma_jax.config import Config, DataConfig
from pma_jax.config.errors import UserError
from pma_jax.data.corpus import open_corpus
from pma_jax.data.documents import is_held_out
from pma_jax.data.sampling import ALL, PARTS
from pma_jax.evaluation.tasks.held_out_source import open_held_out_text
from pma_jax.evaluation.tasks.own import OWN_TASKS, make_questions


def _source(number):
    return "\n".join(
        f'def function_{number}_{i}(value, é="ü"):\n    """Return the value {number} and {i}, of é."""\n'
        f"    first = value[{i}]\n    return g(first[{number}]), {number}{i}\n"
        for i in range(4)
    )


def _config(folder, **keys):
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": _source(number)}) + "\n" for number in range(120)))
    data = DataConfig(
        source="files", files=(str(rows),), cache_dir=str(folder / "cache"), held_out_percent=30.0, **keys
    )
    return Config(data=data)


def _held_out(config):
    percent = config.data.held_out_percent
    return [d.full_text for d in open_corpus(config.data).read() if is_held_out(d.name, percent)]


@pytest.mark.parametrize("keys", [{}, {"tokenizer": "bpe"}, {"task": "functions"}], ids=str)
def test_the_parts_are_the_held_out_documents_and_share_none(tmp_path, keys):
    config = _config(tmp_path, **keys)
    texts = {part: list(open_held_out_text(config, part).read(1000)) for part in (*PARTS, ALL)}
    assert sorted(texts[ALL]) == sorted(_held_out(config))
    assert sorted(text for part in PARTS for text in texts[part]) == sorted(texts[ALL])
    assert list(open_held_out_text(config, ALL).read(3)) == texts[ALL][:3]


@pytest.mark.parametrize("name", sorted(OWN_TASKS))
def test_questions_are_about_held_out_documents_only(tmp_path, name):
    config = _config(tmp_path)
    requests = make_questions(name, open_held_out_text(config, "report"))
    held_out = "\n".join(_held_out(config))
    trained_on = "\n".join(d.text for d in open_corpus(config.data).read() if d.text not in held_out)
    assert len(requests) > 10
    for request in requests:
        gold = request.contexts[0] + request.continuations[request.answer]
        assert gold in held_out
        assert gold not in trained_on


def test_text_without_functions_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "plain text {i}"}}\n' for i in range(99)))
    data = DataConfig(
        source="files", files=(str(tmp_path / "rows.jsonl"),), cache_dir=str(tmp_path), held_out_percent=30.0
    )
    with pytest.raises(UserError, match=r"pma:last_line: the part 'report' .* has no Python functions"):
        make_questions("last_line", open_held_out_text(Config(data=data), "report"))
