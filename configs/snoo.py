"""The demo with SNOO: Nesterov's momentum on the changes of a single worker, which is DiLoCo with one worker.

Command:   pma train --config snoo --workdir runs/snoo
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("replicas_demo")
    c.replicas.count = 1
    c.checkpoint.kinds = ("point",)  # the outer parameters
    c.mesh.replica = 1
    c.mesh.data = -1
    return c
