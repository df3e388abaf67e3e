"""The search of microbatches and rematerialization: what fits with the fewest, ranked by the bound of the step."""

import dataclasses
import json

import jax
import pytest
import tiny

from pma_jax.cli import main
from pma_jax.config.errors import UserError
from pma_jax.planning import aot, cost, hlo, search

CHIP = cost.CHIPS["v5e"]
MEMORY = {"argument_bytes": 1, "temporary_bytes": 1, "output_bytes": 0, "aliased_bytes": 0, "code_bytes": 0, "bytes": 2}


def topology(devices=1):
    return aot.Topology("CPU devices", CHIP, tuple(jax.devices()[:devices]))


@pytest.fixture
def compiler(monkeypatch):
    """Replace the compiler by one that refuses large microbatches, and whose programs copy one array.

    Without rematerialization no step fits; with `dots` it fits from 4 microbatches on, with `full` from 2.
    """

    def fake(config, _):
        steps, remat = config.training.accumulation_steps, config.model.remat
        if steps < {"none": 99, "dots": 4, "full": 2}[remat]:
            return aot.CompileReport(1.0, "RESOURCE_EXHAUSTED")
        size = {"dots": 1000, "full": 2000}[remat]
        text = f"HloModule step\n\nENTRY main {{\n  p = f32[{size}] parameter(0)\n  ROOT c = f32[{size}] copy(p)\n}}\n"
        text = text.replace("ENTRY main {", "ENTRY main (p: f32[1]) -> f32[1] {")
        return aot.CompileReport(1.0, None, hlo.parse_hlo(text), MEMORY)

    monkeypatch.setattr(aot, "program_lowerings", lambda config, _: {"train_step": config})
    monkeypatch.setattr(aot, "compile_program", fake)


def test_the_fewest_microbatches_that_fit_are_ranked_by_their_bound(workspace, compiler):
    config = tiny.config(workspace, training__batch_size_sequences=8, mesh__data=1)
    tried = search.search(config, topology())
    settings = [(one["remat"], one["accumulation_steps"], one["compiled"]) for one in tried]
    assert settings[:2] == [("dots", 4, True), ("full", 2, True)]
    refused = {(remat, steps) for remat, steps, fits in settings[2:] if not fits}
    assert refused == {("none", 1), ("none", 2), ("none", 4), ("none", 8), ("dots", 1), ("dots", 2), ("full", 1)}
    bound = 2 * 1000 * 4 / CHIP.memory_bytes_per_second
    assert tried[0]["roofline"]["memory_seconds"] == pytest.approx(bound)
    text = search.format_search(json.loads(json.dumps(tried)))
    assert text.endswith("lowest bound: --config.training.accumulation_steps=4 --config.model.remat=dots")
    assert text.count("does not fit") == len(refused)


def test_microbatches_are_those_that_the_mesh_divides(workspace, compiler):
    config = tiny.config(workspace, training__batch_size_sequences=8, mesh__data=1)
    wide = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=3))
    with pytest.raises(UserError, match="needs 3 devices"):
        search.search(wide, topology())


@pytest.mark.slow
def test_a_real_search_of_one_device(workspace):
    tried = search.search(tiny.config(workspace, training__batch_size_sequences=2, mesh__data=1), topology())
    assert [one["accumulation_steps"] for one in tried] == [1, 1, 1] and all(one["compiled"] for one in tried)
    assert {one["remat"] for one in tried} == set(search.REMATS)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--traffic"], "--search compares settings, and --traffic describes one"),
        (["--host-bandwidth", "1GB/s"], "leave out --host-bandwidth, which has no effect"),
        (["--annealing-share", "0.2"], "leave out --annealing-share"),
    ],
)
def test_options_without_effect_on_a_search_are_refused(capsys, option, message):
    assert main(["plan", "--config", "demo", "--topology", "v5e:2x2", "--search", *option]) == 1
    assert message in capsys.readouterr().err
