"""The smallest dense size: the demo under another name.

Command:   pma train --config tiny --workdir runs/tiny
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    return config.load("demo")
