"""The larger dense size of the experiments: 0.82M parameters, 2.1M tokens at a constant rate.

Command:   python experiments/stable_phase/script.py --runs runs/science   (or: pma train --config science_large ...)
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("science_small")
    c.model.width = 128
    c.model.layers = 4
    c.model.heads = 4
    c.model.kv_heads = 4
    c.model.hidden = 320
    c.training.total_tokens = 2_097_152
    # Batch, rate and weight decay are the best of those tried at this horizon: experiments/tuning.
    c.training.batch_size_sequences = 2
    c.schedule.peak_rate = 5e-4
    c.optimizer.weight_decay = 0.0
    c.checkpoint.interval_tokens = 32_768
    return c
