"""Tables, intervals and the part of a page that a script writes."""

import dataclasses
import json

import pytest

from pma_jax.studies import pages
from pma_jax.studies.pages import RESULTS_BEGIN, RESULTS_END, IndexRow
from pma_jax.studies.statistics import MeanInterval

PAGE = f"# Title\n\nwords\n\n{RESULTS_BEGIN}\n\nold\n\n{RESULTS_END}\n\nmore words\n"


def test_table_is_markdown_with_bars_escaped_in_cells():
    assert pages.format_table(["a", "b"], [[1, "x|y"]]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"


def test_interval_is_its_mean_and_signed_ends():
    assert pages.format_interval(MeanInterval(0.01234, -0.001, 0.0257, 3)) == "+0.0123 [-0.0010, +0.0257]"
    assert pages.format_interval(MeanInterval(85.0, 84.0, 86.0, 3), digits=0, unit="%") == "+85% [+84%, +86%]"
    # Student's t with 2 degrees of freedom: 4.303 times 0.1 over sqrt(3).
    assert pages.format_difference([1.1, 1.2, 1.3], [1.0, 1.0, 1.0], 3) == "+0.200 [-0.048, +0.448]"
    assert pages.format_mean_percent([0.8, 0.85, 0.9]) == "85% [73%, 97%]"


def test_only_text_between_the_marks_is_replaced():
    new = pages.replace_results(PAGE, "new\n")
    assert new == PAGE.replace("old", "new") and pages.extract_results(new) == "new"
    for broken in ("no marks", PAGE + PAGE):
        with pytest.raises(ValueError, match="once each"):
            pages.replace_results(broken, "new")
        with pytest.raises(ValueError, match="once each"):
            pages.extract_results(broken)


def test_index_lists_questions_with_results_by_number(tmp_path):
    rows = {"b": IndexRow(1, "first?", "yes", "it does", "+1"), "a": IndexRow(2, "second?", "no", "it does not", "-1")}
    for name, row in rows.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({"row": dataclasses.asdict(row)}))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "results.json").write_text("{}")
    (tmp_path / "README.md").write_text(PAGE)
    pages.update_index(tmp_path)
    lines = pages.extract_results((tmp_path / "README.md").read_text()).splitlines()
    assert lines[2:] == [
        "| [first?](b/README.md) | yes | it does | +1 |",
        "| [second?](a/README.md) | no | it does not | -1 |",
    ]
