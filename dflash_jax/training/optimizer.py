"""Schedule, clipping and AdamW, as one Optax chain."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from dflash_jax.models.weights import Params
from dflash_jax.sections import OptimizerSection


def make_schedule(section: OptimizerSection, steps: int) -> optax.Schedule:
    """Linear warm-up to the peak over the first `warmup_ratio` of the run, then a cosine to `final_ratio` of it.

    The first update already moves: warm-up step i of n runs at (i + 1) / n of the peak.
    """
    warmup = warmup_steps(section, steps)
    peak, floor = section.learning_rate, section.learning_rate * section.final_ratio

    def schedule(count: Int[Array, ""] | int) -> Float[Array, ""]:
        count = jnp.asarray(count, jnp.float32)
        rising = peak * (count + 1) / warmup
        progress = jnp.clip((count + 1 - warmup) / max(1, steps - warmup), 0.0, 1.0)
        falling = floor + (peak - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return jnp.where(count < warmup, rising, falling)

    return schedule


def warmup_steps(section: OptimizerSection, steps: int) -> int:
    """Optimizer steps until the learning rate has reached its peak."""
    return max(1, round(section.warmup_ratio * steps))


def make_optimizer(section: OptimizerSection, schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Clip by the global norm, then AdamW; weight decay, where set, leaves norm weights alone.

    Its update takes `factor`, by which the clipped gradient is scaled: the monitor's adaptive clip. It comes behind the
    fixed clip, so that both share one computation of the norm.
    """
    return optax.chain(
        optax.clip_by_global_norm(section.clip_norm),
        scale_by_factor(),
        optax.adamw(
            schedule,
            b1=section.b1,
            b2=section.b2,
            eps=section.eps,
            weight_decay=section.weight_decay,
            mask=lambda params: jax.tree.map(lambda weight: weight.ndim > 1, params),
        ),
    )


def scale_by_factor() -> optax.GradientTransformationExtraArgs:
    """Scale by the argument `factor` of the update."""

    def update(
        updates: Params, state: optax.EmptyState, params: Params | None = None, *, factor: Array | float = 1.0, **_: Any
    ) -> tuple[Params, optax.EmptyState]:
        return jax.tree.map(lambda gradient: gradient * factor, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def optimizer_shardings(
    optimizer: optax.GradientTransformation, params: Params, params_shardings: Params, replicated: NamedSharding
) -> optax.OptState:
    """Moments live where their weights live, counters everywhere.

    Without explicit shardings `optimizer.init` and the step would disagree and the step would compile twice.
    """
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree.map_params(
        optimizer, lambda _, sharding: sharding, state, params_shardings, transform_non_params=lambda _: replicated
    )
