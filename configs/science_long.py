"""The long size of the experiments: 0.06M parameters, 4.2M tokens at a constant rate, until AdamW is stationary.

AdamW's weights forget where they were 1 / (rate x weight decay) steps ago. Here a run has more than three times as many
steps, so that its second half is what a run of any length would come to.

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
    c.training.batch_size_sequences = 4
    c.schedule.peak_rate = 4e-3
    c.optimizer.weight_decay = 0.1
    c.checkpoint.interval_tokens = 65_536
    return c
