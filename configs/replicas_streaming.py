"""The demo of `replicas_demo` with Streaming DiLoCo: one layer after the other, sent in 4 bits.

Command:   pma train --config replicas_streaming --workdir runs/replicas_streaming
"""

import ml_collections

from pma_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.load("replicas_demo")
    c.replicas.method = "streaming"
    c.replicas.streaming_fragments = 3  # one layer each
    c.replicas.streaming_delay_tokens = 4_096  # two steps
    c.replicas.streaming_dtype = "e3m0"
    return c
