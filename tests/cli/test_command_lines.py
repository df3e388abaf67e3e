"""A share of the command lines of experiments/faults/command_lines.py, which runs all of them."""

import command_lines
import pytest

from pma_jax.cli import main
from pma_jax.cli.arguments import parser


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory, finished):
    return command_lines.Workspace(tmp_path_factory.mktemp("command_lines") / "space", main, finished.path)


@pytest.mark.slow
def test_wrong_command_lines_are_one_line_and_write_nothing(mistakes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = [
        case
        for case in command_lines.make_cases(mistakes, command_lines.actions_of(parser()))
        if "config interrupt" not in case.kind  # pytest's own Ctrl-C could not be told from it
    ]
    assert len(cases) >= 350 and len({case.verb for case in cases}) == 14
    wrong = {(case.verb, case.kind): command_lines.check(main, mistakes, case, tmp_path) for case in cases[::23]}
    assert not {case: problem for case, problem in wrong.items() if problem}


def test_output_of_a_configuration_is_not_that_of_the_command(mistakes, capsys):
    file = mistakes.folder / "prints.py"
    file.write_text("print('one')\nfrom pma_jax import config\ndef get_config():\n    print('two')\n    return 3\n")
    assert main(["train", "--config", str(file), "--workdir", str(mistakes.folder / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines()[:2] == ["one", "two"]
