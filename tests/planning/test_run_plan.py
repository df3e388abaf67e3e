import importlib.util
import json

import jax
import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.cli import main
from pma_jax.planning import aot, cost, plan_text, run_plan
from pma_jax.runtime.mesh import AXES

CHIP = cost.CHIPS["v5e"]


def planned(config, **changes):
    """Return a plan for the eight simulated devices, as if each were a chip."""
    topology = aot.Topology("8 CPU devices", CHIP, tuple(jax.devices()))
    options = {"storage_bytes_per_second": 1e6, "host_bytes_per_second": 1e6, "annealing_share": 0.25} | changes
    return run_plan.plan_run(config, topology, **options)


@pytest.fixture(scope="module")
def numbers(workspace):
    return planned(tiny.config(workspace, checkpoint__kinds=("point", "block_mean"), mesh__data=2, mesh__fsdp=4))


@pytest.mark.mesh
def test_plan_is_json_with_consistent_numbers(numbers):
    numbers = json.loads(json.dumps(numbers))
    assert numbers["mesh"] == dict(zip(AXES, (1, 2, 4, 1, 1), strict=True)) and numbers["topology"]["chips"] == 8
    run, step = numbers["training"], numbers["programs"]["train_step"]
    assert run["steps"] == 24 and run["batch_tokens"] == tiny.BATCH_TOKENS
    assert run["training_flops_per_token"] == 3 * sum(run["forward_flops_per_token"].values())
    assert run["step_flops_per_device"] * 8 == run["training_flops_per_token"] * tiny.BATCH_TOKENS
    assert run["step_seconds_at_least"] == step["roofline"]["seconds"] > 0
    assert run["tokens_per_day_at_most"] == pytest.approx(tiny.BATCH_TOKENS * 86_400 / run["step_seconds_at_least"])
    reached = run["step_flops_per_device"] / run["step_seconds_at_least"] / CHIP.flops_per_second
    assert run["model_flops_utilization_at_most"] == pytest.approx(reached) and 0 < reached < 1
    annealing = numbers["annealing"]
    assert annealing["steps"] == 6 and annealing["tokens"] == tiny.HORIZON / 4
    assert annealing["chip_hours_at_least"] == pytest.approx(8 * 6 * run["step_seconds_at_least"] / 3600)


@pytest.mark.mesh
def test_memory_of_a_step_is_that_of_state_and_batch(numbers):
    memory = numbers["programs"]["train_step"]["memory"]
    state, blocks = numbers["storage"]["state_bytes"], numbers["storage"]["block_mean_bytes_per_device"]
    assert blocks > 0 and state / 8 < memory["argument_bytes"] < state
    # All but the metrics and, on CPU, the table of output addresses.
    assert 0 <= memory["output_bytes"] - memory["aliased_bytes"] < 1000
    assert memory["bytes"] >= memory["argument_bytes"] + memory["temporary_bytes"]
    assert memory["share_of_memory"] == memory["bytes"] / CHIP.memory_bytes


@pytest.mark.mesh
def test_text_lists_every_program_and_the_files_on_disk(numbers):
    text = plan_text.format_plan(numbers)
    for word in (
        "train step",
        "evaluation step",
        "merge",
        "all-reduce",
        "block means",
        "at 1 MB/s",
        "chip hours",
        "MFU",
    ):
        assert word in text, word
    assert "collectives of the merge: none" in text and "not fit" not in text
    assert run_plan.out_of_memory_messages(numbers) == []


def test_program_that_does_not_fit_is_never_reported_to_fit(workspace, monkeypatch):
    compile_program = aot.compile_program
    output = "RESOURCE_EXHAUSTED: 20G of 15.75G hbm"

    def only_merges(lower, mesh):
        return compile_program(lower, mesh) if lower.__name__ == "lower_merge" else aot.CompileReport(1.0, output)

    monkeypatch.setattr(aot, "compile_program", only_merges)
    numbers = planned(tiny.config(workspace))
    assert [p["compiled"] for p in numbers["programs"].values()] == [False, False, True]
    assert run_plan.out_of_memory_messages(numbers) == [f"the train step: {output}", f"the evaluation step: {output}"]
    text = plan_text.format_plan(numbers)
    assert text.count("no: does not fit") == 2 and text.count("yes, ") == 1 and "MFU" not in text
    assert "FLOP" in text.splitlines()[-1] and "chip hours" not in text


