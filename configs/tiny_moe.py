"""The smallest mixture of experts: the demo with 8 experts of half the width, 2 of them per token.

Command:   pma train --config tiny_moe --workdir runs/tiny_moe
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("demo")
    c.model.experts = 8
    c.model.experts_per_token = 2
    c.model.expert_hidden = 128
    c.model.router_scores = "sigmoid"
    return c
