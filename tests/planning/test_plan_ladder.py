"""The table of experiments/plan_ladder matches its results, and they match the present configurations."""

import importlib.util
import math
import sys
from pathlib import Path

import jax
import pytest

from pma_jax.config import MeshConfig
from pma_jax.model import ladder
from pma_jax.planning import aot, counts, disk
from pma_jax.runtime.mesh import check_mesh, mesh_from_devices
from pma_jax.training.state import abstract_state

FOLDER = Path(__file__).parents[2] / "experiments" / "plan_ladder"
needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")


def script():
    spec = importlib.util.spec_from_file_location("plan_ladder", FOLDER / "plan_ladder.py")
    module = sys.modules["plan_ladder"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plan_ladder = script()
RESULTS = plan_ladder.read_results()
PLANNED = [name for name, result in RESULTS.items() if result["plan"]]


def test_every_size_has_a_slice_of_v5e_v5p_or_v6e():
    assert set(plan_ladder.SLICES) == set(ladder.SIZES)
    assert {s.topology.partition(":")[0] for s in plan_ladder.SLICES.values()} == {"v5e", "v5p", "v6e"}
    for name, size in ladder.SIZES.items():
        if size.total_params >= 8e9 and size.activated_params >= 3e9:
            assert size.sequence_length_tokens == 8192, name


@pytest.mark.parametrize("name", plan_ladder.SLICES)
def test_mesh_of_a_slice_fills_it_and_divides_the_size(name):
    config, slice_ = plan_ladder.planned_config(name), plan_ladder.SLICES[name]
    mesh = config.mesh
    shape = {
        "replica": mesh.replica,
        "data": mesh.data,
        "fsdp": mesh.fsdp,
        "tensor": mesh.tensor,
        "expert": mesh.expert,
    }
    chips = math.prod(int(side) for side in slice_.topology.partition(":")[2].split("x"))
    assert math.prod(shape.values()) == chips
    check_mesh(config, jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape)))


def test_readme_has_exactly_the_table_of_the_results():
    readme = (FOLDER / "README.md").read_text()
    _, _, rest = readme.partition(plan_ladder.START + "\n")
    actual, closed, _ = rest.partition("\n" + plan_ladder.END)
    assert closed and actual == plan_ladder.table(RESULTS)
    assert all(f"| `{name}` |" in actual for name in ladder.SIZES)


@pytest.mark.parametrize("name", PLANNED)
def test_result_belongs_to_the_configuration_and_fits_by_the_compilers_report(name):
    result, plan = RESULTS[name], RESULTS[name]["plan"]
    # Versions and digest are those of the planning run: a new key changes the digest of every configuration, and
    # running the command again plans anew with the present one.
    made_with = {key: result["identity"][key] for key in ("versions", "config_digest")}
    now = plan_ladder.identity(name) | made_with
    assert result["identity"] == now
    assert plan["topology"]["name"] == plan_ladder.SLICES[name].topology
    size = ladder.SIZES[name]
    assert plan["parameters"] == pytest.approx(size.total_params, rel=0.05)
    assert plan["activated_parameters"] == pytest.approx(size.activated_params, rel=0.05)
    for program in plan["programs"].values():
        assert program["compiled"] and program["memory"]["bytes"] <= plan["topology"]["device_memory_bytes"]
    assert None not in plan["programs"]["train_step"]["loop_trips"]


@pytest.mark.parametrize("name", PLANNED)
def test_recorded_merge_adds_in_place_without_a_collective(name):
    plan = RESULTS[name]["plan"]
    merge = plan["programs"]["merge"]
    assert merge["collectives"] == {}
    assert merge["memory"]["temporary_bytes"] <= plan["largest_leaf_bytes_per_device"]
    assert merge["aliased_outputs"] == plan["parameter_leaves"]


@needs_libtpu
@pytest.mark.parametrize("name", ["dense_70b", "moe_20b_200b"])
def test_merge_of_the_largest_sizes_adds_in_place_without_a_collective(name):
    config, slice_ = plan_ladder.planned_config(name), plan_ladder.SLICES[name]
    sizes = MeshConfig(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.mesh.expert)
    mesh = mesh_from_devices(aot.tpu_topology(slice_.topology).devices, sizes)
    leaves = jax.tree.leaves(abstract_state(config, mesh).params)
    report = aot.compile_program(aot.program_lowerings(config, mesh)["merge"], mesh)
    assert report.out_of_memory_message is None and report.program.devices == mesh.size
    for word in (*counts.COLLECTIVES, "send", "recv"):
        assert f" {word}(" not in report.program.text and f" {word}-start(" not in report.program.text
    assert report.memory["temporary_bytes"] <= max(map(disk.bytes_per_device, leaves))
    assert report.program.aliased_output_count == len(leaves)


def test_row_of_a_failed_plan_gives_the_reason():
    failed = {"identity": {}, "wall_seconds": 1200.0, "failed": "not compiled within 20 minutes", "plan": None}
    rows = plan_ladder.table({"dense_8b": failed}).splitlines()
    row = next(row for row in rows if "`dense_8b`" in row)
    assert "| not compiled within 20 minutes |" in row and len({line.count("|") for line in rows}) == 1
    assert "not planned yet" in rows[2]


def test_size_that_does_not_fit_is_never_reported_to_fit():
    if not PLANNED:
        pytest.skip("no size is planned")
    result = RESULTS[PLANNED[0]]
    step = {"compiled": False, "refusal": "RESOURCE_EXHAUSTED", "compile_seconds": 1.0}
    plan = result["plan"] | {"programs": result["plan"]["programs"] | {"train_step": step}}
    row = plan_ladder.table({PLANNED[0]: result | {"plan": plan}})
    assert "does not fit: the train step" in row and "GiB" not in row


def test_stored_plans_are_reused_and_changed_sizes_planned_again(tmp_path, monkeypatch):
    planned = []

    def plan_size(name, limit_minutes):
        planned.append(name)
        return {"identity": plan_ladder.identity(name), "wall_seconds": 1.0, "failed": None, "plan": {"of": name}}

    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{plan_ladder.START}\n{plan_ladder.END}\nafter\n")
    monkeypatch.setattr(plan_ladder, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(plan_ladder, "README", readme)
    monkeypatch.setattr(plan_ladder, "plan_size", plan_size)
    monkeypatch.setattr(plan_ladder, "table", lambda results: " ".join(results))
    monkeypatch.setattr(sys, "argv", ["plan_ladder.py", "dense_8b", "dense_125m"])
    plan_ladder.main()
    plan_ladder.main()
    assert planned == ["dense_8b", "dense_125m"]
    assert readme.read_text() == f"before\n{plan_ladder.START}\ndense_125m dense_8b\n{plan_ladder.END}\nafter\n"
    changed = plan_ladder.SLICES | {"dense_8b": plan_ladder.Slice("v5p:4x4x4", fsdp=64, accumulation_steps=4)}
    monkeypatch.setattr(plan_ladder, "SLICES", changed)
    plan_ladder.main()
    assert planned == ["dense_8b", "dense_125m", "dense_8b"]
