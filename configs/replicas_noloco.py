"""The demo of `replicas_demo` with NoLoCo: random pairs of workers average.

Command:   pma train --config replicas_noloco --workdir runs/replicas_noloco
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("replicas_demo")
    c.replicas.method = "noloco"
    c.mesh.replica = 1  # it pairs workers of one device, or one worker per device
    c.mesh.data = -1
    return c
