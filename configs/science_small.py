"""The smaller dense size of the experiments: 0.19M parameters, 3.1M tokens at a constant rate.

This file sets the text, the shape, the tuned settings and the horizon; `pma_jax.studies.study` sets the snapshot marks,
seeds and held-out text of the experiments.

Command:   python experiments/stable_phase/script.py --runs runs/science   (or: pma train --config science_small ...)
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("demo")
    c.data.package = "stdlib-without-tests"
    c.model.width = 64
    c.model.layers = 3
    c.model.heads = 2
    c.model.kv_heads = 2
    c.model.hidden = 192
    c.training.total_tokens = 3_145_728
    # Batch, rate and weight decay are the best of those tried at this horizon: experiments/tuning.
    c.training.batch_size_sequences = 4
    c.schedule.peak_rate = 1.414e-3
    c.optimizer.weight_decay = 0.0
    c.schedule.warmup_tokens = 98_304
    c.checkpoint.interval_tokens = 49_152
    c.checkpoint.keep_states_at_tokens = ()
    c.mesh.cpu_devices = 0  # JAX's default, one device, so that two concurrent runs can use one core each
    c.evaluation.batch_size_sequences = 32  # so that an evaluation during training, of 4096 tokens, is one batch
    return c
