"""The search of microbatches and rematerialization: what fits, until the bound of the step falls no more."""

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

    Without rematerialization no step fits. With `dots` it fits from 4 microbatches on, whose bound is the lowest. With
    `full` it fits from 2 on, and the bound of 4 is lower; that of 8 equals it.
    """

    def fake(config, _):
        steps, remat = config.training.accumulation_steps, config.model.remat
        if steps < {"none": 99, "dots": 4, "full": 2}[remat]:
            return aot.CompileReport(1.0, "RESOURCE_EXHAUSTED")
        size = {"dots": {4: 1000, 8: 1500}, "full": {2: 3000, 4: 2000, 8: 2000}}[remat][steps]
        text = f"HloModule step\n\nENTRY main {{\n  p = f32[{size}] parameter(0)\n  ROOT c = f32[{size}] copy(p)\n}}\n"
        text = text.replace("ENTRY main {", "ENTRY main (p: f32[1]) -> f32[1] {")
        return aot.CompileReport(1.0, None, hlo.parse_hlo(text), MEMORY)

    monkeypatch.setattr(aot, "program_lowerings", lambda config, _: {"train_step": config})
    monkeypatch.setattr(aot, "compile_program", fake)


def test_more_microbatches_are_tried_while_their_bound_falls(workspace, compiler):
    config = tiny.config(workspace, training__batch_size_sequences=8, mesh__data=1)
    tried = search.search(config, topology())
    settings = [(one["remat"], one["accumulation_steps"], one["compiled"]) for one in tried]
    ranked = [("dots", 4, True), ("dots", 8, True), ("full", 4, True), ("full", 8, True), ("full", 2, True)]
    assert settings[:5] == ranked
    refused = {(remat, steps) for remat, steps, fits in settings[5:] if not fits}
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
    assert all(one["compiled"] for one in tried)
    assert {one["remat"] for one in tried if one["accumulation_steps"] == 1} == set(search.REMATS)


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
