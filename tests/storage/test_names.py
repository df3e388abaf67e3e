"""Read steps, tokens, epochs and stages from the names of checkpoints."""

from pathlib import PurePath

import pytest

from pma_jax.storage.formats.names import NameProgress, owner_of_item, parse_name, parse_path, stage_rank, stage_words

B = 10**9


@pytest.mark.parametrize(
    ("name", "step", "tokens", "epoch", "stage"),
    [
        ("step3000", 3000, None, None, ""),
        ("stage1-step140000-tokens294B", 140000, 294 * B, None, "stage1"),
        ("stage2-ingredient3-step23852-tokens51B", 23852, 51 * B, None, "stage2-ingredient3"),
        ("step-001000-2BT", 1000, 2 * B, None, ""),
        ("stage1-step-40000", 40000, None, None, "stage1"),
        ("TinyLlama-1.1B-step-50K-105b", 50_000, 105 * B, None, "TinyLlama-1.1B"),
        ("TinyLlama-1.1B-intermediate-step-955k-token-2T", 955_000, 2000 * B, None, "TinyLlama-1.1B-intermediate"),
        ("TinyLlama-1.1B-intermediate-step-1431k-3T", 1431000, 3000 * B, None, "TinyLlama-1.1B-intermediate"),
        ("ckpt_358", 358, None, None, ""),
        ("checkpoint-500", 500, None, None, ""),
        ("checkpoint_500", 500, None, None, ""),
        ("checkpoint.bv-000000200", 200, None, None, ""),
        ("0001000", 1000, None, None, ""),
        ("step=1000", 1000, None, None, ""),
        ("iter_0000500", 500, None, None, ""),
        ("global_step1000", 1000, None, None, ""),
        ("ep0-ba100-rank0", 100, None, 0, "rank0"),
        ("epoch=3-step=1000", 1000, None, 3, ""),
        ("epoch=1-step=100-val_loss=2.31", 100, None, 1, ""),
        ("epoch_2", None, None, 2, ""),
        ("step1.5k", 1500, None, None, ""),
        ("Step_100", 100, None, None, ""),
        ("ckpt_3_step_600", 600, None, None, ""),
        ("step100_step100", 100, None, None, ""),
        ("step1000-anneal", 1000, None, None, "anneal"),
        ("step100-2024-01-05", 100, None, None, ""),
        ("step-20240105", 20240105, None, None, ""),
        ("tokens_1000000", None, 10**6, None, ""),
        ("100B-tokens", None, 100 * B, None, ""),
        ("100BT", None, 100 * B, None, ""),
        ("step1000-tokens0.5B-seed1", 1000, B // 2, None, "seed1"),
        ("llama-3-8b-step500", 500, None, None, "llama-3-8b"),
        ("step-1000-tokens", 1000, None, None, "tokens"),
    ],
)
def test_progress_is_parsed_from_names_of_trainers_and_suites(name, step, tokens, epoch, stage):
    assert parse_name(name) == NameProgress(step, tokens, epoch, stage)


OTHER_NUMBERS = (
    "OLMo-2-1B model llama-3-8b v2 7B 70b 2024-01-05 20240105 checkpoint-2024-01-05 checkpoint-20240105 20240105123000 "
    "checkpoint-1704412800 checkpoint-7b checkpoint_1_1000 step_1_2 step100-iter200 step1.5 epoch0.5 1e3 step1e5 "
    "fineweb-100BT final checkpoint-last checkpoint-best timestep500 2_Dense text_encoder_2 run-7 seed_3 model_5 128k "
    "step٣ step99999999999999999999999999 Qwen2.5-0.5B gpt-4.1 llama-4-scout-17b-16e"
)


@pytest.mark.parametrize("name", OTHER_NUMBERS.split())
def test_other_numbers_are_no_progress(name):
    assert not parse_name(name).is_known


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("s/1000/items", "s/1000"),
        ("s/1000/state/params", "s/1000"),
        ("s/checkpoint-500/model", "s/checkpoint-500"),
        ("s/global_step1000/mp_rank_00_model_states", "s/global_step1000"),
        ("s/step5/model.safetensors", "s/step5"),
        ("s/step5/model-00001-of-00002.safetensors", "s/step5"),
        ("s/step5/model.safetensors.index.json", "s/step5"),
        ("s/step5.safetensors", "s/step5.safetensors"),
        ("s/1000/llama", "s/1000/llama"),
        ("s/step10/final", "s/step10/final"),
    ],
)
def test_items_and_files_take_the_progress_of_their_directory(path, owner):
    assert owner_of_item(PurePath(path)) == PurePath(owner)
    assert parse_path(PurePath(path)).is_known == ("step5" in owner or owner.endswith("00"))


def test_stages_are_ranked():
    assert stage_words("model-stage2-ingredient3-hf") == "stage2 ingredient3" and stage_words("backstage3") == ""
    names = ["stage10", "stage2-anneal", "stage2", "phase_1"]
    assert sorted(names, key=stage_rank) == ["phase_1", "stage2", "stage2-anneal", "stage10"]
    assert stage_rank("anneal") == (None, True) and stage_rank("seed3") == (None, False)
