"""Generation with a cache chooses the tokens that the decoder without a cache chooses."""

import dataclasses

import jax
import numpy as np
import pytest

from pma_jax.config import ModelConfig
from pma_jax.model import decoder
from pma_jax.model.generation import continue_generation, start_generation
from pma_jax.runtime import mesh as meshes
from pma_jax.runtime.mesh import put_batch

TINY = ModelConfig(
    vocabulary_size=32, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, hidden=24, compute_dtype="float32"
)
VARIANTS = {
    "dense": {},
    "window": {"attention_window_tokens": 3},
    "separator": {"separator_token": 5},
    "qk-norm-tied": {"qk_norm": True, "tie_embeddings": True},
    "norms-after": {"norm_position": "after", "qk_norm": True, "qk_norm_over": "projection", "separator_token": 5},
    "no-rope": {"layers": 3, "no_rope_interval": 2, "attention_window_tokens": 4},
    "experts": {"experts": 4, "experts_per_token": 2, "expert_hidden": 8, "hidden": 0},
}


def mesh_of(**sizes):
    shape = [sizes.get(axis, 1) for axis in meshes.AXES]
    return jax.make_mesh(shape, meshes.AXES, devices=jax.devices()[: int(np.prod(shape))])


def greedy(graph, params, prompts, count):
    """Generate by reading the complete texts again for each token; zeros after a text do not change its logits."""
    lengths = np.array([len(prompt) for prompt in prompts])
    texts = np.stack([np.pad(p, (0, max(lengths) + count - len(p))) for p in prompts]).astype(np.int32)
    rows, apply = np.arange(len(prompts)), jax.jit(decoder.apply, static_argnums=0)
    for step in range(count):
        logits = np.asarray(apply(graph, params, texts))
        texts[rows, lengths + step] = logits[rows, lengths + step - 1].argmax(axis=-1)
    return [text[n : n + count].tolist() for text, n in zip(texts, lengths, strict=True)]


def generate(graph, params, mesh, prompts, calls):
    """Generate with the cache; `calls` are the numbers of tokens of the successive calls."""
    first = np.array([max(map(len, prompts)) - len(p) for p in prompts], np.int32)
    rows = np.stack([np.pad(p, (f, 0)) for p, f in zip(prompts, first, strict=True)]).astype(np.int32)
    generation = start_generation(
        graph, params, put_batch(mesh, rows), put_batch(mesh, first[:, None])[:, 0], sum(calls)
    )
    parts = []
    for count in calls:
        generation, chosen = continue_generation(graph, params, generation, count)
        parts.append(np.asarray(chosen))
    return np.concatenate(parts, axis=1).tolist()


def make(config):
    params = jax.jit(decoder.init_params, static_argnums=0)(config, jax.random.key(0))
    # Larger than at the initialisation, so that the next token depends on the text.
    return decoder.graph_definition(config), jax.tree.map(lambda x: 3 * x, params)


PROMPTS = [np.random.default_rng(i).integers(1, 32, n) for i, n in enumerate((1, 4, 7, 7))]


@pytest.mark.parametrize(
    "name", [name if name == "separator" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_the_cache_does_not_change_what_is_generated(name):
    config, mesh = dataclasses.replace(TINY, **VARIANTS[name]), mesh_of()
    with jax.set_mesh(mesh):
        graph, params = make(config)
        expected = greedy(graph, params, PROMPTS, 9)
        assert len({tuple(tokens) for tokens in expected}) > 1
        assert generate(graph, params, mesh, PROMPTS, [9]) == expected
        assert generate(graph, params, mesh, PROMPTS, [4, 4, 1]) == expected


@pytest.mark.mesh
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dense", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("experts", "norms-after", "no-rope")),
    ],
)
def test_a_mesh_generates_the_same(name):
    config = dataclasses.replace(TINY, **VARIANTS[name])
    results = []
    for sizes in ({}, {"data": 2, "tensor": 2}, {"fsdp": 2, "expert": 2}):
        mesh = mesh_of(**sizes)
        with jax.set_mesh(mesh):
            graph, params = make(config)
            results.append(generate(graph, params, mesh, PROMPTS, [4, 3]))
    assert results[1] == results[0] and results[2] == results[0]
