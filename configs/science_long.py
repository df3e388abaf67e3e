"""The long size of the experiments: 0.06M parameters, 4.2M tokens at a constant rate, until AdamW is stationary.

The time scale of AdamW's weights is 1 / (rate x weight decay) steps: older updates have decayed. A run of this size has
more than three times as many steps.

Command:   python experiments/tuning/script.py --runs runs/science   (or: pma train --config science_long ...)
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("science_small")
    c.model.width = 32
    c.model.heads = 2
    c.model.kv_heads = 2
    c.model.head_dim = 16
    c.model.hidden = 96
    c.training.total_tokens = 4_194_304
    # Batch, rate and weight decay are the best of those tried at which a run is that long: experiments/tuning.
    c.training.batch_size_sequences = 4
    c.schedule.peak_rate = 4e-3
    c.optimizer.weight_decay = 0.1
    c.checkpoint.interval_tokens = 65_536
    return c
