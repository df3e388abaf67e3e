"""Tests of trainers that save with Orbax: MaxText and Kauldron, with the calls of their savers and loaders."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1
from trainer_trees import collection, maxtext_state, parameters, save_kauldron, save_maxtext, save_maxtext_v1

from pma_jax.config.errors import UserError
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.from_storage import plan_merge
from pma_jax.merging.gather import open_checkpoints
from pma_jax.storage.formats.open import open_source


def load_maxtext(path, wanted):
    """Restore as MaxText's `load_params_from_path` restores `load_parameters_path`."""
    arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    return checkpointer.restore(path / "items", item=wanted, transforms={}, restore_args=arguments)


def mean(trees):
    return jax.tree.map(lambda *xs: np.mean([np.float64(x) for x in xs], axis=0), *trees)


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float64(a), b, rtol=2**-8, atol=2**-8), actual, expected)


def test_merge_of_maxtext_is_loaded_as_its_parameters(tmp_path):
    series = open_checkpoints([save_maxtext(tmp_path, (1, 2, 3))])
    assert [source.step for source in series.sources] == [100, 200, 300]
    assert all(name.startswith("params.") for name in series.sources[0].leaves)
    assert "subtree 'params' (of " in " ".join(series.sources[0].notes + series.notes)
    merge(plan_merge(series, ["sma"])[0], [tmp_path / "merged"])
    restored = load_maxtext(tmp_path / "merged", {"params": {"params": parameters(1)} | collection(1)})
    assert restored["params"]["params"]["token_embedder"]["embedding"].dtype == jnp.bfloat16
    assert_close(restored["params"], mean([maxtext_state(seed)["params"] for seed in (1, 2, 3)]))


def test_one_collection_of_maxtext_can_be_merged(tmp_path):
    series = open_checkpoints([save_maxtext(tmp_path, (1, 2))], subtrees=["params/params", "opt_state/0/mu"])
    names = {tuple(name.split(".")[:2]) for name in series.sources[0].leaves}
    assert names == {("params", "params"), ("opt_state", "0")}
    merge(plan_merge(series, ["sma"])[0], [tmp_path / "merged"])
    wanted = {"params": {"params": parameters(1)}, "opt_state": [{"mu": {"params": parameters(1)}}]}
    restored = load_maxtext(tmp_path / "merged", wanted)
    assert_close(restored["params"]["params"], mean([parameters(seed) for seed in (1, 2)]))
    expected = mean([maxtext_state(seed)["opt_state"][0]["mu"] for seed in (1, 2)])
    assert_close(restored["opt_state"][0]["mu"], expected)


@pytest.mark.parametrize("part", ["opt_state/2", "opt_state/1"])
def test_part_of_a_list_that_orbax_does_not_restore_is_refused(tmp_path, part):
    series = open_checkpoints([save_maxtext(tmp_path, (1, 2))], subtrees=["params/params", part])
    with pytest.raises(UserError, match=f"of the list 'opt_state', element {part[-1]} is to be written without those"):
        plan_merge(series, ["sma"], integers="newest")


