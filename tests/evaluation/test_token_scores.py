"""Scores of token sequences on the mesh agree with float64 log-softmax of the reference decoder."""

import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.config import ModelConfig
from pma_jax.config.errors import UserError
from pma_jax.evaluation import token_scores
from pma_jax.evaluation.token_scores import MeshModel, choose_lengths, truncate
from pma_jax.model import decoder
from pma_jax.runtime import mesh as meshes

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
import reference

TINY = ModelConfig(
    vocabulary_size=64, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, hidden=24, compute_dtype="float32"
)
RNG = np.random.default_rng(0)
# (ids, how many of the last are scored), of lengths on both sides of the padded ones.
SEQUENCES = [(RNG.integers(1, 64, n).tolist(), k) for n, k in ((2, 1), (9, 3), (33, 32), (34, 1), (60, 20), (97, 96))]


def make(config=TINY, **sizes):
    shape = [sizes.get(axis, 1) for axis in meshes.AXES]
    mesh = jax.make_mesh(shape, meshes.AXES, devices=jax.devices()[: int(np.prod(shape))])
    with jax.set_mesh(mesh):
        params = jax.jit(decoder.init_params, static_argnums=0)(config, jax.random.key(0))
        params = jax.tree.map(lambda x: 3 * x, params)
        return MeshModel(decoder.graph_definition(config), params, mesh, 96, 4 * 96)


def expected(config, params, ids, scored):
    """Return the log-probability of the last tokens, and whether each has the largest logit, in float64."""
    logits_LxV = reference.logits(config, params, np.array([ids[:-1]]))[0]
    log_z_L = np.log(np.exp(logits_LxV - logits_LxV.max(1, keepdims=True)).sum(1)) + logits_LxV.max(1)
    targets = np.array(ids[1:])
    values_L = logits_LxV[np.arange(len(targets)), targets] - log_z_L
    return values_L[-scored:].sum(), bool((logits_LxV.argmax(1) == targets)[-scored:].all())


def check(config, model):
    # A continuation that the model itself would write, which is the most likely one.
    greedy = model.generate([SEQUENCES[1][0]], 5, lambda tokens: False)[0]
    sequences = [*SEQUENCES, (SEQUENCES[1][0] + greedy, 5)]
    results = model.score(sequences)
    params = jax.device_get(model.params)
    for (ids, scored), (value, is_greedy) in zip(sequences, results, strict=True):
        assert value == pytest.approx(expected(config, params, ids, scored)[0], rel=1e-5, abs=1e-4)
        assert is_greedy == expected(config, params, ids, scored)[1]
    assert results[-1][1]
    assert not all(is_greedy for _, is_greedy in results)


@pytest.mark.parametrize(
    "changes", [pytest.param({}, marks=pytest.mark.slow), {"separator_token": 7}], ids=["plain", "separator"]
)
def test_scores_agree_with_float64(changes):
    config = dataclasses.replace(TINY, **changes)
    check(config, make(config))


@pytest.mark.mesh
@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.slow), pytest.param({"fsdp": 4}, marks=pytest.mark.long)],
    ids=str,
)
def test_scores_on_a_mesh_agree_with_float64(sizes):
    check(TINY, make(**sizes))


def test_padding_and_the_order_of_sequences_do_not_change_scores():
    model = make(dataclasses.replace(TINY, separator_token=7))
    together = model.score(SEQUENCES)
    assert model.score(SEQUENCES[::-1])[::-1] == together
    for sequence, score in zip(SEQUENCES, together, strict=True):
        assert model.score([sequence])[0][0] == pytest.approx(score[0], rel=1e-5)


@given(st.lists(st.integers(1, 150), min_size=1, max_size=12))
def test_the_chosen_lengths_pad_least(lengths):
    chosen = choose_lengths(lengths, 150)
    sizes = sorted({min(-(-n // 16) * 16, 150) for n in lengths})
    assert chosen == sorted(chosen) and set(chosen) <= set(sizes) and len(chosen) <= 6

    def padded(candidates):
        return sum(min(c for c in candidates if c >= n) for n in lengths)

    others = [c for k in range(1, 7) for c in itertools.combinations(sizes, k) if c[-1] == sizes[-1]]
    assert padded(chosen) == min(map(padded, others))


def test_a_long_context_is_cut_from_the_left_and_a_long_answer_is_refused():
    assert truncate([1, 2, 3, 4], [5, 6], 4) == [2, 3, 4, 5, 6]
    assert truncate([1], [2, 3, 4], 3) == [1, 2, 3, 4]
    with pytest.raises(UserError, match="an answer has 4 tokens, and the model reads 3"):
        truncate([1], [2, 3, 4, 5], 3)


def test_generation_stops_when_all_are_finished(monkeypatch):
    model, calls = make(), []
    compute = token_scores.continue_generation
    monkeypatch.setattr(token_scores, "continue_generation", lambda *a: calls.append(1) or compute(*a))
    prompts = [[1, 2, 3], [4]]
    assert [len(tokens) for tokens in model.generate(prompts, 40, lambda tokens: False)] == [40, 40]
    assert len(calls) == 3
    calls.clear()
    assert all(len(tokens) == 16 for tokens in model.generate(prompts, 40, lambda tokens: len(tokens) > 3))
    assert len(calls) == 1
