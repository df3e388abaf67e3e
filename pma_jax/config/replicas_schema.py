"""The section `replicas` of a configuration; see `schema.py`."""

import dataclasses
from typing import Annotated, Literal

from pma_jax.config.bounds import (
    DecayRate,
    NonNegativeFloat,
    Number,
    NumberOrNone,
    PositiveFloat,
    PositiveTokens,
    Range,
    TokenCount,
)


@dataclasses.dataclass(frozen=True)
class ReplicasConfig:
    """Workers that train apart from each other on shares of each batch, and average their parameters now and then.

    A key whose name begins with a method may only be set with that method.
    """

    # How workers average. `none`: there is one worker; `periodic`: the mean of their parameters; `diloco`: an outer
    # optimizer (arXiv 2311.08105), which with one worker is SNOO (2510.15830); `streaming`: DiLoCo of one fragment of
    # the model after the other (2501.18512); `sparta`: a few random parameters at every step; `noloco`: pairs of
    # workers (2506.10911).
    method: Literal["none", "periodic", "diloco", "streaming", "sparta", "noloco"] = "none"
    # K: number of workers; each step trains each on 1/K of the batch. 0: one per device along `mesh.replica`.
    count: NumberOrNone = 0
    # H: tokens, over all workers, between two averages of a parameter; for `sparta` with `sparta_diloco`, between the
    # steps of the outer optimizer.
    interval_tokens: PositiveTokens = 500_000
    # Whether the optimizer's moments are averaged with the parameters, or stay those of each worker.
    periodic_moments: bool = False
    diloco_rate: PositiveFloat = 0.7  # learning rate of the outer optimizer (SGD)
    diloco_momentum: DecayRate = 0.9  # momentum of the outer optimizer
    diloco_nesterov: bool = True  # whether that momentum is Nesterov's
    streaming_rate: PositiveFloat = 0.4  # learning rate of the outer optimizer (SGD with Nesterov's momentum)
    streaming_momentum: DecayRate = 0.9  # momentum of the outer optimizer
    streaming_fragments: Number = 3  # P: ranges of layers, each sent once per interval, at evenly spaced marks
    streaming_delay_tokens: TokenCount = 0  # V: tokens between sending a fragment and using what comes back
    # alpha: share of a worker's own parameters in what it continues from; the outer parameters have the rest.
    streaming_mixing: Annotated[float, Range(0, 1, excludes_high=True)] = 0.5
    # Type in which outer gradients are sent, with one float32 scale per leaf and device; they are added in float32.
    streaming_dtype: Literal["float32", "int8", "int4", "e3m0"] = "float32"
    streaming_error_feedback: bool = False  # add what rounding has left out to the next outer gradient of the fragment
    # p: share of the parameters that are averaged at each step.
    sparta_share: Annotated[float, Range(0, 1, excludes_low=True)] = 0.005
    sparta_diloco: bool = False  # also DiLoCo, with `diloco_rate`, `diloco_momentum` and `diloco_nesterov`
    noloco_rate: PositiveFloat = 0.7  # eta: weight of the pair's mean change in the momentum
    noloco_momentum: DecayRate = 0.5  # beta: decay of the momentum
    # gamma: weight of the distance to the pair's mean. In the authors' code it is eta: to follow it, change both.
    noloco_pull: NonNegativeFloat = 0.7
