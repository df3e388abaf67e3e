import jax
import numpy as np
import pytest
import tiny

from pma_jax.merging import preview
from pma_jax.model.decoder import init_params
from pma_jax.runtime.mesh import RULES, make_mesh

WMA = {2: [1 / 3, 2 / 3], 3: [1 / 6, 2 / 6, 3 / 6]}


def test_previews_are_the_loss_of_numpys_average_of_the_stored_snapshots(finished):
    mesh = make_mesh(finished.config.mesh)
    recorded = [r for r in finished.metrics if r["kind"] == "preview"]
    stored = [tiny.read(s) for s in finished.snapshots]
    merged = []
    for record in recorded:
        newest = tiny.SNAPSHOTS.index(record["step"]) + 1
        n = int(record["recipe"].removeprefix("sma:"))
        window = stored[newest - n : newest]
        merged.append(
            jax.tree.map(lambda *x: np.mean([leaf.astype(np.float64) for leaf in x], 0).astype(np.float32), *window)
        )
    losses = tiny.losses(finished.config, [on_mesh(params, finished, mesh) for params in merged])
    assert len(recorded) == 9
    assert [r["loss"] for r in recorded] == pytest.approx(losses, rel=1e-6)


def on_mesh(params, run, mesh):
    from pma_jax.model.decoder import abstract_params

    return jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding), params, abstract_params(run.config.model, mesh)
    )


@pytest.mark.mesh
def test_window_holds_the_newest_snapshots_and_survives_donation(workspace):
    config = tiny.config(workspace, mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
    mesh = make_mesh(config.mesh)
    window = preview.Window(3, lambda older, newer: newer == older + 1)
    with jax.set_mesh(mesh):
        params = {
            "w": jax.device_put(np.ones((4, 4), np.float32), jax.NamedSharding(mesh, RULES.spec("width", "hidden")))
        }
        grow = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), donate_argnums=0)
        actual = []
        for step in range(1, 6):
            window.add(step, params)
            merges = {text: np.asarray(merged["w"]) for text, merged in window.merges("wma", (3, 2, 9))}
            actual.append(merges)
            params = grow(params)
    values = 2.0 ** np.arange(5)
    assert [sorted(m) for m in actual] == [[], ["wma:2"], ["wma:2", "wma:3"], ["wma:2", "wma:3"], ["wma:2", "wma:3"]]
    for step, merges in enumerate(actual):
        for n, weights in WMA.items():
            if f"wma:{n}" in merges:
                expected = np.dot(weights, values[step + 1 - n : step + 1])
                np.testing.assert_allclose(merges[f"wma:{n}"], np.full((4, 4), expected), rtol=1e-6)


@pytest.mark.mesh
def test_merges_keep_the_sharding(workspace):
    config = tiny.config(workspace)
    mesh = make_mesh(tiny.config(workspace, mesh__data=2, mesh__fsdp=4).mesh)
    window = preview.Window(2, lambda older, newer: newer == older + 1)
    with jax.set_mesh(mesh):
        params = jax.jit(lambda key: init_params(config.model, key))(jax.random.key(0))
        window.add(1, params)
        window.add(2, params)
        ((text, merged),) = window.merges("sma", (2,))
    assert text == "sma:2"
    tiny.assert_equal(merged, params)
    for a, e in zip(jax.tree.leaves(merged), jax.tree.leaves(params), strict=True):
        assert a.sharding.is_equivalent_to(e.sharding, a.ndim) and a.sharding.memory_kind == e.sharding.memory_kind


def test_without_windows_no_snapshots_are_held():
    window = preview.Window(0, lambda older, newer: newer == older + 1)
    window.add(1, {"w": jax.numpy.ones(3)})
    assert list(window.merges("sma", ())) == []
