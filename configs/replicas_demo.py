"""The demo with four workers and DiLoCo: snapshots of the outer parameters and of each worker, and merged previews.

Command:   pma train --config replicas_demo --workdir runs/replicas   (three minutes on 2 cores), then pma report
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("demo")
    c.replicas.method = "diloco"
    c.replicas.count = 4
    c.replicas.interval_tokens = 81_920  # 40 steps: at most snapshots, every 50 steps, the workers are apart
    c.checkpoint.kinds = ("point", "replica")  # previews are of points, the outer parameters
    c.checkpoint.keep_states_at_tokens = ()
    c.evaluation.tokens = 16_384  # of each worker too, at each snapshot
    c.mesh.replica = 2  # two workers per core
    c.mesh.data = 1
    return c
