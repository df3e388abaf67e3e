"""Tables, intervals and the part of a page that a script writes."""

import dataclasses
import json

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.studies import pages
from pma_jax.studies.pages import RESULTS_BEGIN, RESULTS_END, IndexRow
from pma_jax.studies.statistics import MeanEstimate, MeanInterval

PAGE = f"# Title\n\nwords\n\n{RESULTS_BEGIN}\n\nold\n\n{RESULTS_END}\n\nmore words\n"


def test_table_is_markdown_with_bars_escaped_in_cells():
    assert pages.format_table(["a", "b"], [[1, "x|y"]]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"


def test_interval_is_its_mean_and_signed_ends():
    assert pages.format_interval(MeanInterval(0.01234, -0.001, 0.0257, 3)) == "+0.0123 [-0.0010, +0.0257]"
    assert pages.format_interval(MeanInterval(85.0, 84.0, 86.0, 3), digits=0, unit="%") == "+85% [+84%, +86%]"
    # Student's t with 2 degrees of freedom: 4.303 times 0.1 over sqrt(3).
    assert pages.format_difference([1.1, 1.2, 1.3], [1.0, 1.0, 1.0], 3) == "+0.200 [-0.048, +0.448]"


def test_only_text_between_the_marks_is_replaced():
    new = pages.replace_results(PAGE, "new\n")
    assert new == PAGE.replace("old", "new") and pages.extract_results(new) == "new"
    for broken in ("no marks", PAGE + PAGE):
        with pytest.raises(ValueError, match="once each"):
            pages.replace_results(broken, "new")
        with pytest.raises(ValueError, match="once each"):
            pages.extract_results(broken)


MADE = {"text": {"corpus": "stdlib-without-tests", "corpus_digest": "0123456789abcdef"}, "part": "report"}


def write_results(folder, rows):
    for name, (row, made) in rows.items():
        (folder / name).mkdir()
        (folder / name / "results.json").write_text(json.dumps({"row": dataclasses.asdict(row), "made": made}))
    (folder / "README.md").write_text(PAGE)
    pages.update_index(folder)
    return pages.extract_results((folder / "README.md").read_text())


def test_index_lists_questions_with_results_by_number(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "results.json").write_text("{}")
    rows = {"b": IndexRow(1, "first?", "yes", "it does", "+1"), "a": IndexRow(2, "second?", "no", "it does not", "-1")}
    lines = write_results(tmp_path, {name: (row, MADE) for name, row in rows.items()}).splitlines()
    assert lines[-2:] == [
        "| [first?](b/README.md) | yes | it does | +1 |",
        "| [second?](a/README.md) | no | it does not | -1 |",
    ]


def test_results_of_another_text_stand_in_a_table_of_their_own(tmp_path):
    row, other = IndexRow(1, "first?", "yes", "it does", "+1"), IndexRow(0, "other?", "no", "it did", "-1")
    text = {"corpus": "tales", "corpus_digest": "fedcba9876543210"}
    written = write_results(tmp_path, {"a": (row, MADE), "b": (other, {"text": text, "part": "report"})})
    first, _, second = written.partition("tales (fedcba987654)")
    assert "stdlib-without-tests (0123456789ab)" in first and "first?" in first and "other?" not in first
    assert "other?" in second and "first?" not in second


@pytest.mark.parametrize(
    ("mean", "error", "said"),
    [
        (0.0001, 0.0002, "equal within 0.003 nats: +0.0001 [-0.0003, +0.0005] (90%)"),
        (0.001, 0.002, "no difference shown: +0.0010 ± 0.0047 nats"),
        (0.02, 0.002, "higher by 0.0200 [0.0153, 0.0247] nats"),
        (-0.02, 0.002, "lower by 0.0200 [0.0153, 0.0247] nats"),
    ],
)
def test_words_of_a_difference_claim_no_more_than_its_tests(mean, error, said):
    # Student's t with 7 degrees of freedom: 2.365 at 95%, 1.895 at 90%.
    assert pages.describe_difference(MeanEstimate(mean, error, 7, 8), margin=0.003) == said
    assert pages.find_bare_figures(said) == []


@given(st.floats(-0.05, 0.05), st.floats(1e-5, 0.05), st.floats(1e-4, 0.05))
def test_equal_is_said_only_after_the_test_of_equivalence(mean, error, margin):
    estimate = MeanEstimate(mean, error, 7, 8)
    said, interval = pages.describe_difference(estimate, margin), estimate.interval()
    assert ("equal" in said) == (estimate.equivalence_p_value(margin) < 0.05)
    assert ("er by" in said) <= (interval.low > 0 or interval.high < 0)


def test_figures_without_an_interval_are_found():
    assert pages.find_bare_figures("loss 1.4321, gain +0.0123 [+0.0101, +0.0145], 1.4321 ± 0.0020") == ["1.4321"]
    assert pages.find_bare_figures("| 1.430 ± 0.002 | -0.0123 [-0.0200, 0.0101] | 0.0041 |") == ["0.0041"]
    assert (
        pages.find_bare_figures("`0.0028` within 0.003 nats (±0.0041 nats), 3.15M tokens, 95%, arXiv 2505.12082") == []
    )


def test_figures_of_hand_written_text_must_be_in_the_results():
    page = PAGE.replace("old", "gain +0.0123 [+0.0101, +0.0145], 12%, 5 of 10 [2%, 9%], 0.5 ± 0.2").replace(
        "words", "gains 0.0123, or -0.0123 [-0.0145, -0.0101], 5 of the 10 [2%,\n9%], 0.5 ± 0.2, arXiv 2505.12082"
    )
    assert pages.find_unknown_figures(page) == []
    unknown = page.replace("gains 0.0123", "gains 0.0124, 13%, 2.5% or 0.01\nnats")
    assert set(pages.find_unknown_figures(unknown)) == {"0.0124", "13%", "2.5%", "0.01"}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("-0.0123 [-0.0145", "-0.0101 [-0.0145", "0.0101 [0.0101, 0.0145]"),
        ("[-0.0145, -0.0101]", "[-0.0145, +0.0101]", "0.0123 [-0.0101, 0.0145]"),
        ("5 of the 10", "2 of\nthe 10", "2 of 10"),
        ("0.5 ± 0.2,", "0.2 ± 0.5,", "0.2 ± 0.5"),
    ],
)
def test_figures_must_stand_together_in_the_results(old, new, found):
    page = PAGE.replace("old", "+0.0123 [+0.0101, +0.0145], 5 of 10, 0.5 ± 0.2").replace(
        "words", "-0.0123 [-0.0145, -0.0101], 5 of the 10, 0.5 ± 0.2,"
    )
    assert pages.find_unknown_figures(page) == []
    assert pages.find_unknown_figures(page.replace(old, new)) == [found]


def test_deviation_has_an_interval():
    values = np.random.default_rng(0).normal(size=8)
    low, high = (np.sqrt(7 * values.var(ddof=1) / scipy.stats.chi2.ppf(q, 7)) for q in (0.975, 0.025))
    assert pages.format_deviation(values) == f"{values.std(ddof=1):.4f} [{low:.4f}, {high:.4f}]"
    assert pages.format_mean([1.0, 2.0, 3.0], 2) == "2.00 ± 2.48"
