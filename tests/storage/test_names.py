"""Read steps and tokens from the names of checkpoints."""

import pytest

from pma_jax.storage.formats.names import progress_from_name


@pytest.mark.parametrize(
    ("name", "step", "tokens"),
    [
        ("step3000", 3000, None),
        ("stage1-step140000-tokens294B", 140000, 294 * 10**9),
        ("stage2-ingredient3-step23852-tokens51B", 23852, 51 * 10**9),
        ("step-001000-2BT", 1000, 2 * 10**9),
        ("stage1-step-40000", 40000, None),
        ("TinyLlama-1.1B-intermediate-step-1431k-3T", 1431000, 3 * 10**12),
        ("ckpt_358", 358, None),
        ("OLMo-2-1B", None, None),
        ("model", None, None),
    ],
)
def test_steps_and_tokens_are_parsed_from_the_names_of_public_suites(name, step, tokens):
    assert progress_from_name(name) == (step, tokens)
