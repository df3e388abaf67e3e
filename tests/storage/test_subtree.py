"""Locate the parameters in a tree that holds more."""

import numpy as np
import pytest

from pma_jax.config.errors import UserError
from pma_jax.storage.formats.open import open_source


@pytest.mark.parametrize(
    "key", ["model_averaging", "ema_weights", "params_ema", "EMA", "polyak_params", "nnx_aux", "training_state"]
)
def test_averages_and_states_beside_the_parameters_are_left_out(tmp_path, key):
    for seed in (1, 2):
        leaves = {f"model/{name}": np.full((2, 3), 1.0 * seed, np.float32) for name in ("w", "ema_scale")}
        np.savez(tmp_path / f"step_{seed}.npz", **leaves, **{f"{key}/w": np.zeros((2, 3), np.float32)})
    source = open_source(tmp_path / "step_1.npz")
    assert sorted(source.leaves) == ["model/ema_scale", "model/w"]
    assert any("subtree 'model' (of " in note and key in note for note in source.notes)
    assert list(open_source(tmp_path / "step_1.npz", [key]).leaves) == [f"{key}/w"]
    np.savez(tmp_path / "alone.npz", **{"encoder/w": np.zeros(3), f"{key}/w": np.zeros(3)})
    with pytest.raises(UserError, match=f"holds {key} and it is not clear where the parameters are"):
        open_source(tmp_path / "alone.npz")
