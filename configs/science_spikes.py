"""The size of the experiment about loss spikes: 0.07M parameters, 1,024 steps at a rate that is far too high.

Command:   python experiments/spike_recovery/script.py --runs runs/science   (or: pma train --config science_spikes ...)
"""

import ml_collections

from pma_jax import config

STEP = 512  # tokens of a batch


def get_config() -> ml_collections.ConfigDict:
    c = config.load("demo")
    c.data.package = "stdlib-without-tests"
    c.model.width = 32
    c.model.layers = 4
    c.model.heads = 2
    c.model.kv_heads = 2
    c.model.head_dim = 16
    c.model.hidden = 96
    c.training.sequence_length_tokens = 64
    c.training.batch_size_sequences = 8
    c.training.total_tokens = 1024 * STEP
    c.schedule.peak_rate = 0.08
    c.schedule.warmup_tokens = 50 * STEP
    # Everything that stabilizes a run at such a rate is off, and b2 is that of the original Adam paper.
    c.optimizer.clip_norm = 0.0
    c.optimizer.weight_decay = 0.0
    c.optimizer.b2 = 0.999
    c.checkpoint.interval_tokens = 16 * STEP
    c.checkpoint.keep_states_at_tokens = ()
    c.mesh.cpu_devices = 0
    # A batch of 512 tokens is noisy (spread 0.2 nats): a collapse rises only a few spreads, but it lasts.
    c.spikes.window_tokens = 100 * STEP
    c.spikes.patience_tokens = 60 * STEP
    c.spikes.loss_z = 1.7
    c.spikes.minimum_rise_nats = 0.2
    c.spikes.confirm_steps = 20
    return c
