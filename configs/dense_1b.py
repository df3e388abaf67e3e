"""Dense, 1B parameters: interval and window by `recommend_interval_and_window`.

Shape, learning rate and batch size are not in the paper: see `pma_jax.model.ladder`.

Command:   pma train --config dense_1b --workdir DIR --config.data.source=files --config.data.files=GLOB
"""

import ml_collections

from pma_jax.model import ladder


def get_config() -> ml_collections.ConfigDict:
    return ladder.get_config("dense_1b")