def load_maxtext_v1(path, tree):
    """Restore as MaxText 0.2.5's `load_params_from_path`: what is wanted of the stored tree, with its shardings."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
    context = ocp_v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        return ocp_v1.load(path, wanted, checkpointable_name="items")


def test_merge_of_maxtext_by_orbax_v1_is_loaded_with_how_the_model_is_built(tmp_path):
    folder = save_maxtext_v1(tmp_path, (1, 2, 3), loss={1: 2.5, 2: 2.25, 3: 2.125})
    series = open_checkpoints([folder])
    assert "subtree 'params' (of nnx_aux, opt_state, params, step)" in " ".join(series.sources[0].notes + series.notes)
    merge(plan_merge(series, ["sma"])[0], [tmp_path / "merged"])
    # MaxText reads `scan_layers` before it builds the model. A value that is not the same in all is of one checkpoint.
    custom = ocp_v1.checkpointables_metadata(tmp_path / "merged").custom_metadata
    assert custom == {"scan_layers": True, "lora": {"lora_rank": 8}, "step": 300}
    states = [maxtext_state(seed) for seed in (1, 2, 3)]
    restored = load_maxtext_v1(tmp_path / "merged", {"params": states[0]["params"]})
    assert_close(restored["params"], mean([state["params"] for state in states]))


def test_complete_state_of_maxtext_is_merged_by_its_parts(tmp_path):
    parts = ["params", "opt_state", "step", "nnx_aux"]
    series = open_checkpoints([save_maxtext_v1(tmp_path, (1, 2))], subtrees=parts)
    merge(plan_merge(series, ["sma"], integers="newest")[0], [tmp_path / "merged"])
    states = [maxtext_state(seed) for seed in (1, 2)]
    restored = load_maxtext_v1(tmp_path / "merged", states[0])
    floating = [{"params": state["params"], "mu": state["opt_state"][0]["mu"]} for state in states]
    assert_close({"params": restored["params"], "mu": restored["opt_state"][0]["mu"]}, mean(floating))
    for number in (restored["step"] // 100, restored["opt_state"][2]["count"], restored["opt_state"][0]["count"]):
        assert number == 2
    assert restored["opt_state"][1] is None


def test_merge_of_kauldron_is_loaded_as_params_and_collections(tmp_path):
    folder = save_kauldron(tmp_path, (1, 2))
    series = open_checkpoints([folder], subtrees=["params", "collections"])
    assert [source.step for source in series.sources] == [100, 200]
    merge(plan_merge(series, ["sma"])[0], [tmp_path / "merged" / "checkpoints" / "ckpt_200"])
    # As `PartialKauldronLoader` restores them: the newest step of a folder, by a manager with the same prefix.
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt")
    with ocp.CheckpointManager(tmp_path / "merged" / "checkpoints", options=options) as manager:
        assert manager.latest_step() == 200
        wanted = {"params": parameters(1), "collections": collection(1)}
        restored = manager.restore(200, args=ocp.args.StandardRestore(wanted))
    assert_close(restored["params"], mean([parameters(seed) for seed in (1, 2)]))
    np.testing.assert_allclose(restored["collections"]["batch_stats"]["norm"]["mean"], 1.5)


def test_collections_that_are_empty_are_named_as_others(tmp_path):
    folder = save_kauldron(tmp_path, (1, 2), collections=lambda seed: {})
    series = open_checkpoints([folder], subtrees=["params", "collections"])
    merge(plan_merge(series, ["sma"])[0], [tmp_path / "ckpt_200"])
    # As Kauldron's `SimpleCheckpointLoader` restores both.
    handler = ocp.PyTreeCheckpointHandler()
    wanted = {"params": parameters(1), "collections": {}}
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
    restored = ocp.Checkpointer(handler).restore(tmp_path / "ckpt_200" / "default", args=arguments)
    assert restored["collections"] == {}
    assert_close(restored["params"], mean([parameters(seed) for seed in (1, 2)]))
    with pytest.raises(UserError, match="the subtree 'collections' holds no arrays; it has "):
        open_source(folder / "ckpt_100", ["collections"])


@pytest.mark.parametrize(
    ("subtrees", "message"),
    [
        (["params", "params/params"], "the subtree 'params/params' is part of 'params', or the same; name one"),
        (["params", "parameters"], "has no subtree 'parameters'; it has "),
        (["items/params", "opt_state"], "name all subtrees with their item, such as items/params"),
    ],
    ids=str,
)
def test_subtrees_that_do_not_fit_are_refused(tmp_path, subtrees, message):
    folder = save_maxtext(tmp_path, (1,))
    with pytest.raises(UserError, match=message):
        open_source(folder / "100", subtrees)
