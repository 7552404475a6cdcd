"""Noise on the target's features: the drafter meets slightly other features when it is served.

The level is a schedule over optimizer steps, so that it is the same after a restart; the draws belong to row and epoch,
so that they are the same on any mesh and in any batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.sections import NoiseSection
from dflash_jax.training.anchors import row_keys

_STREAM = 2**31 - 1
"""Folded into the anchors' key where they fold the epoch, so that noise and anchors are independent."""


@dataclass(frozen=True)
class FeatureNoise:
    """Distribution and level schedule."""

    distribution: Literal["uniform", "gaussian"]
    level: Callable[[Int[Array, ""]], Float[Array, ""]]
    """Optimizer step -> level."""

    def add(
        self,
        taps: tuple[Float[Array, "batch seq hidden"], ...],
        level: Float[Array, ""],
        key: Array,
        epoch: Int[Array, ""],
        row_ids: Int[Array, "batch"],
    ) -> tuple[Float[Array, "batch seq hidden"], ...]:
        """`taps` plus noise of the given level, each value drawn anew for every epoch, row and tap."""
        keys = row_keys(jax.random.fold_in(key, _STREAM), epoch, row_ids)
        draw = jax.random.normal if self.distribution == "gaussian" else _symmetric_uniform

        def noisy(index: int, tap: Array) -> Array:
            drawn = jax.vmap(lambda row_key: draw(jax.random.fold_in(row_key, index), tap.shape[1:]))(keys)
            return (tap.astype(jnp.float32) + level * drawn).astype(tap.dtype)

        return tuple(noisy(index, tap) for index, tap in enumerate(taps))


def make_noise(section: NoiseSection, steps: int) -> FeatureNoise | None:
    """The noise of a run of `steps` optimizer steps; none when it is off."""
    if section.distribution == "off":
        return None
    ramp = round(section.ramp_ratio * steps)

    def level(step: Int[Array, ""]) -> Float[Array, ""]:
        done = jnp.clip(step.astype(jnp.float32) / max(ramp, 1), 0.0, 1.0) if ramp else jnp.float32(1.0)
        return section.initial_level + (section.level - section.initial_level) * done

    return FeatureNoise(section.distribution, level)


def _symmetric_uniform(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)
