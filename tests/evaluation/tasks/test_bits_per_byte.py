"""Bits per byte of gold answers, against their definition in float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from pma_jax.evaluation.tasks.bits_per_byte import DocumentBits, GoldBits, measure_document_bits, measure_gold_bits


def _task(output_type="multiple_choice", choices=("a", "b"), **keys):
    defaults = {"doc_to_choice": lambda document: list(choices), "multiple_input": 0}
    return SimpleNamespace(OUTPUT_TYPE=output_type, **defaults | keys)


def _sample(arguments, nats, target, filter_name="none", document=None):
    responses = [(-value, False) for value in nats]
    return {
        "arguments": arguments,
        "filtered_resps": responses,
        "target": target,
        "doc": document,
        "filter": filter_name,
    }


def _measure(samples, task):
    return measure_gold_bits({"task": samples}, {"task": task})["task"]


def test_mean_and_standard_error_over_documents():
    nats = np.array([[3.0, 1.0], [2.5, 4.0], [0.5, 9.0]])
    golds = [1, 0, 1]
    pairs = [("Q", " yes"), ("Q", " nø")]
    sizes = [4, 4]  # UTF-8 bytes
    samples = [_sample(pairs, row, gold) for row, gold in zip(nats, golds, strict=True)]
    bits = [row[gold] / math.log(2) / sizes[gold] for row, gold in zip(nats, golds, strict=True)]
    measured = _measure(samples, _task())
    np.testing.assert_allclose(measured.bits_per_byte, math.fsum(bits) / 3, rtol=1e-15)
    np.testing.assert_allclose(measured.standard_error, np.std(bits, ddof=1) / math.sqrt(3), rtol=1e-14)
    assert (measured.documents, measured.left_out) == (3, 0)


def test_a_group_is_averaged_over_the_documents_of_all_its_tasks():
    nats = {"few": [1.0], "many": [2.0, 4.0, 6.0], "text": [1.0]}
    samples = {name: [_sample([("Q", "ab")], [value], "ab") for value in values] for name, values in nats.items()}
    tasks = {name: _task("generate_until" if name == "text" else "loglikelihood") for name in nats}
    groups = {"both": ["few", "many"], "mixed": ["few", "text"], "empty": []}
    measured = measure_gold_bits(samples, tasks, groups)
    assert measured.keys() == {"few", "many", "both"}
    bits = np.array([1.0, 2.0, 4.0, 6.0]) / math.log(2) / 2
    assert measured["both"].bits_per_byte == pytest.approx(bits.mean(), rel=1e-14)
    assert measured["both"].standard_error == pytest.approx(bits.std(ddof=1) / 2, rel=1e-14)
    assert measured["both"].documents == 4


def test_a_fair_coin_for_each_byte_is_one_bit_per_byte_in_any_script():
    for text in (" word", "été", "漢字", "\n"):
        nats = len(text.encode()) * math.log(2)
        measured = _measure([_sample([("context", text)], [nats], text)], _task("loglikelihood"))
        assert measured == GoldBits(1.0, None, 1, 0)


def test_white_space_at_the_end_of_a_context_is_scored_with_the_continuation():
    nats = 7 * math.log(2)
    measured = _measure([_sample([("def f():\n    ", "xy")], [nats], "xy")], _task("loglikelihood"))
    assert measured.bits_per_byte == pytest.approx(1.0, rel=1e-15)  # "\n    xy" has 7 bytes


@pytest.mark.parametrize("target", ["b", 1, [1], ["b"], np.int64(1)])
def test_the_gold_answer_is_an_index_a_choice_or_a_list(target):
    samples = [_sample([("Q", " a"), ("Q", " b")], [8.0, 2 * math.log(2)], target)]
    assert _measure(samples, _task()).bits_per_byte == pytest.approx(1.0)


def test_of_several_gold_answers_the_most_likely_per_byte_counts():
    samples = [_sample([("Q", " a"), ("Q", " bbb"), ("Q", " c")], [2.0, 3.0, 0.1], [0, 1])]
    assert _measure(samples, _task(choices="abc")).bits_per_byte == pytest.approx(3 / math.log(2) / 4)


def test_contexts_differ_and_the_text_says_which_is_right():
    task = _task(multiple_input=2, doc_to_text=lambda document: document["right"])
    pairs = [("Ann met Bob and Ann", " left."), ("Ann met Bob and Bob", " left.")]
    samples = [_sample(pairs, [5.0, 6.0], " left.", document={"right": 1})]
    assert _measure(samples, task).bits_per_byte == pytest.approx(6 / math.log(2) / 6)


def test_unconditional_requests_after_the_choices_are_not_gold():
    pairs = [("Q", " a"), ("Q", " b"), ("", " a"), ("", " b")]
    assert _measure([_sample(pairs, [1.0, 2.0, 9.0, 9.0], 1)], _task()).bits_per_byte == pytest.approx(1 / math.log(2))


@pytest.mark.parametrize("target", [2, -100, "z", [], None])
def test_documents_without_a_gold_answer_are_left_out_and_counted(target):
    good = _sample([("Q", " a"), ("Q", " b")], [1.0, 2.0], 0)
    measured = _measure([good, {**good, "target": target}, good], _task())
    assert (measured.documents, measured.left_out) == (2, 1)
    assert measured.bits_per_byte == pytest.approx(0.5 / math.log(2))


@pytest.mark.parametrize("context", ["Q", "Q: "])
def test_no_document_with_a_gold_answer_has_no_mean(context):
    assert _measure([_sample([(context, "")], [0.0], "")], _task("loglikelihood")) == GoldBits(None, None, 0, 1)


def test_a_document_counts_once_where_a_task_has_several_filters():
    samples = [_sample([("Q", "ab")], [nats], "ab", name) for name in ("one", "two") for nats in (1.0, 2.0)]
    measured = _measure(samples, _task("loglikelihood"))
    assert measured.documents == 2
    assert measured.bits_per_byte == pytest.approx(1.5 / math.log(2) / 2)


def test_tasks_without_gold_continuations_are_absent():
    tasks = {name: _task(name) for name in ("generate_until", "loglikelihood_rolling", "loglikelihood")}
    samples = {name: [_sample([("Q", "ab")], [1.0], "ab")] for name in tasks}
    assert list(measure_gold_bits(samples, tasks)) == ["loglikelihood"]


def test_the_class_of_lm_eval_with_choices_in_its_documents():
    samples = [_sample([("Q", " a"), ("Q", " b")], [8.0, 2 * math.log(2)], " b", document={"gold": 1})]
    assert _measure(samples, _task("loglikelihood")).bits_per_byte == pytest.approx(1.0)


def test_wrong_answers_of_a_document_are_averaged():
    pairs = [("Q", " a"), ("Q", " bbb"), ("Q", " c"), ("", " a")]
    nats = np.array([2.0, 3.0, 5.0, 9.0])
    measured = measure_document_bits([_sample(pairs, nats, 1)], _task(choices="abc"))
    assert measured == [
        DocumentBits(pytest.approx(3 / math.log(2) / 4), pytest.approx((2 / 2 + 5 / 2) / 2 / math.log(2)))
    ]


@pytest.mark.parametrize(("target", "pairs"), [(-100, [("Q", " a"), ("Q", " b")]), (0, [("Q", " a"), ("Q", "")])])
def test_wrong_answers_are_left_out_without_a_gold_answer_or_text(target, pairs):
    (measured,) = measure_document_bits([_sample(pairs, [1.0, 0.0], target)], _task())
    assert measured.wrong is None and (measured.gold is None) == (target < 0)
