"""The demo of `replicas_demo` with periodic averaging of the parameters.

Command:   pma train --config replicas_periodic --workdir runs/replicas_periodic
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("replicas_demo")
    c.replicas.method = "periodic"
    return c
