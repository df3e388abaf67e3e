"""The section `optimizer` of a configuration; see `schema.py`."""

import dataclasses
from typing import Annotated, Literal

from pma_jax.config.bounds import MAX_FLOAT32, DecayRate, NonNegativeFloat, Range, TokenCount


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with weight decay on matrices only, and optional averaging of the parameters.

    At most one average may be chosen: schedule-free or GPA by `name`, an EMA, or BEMA. Snapshots and evaluation then
    use the averaged parameters. The keys of GPA and BEMA begin with their names, and may only be set with them.
    """

    # `adamw`: AdamW (arXiv 1711.05101); `schedule_free_adamw`: its schedule-free variant (arXiv 2405.15682), which
    # averages the iterates itself; `gpa_adamw`: generalized primal averaging (arXiv 2512.17131), which does so too,
    # with a constant half-life.
    name: Literal["adamw", "schedule_free_adamw", "gpa_adamw"] = "adamw"
    # Decay rate of AdamW's first moment. For schedule_free_adamw: interpolation between the iterate (0) and the average
    # (1) at which gradients are evaluated.
    b1: DecayRate = 0.9
    b2: DecayRate = 0.95  # decay rate of the second moment
    epsilon: Annotated[float, Range(0, 1)] = 1e-8  # constant that is added to the root of the second moment
    # Decoupled decay, multiplied by the learning rate; norm scales and biases do not decay.
    weight_decay: NonNegativeFloat = 0.1
    # Maximum global gradient norm; larger gradients are scaled down to it; 0: no clipping.
    clip_norm: NonNegativeFloat = 1.0
    # mu_y of gpa_adamw: interpolation between the iterate (0) and the average (1) at which gradients are evaluated.
    # With 0, the average does not affect training.
    gpa_interpolation: DecayRate = 0.7
    # Half-life of the average of gpa_adamw: mu_x = 0.5^(tokens per step / half-life) per step; 0: mu_x = 0.9^(1/32) =
    # 0.9967 as published, which is a half-life of 210 steps. mu_x = 0.9^(1/H), which replaces a DiLoCo interval of H
    # steps, is a half-life of 6.58 H steps.
    gpa_half_life_tokens: TokenCount = 0
    ema_half_life_tokens: TokenCount = 0  # half-life of an exponential moving average of parameters; 0: no average
    # phi: tokens between additions to a bias-corrected average of parameters (BEMA, arXiv 2508.00180); its authors add
    # every 400 steps; 0: no average.
    bema_interval_tokens: TokenCount = 0
    # tau: tokens trained at which BEMA begins, from the parameters theta_0 of that step; before, snapshots have the
    # parameters themselves. Choose it late if training starts from random parameters: BEMA goes past the average by
    # (lag + multiplier * step)^-bias_power of the way from theta_0, by default 0.39 of it at step 100, 0.30 at step 400
    # and 0.23 at step 1,536.
    bema_start_tokens: TokenCount = 0
    # kappa: an addition at a step has the coefficient (lag + multiplier * step)^-ema_power in BEMA's average.
    bema_ema_power: NonNegativeFloat = 0.5
    # eta: BEMA's correction is the way from theta_0 to the parameters times (lag + multiplier * step)^-bias_power.
    bema_bias_power: NonNegativeFloat = 0.2
    # gamma in both coefficients of BEMA, per step; steps count from the start of the run.
    bema_multiplier: NonNegativeFloat = 1.0
    bema_lag: Annotated[float, Range(1, MAX_FLOAT32)] = 10.0  # rho in both coefficients of BEMA

    @property
    def unused_keys(self) -> dict[str, object]:
        """The keys, with their values, of GPA and BEMA if these are not chosen."""
        prefixes = [] if self.name == "gpa_adamw" else ["gpa_"]
        prefixes += [] if self.bema_interval_tokens else ["bema_"]
        return {key: value for key, value in dataclasses.asdict(self).items() if key.startswith(tuple(prefixes))}
