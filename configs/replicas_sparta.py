"""The demo of `replicas_demo` with SPARTA: 0.5% of the parameters are averaged at each step, and DiLoCo.

Command:   pma train --config replicas_sparta --workdir runs/replicas_sparta
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("replicas_demo")
    c.replicas.method = "sparta"
    c.replicas.sparta_diloco = True
    return c
