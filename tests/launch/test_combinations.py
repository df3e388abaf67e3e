import re

import pytest
import tiny

from pma_jax.config.errors import UserError
from pma_jax.launch.combinations import (
    combine,
    make_runs,
    read_overrides_file,
    run_name,
)
from pma_jax.runs.directory import create_run


def names(combinations):
    return [run_name(varied) for varied in combinations]


def test_vary_is_a_product_and_zip_goes_side_by_side():
    combined = combine(
        ["schedule.peak_rate=1e-3,2e-3"], ["training.seed=0,1", "training.total_tokens=4e6,8e6"], [{"mesh.fsdp": "2"}]
    )
    assert combined == [
        {
            "mesh.fsdp": "2",
            "schedule.peak_rate": rate,
            "training.seed": seed,
            "training.total_tokens": tokens,
        }
        for rate in ("0.001", "0.002")
        for seed, tokens in (("0", "4000000"), ("1", "8000000"))
    ]


def test_names_do_not_depend_on_the_order_of_options_or_the_way_a_number_is_written():
    first = names(combine(["training.seed=0,1", "schedule.peak_rate=1e-3"], []))
    second = names(combine(["schedule.peak_rate=0.001", "training.seed=0,1"], []))
    assert first == second == [f"schedule.peak_rate=0.001,training.seed={seed}" for seed in (0, 1)]


def test_names_are_safe_and_different():
    combined = combine(["preview.windows=(3,6),[10],()"], ["data.files=a b/*.txt,a_b/?.txt"])
    assert names(combined)[4:] == names(combine(["preview.windows=()"], ["data.files=a b/*.txt,a_b/?.txt"]))
    found = names(combined)
    assert len(set(found)) == 6
    assert all(re.fullmatch(r"[A-Za-z0-9._=,+-]{1,120}", name) for name in found)
    assert names(combine(["preview.windows=(3,6)"], [])) == ["preview.windows=3-6"]
    long = names(combine([f"data.text_field={'x' * 300}1,{'x' * 300}2"], []))
    assert len(set(long)) == 2 and max(map(len, long)) <= 120


def test_job_names_are_dns_labels_and_differ_between_roots(tmp_path):
    combined = combine(["schedule.peak_rate=1e-3", "training.seed=0,1", "data.text_field=Ä__,b"], [])
    runs = [run for root in ("a", "b") for run in make_runs("demo", tmp_path / root, combined)]
    assert len({run.job_name for run in runs}) == len(runs) == 8
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])", run.job_name) for run in runs)
    assert runs[0].job_name == make_runs("demo", tmp_path / "a", combined)[0].job_name


def test_runs_have_the_common_overrides_and_their_own(tmp_path):
    (run,) = make_runs("demo", tmp_path, [{"training.seed": "3"}], ["schedule.peak_rate=5e-4"])
    assert (run.config.training.seed, run.config.schedule.peak_rate) == (3, 5e-4)
    assert run.overrides == ("schedule.peak_rate=5e-4", "training.seed=3") and run.path.name == "training.seed=3"


@pytest.mark.parametrize(
    ("vary", "zipped", "message"),
    [
        ([], [], "nothing varies"),
        (["training.sed=0,1"], [], r"unknown config key 'training.sed': did you mean 'training.seed'\?"),
        (["seed=0,1"], [], "unknown config key 'seed'"),
        (["training.seed=0,one"], [], "'training.seed' takes a whole number, not 'one'"),
        (["training.seed="], [], "training.seed has no value, or an empty one"),
        (["training.seed=0,,1"], [], "has no value, or an empty one"),
        (["training.seed"], [], "'training.seed' is not KEY=A,B"),
        (["training.seed=0", "training.seed=1"], [], "training.seed varies twice"),
        (["training.seed=0"], ["training.seed=1"], "training.seed varies twice"),
        ([], ["training.seed=0,1", "schedule.peak_rate=1e-3"], "as many values of each key: training.seed has 2, sch"),
        ([], ["training.seed=0", "training.seed=1"], "training.seed varies twice"),
        (["training.seed=" + ",".join(map(str, range(10_001)))], [], "10,001 runs"),
    ],
)
def test_wrong_lists_are_one_line(vary, zipped, message):
    with pytest.raises(UserError, match=message) as caught:
        combine(vary, zipped)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("vary", "common", "message"),
    [
        ("training.seed=0,1,0", [], "two runs would be named training.seed=0: give each combination once"),
        ("schedule.peak_rate=1e-3,0.001", [], "two runs would be named schedule.peak_rate=0.001"),
        ("training.seed=0,1", ["training.seed=2"], "training.seed is given twice"),
        ("training.accumulation_steps=1,7", [], "training.accumulation_steps=7: .*accumulation_steps"),
        ("schedule.peak_rate=1,-1", [], "schedule.peak_rate=-1.0: .*peak_rate"),
    ],
)
def test_wrong_runs_are_one_line(tmp_path, vary, common, message):
    with pytest.raises(UserError, match=message):
        make_runs("demo", tmp_path, combine([vary], []), common)


def test_overrides_file(tmp_path):
    file = tmp_path / "runs.txt"
    file.write_text("# two\n\ntraining.seed=0 data.text_field='a b'  # first\ntraining.seed=1\n")
    assert read_overrides_file(str(file)) == [{"training.seed": "0", "data.text_field": "a b"}, {"training.seed": "1"}]
    for content, message in {
        "": "has no combination",
        "training.seed\n": "line 1 is not KEY=VALUE",
        "\ntraining.seed=1 training.seed=2\n": "line 2 gives a key twice",
        "a='b\n": "line 1: No closing quotation",
    }.items():
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            read_overrides_file(str(file))


def test_root_that_holds_something_else_is_refused(tmp_path, workspace):
    combined = combine(["training.seed=0,1"], [])
    (tmp_path / "notes").mkdir()
    with pytest.raises(UserError, match="holds notes, which no grid writes"):
        make_runs("demo", tmp_path, combined)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file: give a directory"):
        make_runs("demo", tmp_path / "file", combined)
    run = create_run(tmp_path / "notes" / "run", tiny.config(workspace), {})
    with pytest.raises(UserError, match="is a run: give a directory of its own"):
        make_runs("demo", run.path, combined)


def test_root_with_runs_of_another_configuration_is_refused(tmp_path):
    (run,) = make_runs("demo", tmp_path / "grid", combine(["training.seed=7"], []))
    create_run(run.path, run.config, {})
    assert make_runs("demo", tmp_path / "grid", combine(["training.seed=7,8"], []))[0] == run
    with pytest.raises(UserError, match=r"another configuration \(schedule.peak_rate: 0.002 -> 0.01\)"):
        make_runs("demo", tmp_path / "grid", combine(["training.seed=7"], []), ["schedule.peak_rate=0.01"])