def mixture(**changes):
    raw = configuration.load("tiny_moe")
    sizes = {"model.layers": 1, "mesh.data": 1, "mesh.cpu_devices": 0} | changes
    configuration.override(raw, [f"{key}={value}" for key, value in sizes.items()])
    return configuration.resolve(raw)


@pytest.mark.slow
@pytest.mark.mesh
def test_plan_of_a_mixture_counts_the_expert_exchange_and_the_bias():
    numbers = planned(mixture(**{"mesh.fsdp": 2, "mesh.expert": 4}))
    # Embedding and output, attention, router and bias, experts (each token uses 2 of 8), norms.
    D, shared = 96, 2 * 256 * 96 + 4 * 96 * 96 + 96 * 8 + 8 + 3 * 96
    expert = 3 * D * 128
    assert numbers["parameters"] == shared + 8 * expert
    assert numbers["activated_parameters"] == shared + 2 * expert
    assert numbers["storage"]["snapshot_bytes"] == 4 * numbers["parameters"]
    token = 2 * (4 * D * D + D * 8 + 2 * expert) + 2 * 256 * D + 4 * D * (128 + 1) / 2
    assert numbers["training"]["training_flops_per_token"] == 3 * token
    step, evaluation, merge = numbers["programs"].values()
    # Indices and rows out, rows back; the backward pass sends rows out and back.
    assert [p["collectives"]["all-to-all"]["count"] for p in (step, evaluation)] == [5, 3]
    assert merge["collectives"] == {} and merge["memory"]["temporary_bytes"] == 0
    assert merge["aliased_outputs"] == 14  # Leaves, including the bias.
    assert " parameters, " in plan_text.format_plan(numbers).splitlines()[0]


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_mixture_on_tpu_multiplies_only_its_tokens_products():
    numbers = run_plan.plan_run(
        mixture(**{"mesh.expert": 4, "training.batch_size_sequences": 64}),
        aot.tpu_topology("v5e:2x2"),
        storage_bytes_per_second=1e9,
        host_bytes_per_second=1e9,
        annealing_share=0.2,
    )
    step, evaluation, merge = numbers["programs"].values()
    forward = numbers["training"]["forward_flops_per_token"]
    for program, passes, sequences in ((step, 3, 64), (evaluation, 1, 64)):
        needed = passes * sum(forward.values()) * sequences * 128 / 4
        seen_twice = passes * forward["attention"] * sequences * 128 / 4  # The full square, by XLA.
        actual = program["product_flops"] + program["kernel_flops"]
        assert needed <= actual <= (needed + 4 / 3 * seen_twice) * 1.01
        assert program["kernels"]["silent"] == 0
        assert program["collectives"]["all-to-all"]["payload_bytes"] > 0
    assert merge["collectives"] == {} and merge["aliased_outputs"] == 14


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_verb_prints_writes_and_fails_where_a_program_does_not_fit(workspace, tmp_path, capsys):
    file = tiny.write_config(tmp_path / "config.py", workspace)
    arguments = ["plan", "--config", file, "--topology", "v5e:2x2", "--out", str(tmp_path / "plan.json")]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "plan.json").read_text())
    assert printed["topology"]["name"] == "v5e:2x2" and "libtpu" in printed["versions"]
    large = ["--config.model.vocabulary_size=2097152", "--config.model.width=4096", "--config.model.layers=1"]
    assert main([*arguments, *large]) == 1
    captured = capsys.readouterr()
    assert "no: does not fit" in captured.out
    assert captured.err.splitlines()[-1].startswith("error: the run does not fit in the memory of v5e:2x2: ")
    assert "RESOURCE_EXHAUSTED" in captured.err and json.loads((tmp_path / "plan.json").read_text())
