"""Mixture of experts, 1.3B activated of 13B parameters: the paper's interval and window.

Shape, learning rate and batch size are not in the paper: see `pma_jax.model.ladder`.

Command:   pma train --config moe_1b3_13b --workdir DIR --config.data.source=files --config.data.files=GLOB
"""

import ml_collections

from pma_jax.model import ladder


def get_config() -> ml_collections.ConfigDict:
    return ladder.get_config("moe_1b3_13b")
