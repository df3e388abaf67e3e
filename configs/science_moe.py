"""The mixture of experts of the experiments: 0.53M parameters, 3.1M tokens at a constant rate.

Each token goes to 2 of 8 experts.

Command:   python experiments/stable_phase/script.py --runs runs/science   (or: pma train --config science_moe ...)
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("science_small")
    c.model.experts = 8
    c.model.experts_per_token = 2
    c.model.expert_hidden = 96
    c.model.router_scores = "sigmoid"
    # Batch, rate and weight decay are the best of those tried at this horizon: experiments/tuning.
    c.training.batch_size_sequences = 2
    c.schedule.peak_rate = 1.414e-3
    c.optimizer.weight_decay = 0.0
    return c
