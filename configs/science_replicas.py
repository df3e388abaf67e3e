"""The size of the experiments about averaging between workers: 0.06M parameters, 1,280 steps of 8 sequences.

With 8 workers, each trains on one sequence per step. A run saves 40 snapshots, one every 32 steps, the interval of most
averages between workers.

Command:   python experiments/replicas/script.py --runs runs/science   (or: pma train --config science_replicas ...)
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("science_long")
    c.training.total_tokens = 1_310_720
    c.training.batch_size_sequences = 8
    c.schedule.warmup_tokens = 32_768
    c.checkpoint.interval_tokens = 32_768
    return c
