"""The demo: a small decoder on the packaged corpus at a constant rate, with merged previews.

Command:   make demo   (or: pma train --config demo --workdir runs/demo)
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.defaults()
    c.data.package = "stdlib-without-tests"
    c.model.width = 96
    c.model.layers = 3
    c.model.heads = 3
    c.model.kv_heads = 3
    c.model.head_dim = 32
    c.model.hidden = 256
    c.model.scan_layers = False  # three blocks compile quickly, and steps on CPU take a quarter less time
    c.training.total_tokens = 5_120_000
    c.training.batch_size_sequences = 16
    c.schedule.peak_rate = 2e-3
    c.checkpoint.interval_tokens = 102_400
    c.checkpoint.kinds = ("point", "block_mean")  # previews are of points
    c.checkpoint.block_every_steps = 4
    c.checkpoint.state_interval_tokens = 1_024_000
    c.checkpoint.keep_states_at_tokens = (4_096_000,)  # where the annealed branches start
    c.preview.windows = (10,)
    c.preview.start_tokens = 819_200  # before this, the weights drift more than they fluctuate
    c.evaluation.tokens = 49_152
    c.mesh.cpu_devices = 2  # one device per core is faster than one device with two threads
    return c
