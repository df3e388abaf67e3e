import importlib.util
import json

import jax
import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.cli import main
from pma_jax.model.decoder import abstract_params
from pma_jax.planning import aot, cost, disk, plan_text, run_plan
from pma_jax.runtime.mesh import AXES, mesh_from_devices

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
@pytest.mark.parametrize("replicas", [2, 4])
def test_workers_on_slices_of_tpu_send_only_their_syncs(replicas):
    """With one worker per slice, a step sends nothing to the other slice; with two, nothing to the other worker."""
    raw = configuration.load("demo")
    keys = {"method": "diloco", "count": replicas, "interval_tokens": 80_000}
    mesh = {"replica": replicas, "data": 1, "fsdp": 8 // replicas, "cpu_devices": 0}
    changes = [f"replicas.{key}={value}" for key, value in keys.items()]
    changes += [f"mesh.{key}={value}" for key, value in mesh.items()]
    # Leaves are padded to tiles: large ones by little.
    sizes = {"width": 512, "heads": 4, "kv_heads": 4, "head_dim": 128, "hidden": 2048}
    changes += [f"model.{key}={value}" for key, value in sizes.items()]
    configuration.override(raw, [*changes, "training.batch_size_sequences=64"])
    config = configuration.resolve(raw)
    topology = aot.tpu_topology("2*v5e:2x2")
    mesh = mesh_from_devices(topology.devices, config.mesh)
    lowerings = aot.program_lowerings(config, mesh)
    step, sync = (aot.compile_program(lowerings[name], mesh).program for name in ("train_step", "sync"))
    assert run_plan.far_bytes(step, mesh, topology) == 0
    once = sum(disk.bytes_per_device(leaf) for leaf in jax.tree.leaves(abstract_params(config.model, mesh)))
    # Two workers of a slice first add their halves, of which each sends one to the other slice.
    assert once <= run_plan.far_bytes(sync, mesh, topology) <= 1.03 * once * replicas / 2


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


@pytest.mark.mesh
def test_plan_says_what_is_sent_between_replicas(workspace):
    keys = {"mesh__replica": 4, "mesh__data": 2, "replicas__interval_tokens": 2048, "training__batch_size_sequences": 8}
    numbers = planned(tiny.config(workspace, replicas__method="diloco", **keys))
    traffic = json.loads(json.dumps(numbers["far_traffic"]))
    step, sync = traffic["programs"]
    assert step == {"program": "train_step", "every_steps": 1, "bytes": 0}
    parameter_bytes = 4 * numbers["parameters"]
    assert sync["bytes"] == 2 * 3 / 4 * parameter_bytes and sync["every_steps"] == 8
    assert traffic["bytes_per_step"] == sync["bytes"] / 8
    seconds = numbers["training"]["step_seconds_at_least"]
    assert traffic["bytes_per_second"] * seconds == pytest.approx(traffic["bytes_per_step"])
    assert numbers["storage"]["snapshot_bytes"] == parameter_bytes
    text = plan_text.format_plan(numbers)
    assert "between 4 replicas, the train step sends 0 B per device, a step" in text
    assert "the sync sends" in text and "every 8 steps" in text and "in all: the network decides below" in text


@pytest.mark.slow
@pytest.mark.mesh
def test_fragments_share_the_network(workspace):
    keys = {"mesh__replica": 2, "mesh__data": 4, "replicas__interval_tokens": 2048, "training__batch_size_sequences": 8}
    config = tiny.config(workspace, replicas__method="streaming", replicas__streaming_fragments=2, **keys)
    numbers = planned(config)
    _, *fragments = numbers["far_traffic"]["programs"]
    assert [one["every_steps"] for one in fragments] == [8, 8]
    sent = sum(one["bytes"] for one in fragments)
    assert sent == 4 * numbers["parameters"]  # half of the workers' sum, and half of it back
    assert numbers["far_traffic"]["bytes_per_step"] == pytest.approx(sent / 8)
