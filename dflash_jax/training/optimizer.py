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

    Its update takes the gradient as a sum, and three arguments more: `scale`, by which the sum becomes the mean;
    `factor`, by which the clipped mean is scaled, the monitor's adaptive clip; and `skip`, where true all state stays
    as it is. Each would cost a pass over weights or moments of its own outside.
    """
    return optax.chain(
        clip_mean_by_global_norm(section.clip_norm),
        scale_by_factor(),
        optax.chain(
            scale_by_adam(section.b1, section.b2, section.eps),
            optax.add_decayed_weights(
                section.weight_decay, mask=lambda params: jax.tree.map(lambda weight: weight.ndim > 1, params)
            ),
            kept_where_skipped(optax.scale_by_learning_rate(schedule)),
        ),
    )


def clip_mean_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` of a sum, so that its mean, `scale` times the sum, has at most this norm."""

    def update(
        updates: Params, state: optax.EmptyState, params: Params | None = None, *, scale: Array | float = 1.0, **_: Any
    ) -> tuple[Params, optax.EmptyState]:
        return optax.clip_by_global_norm(max_norm / scale).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def scale_by_factor() -> optax.GradientTransformationExtraArgs:
    """Scale by the product of the arguments `scale` and `factor` of the update."""

    def update(
        updates: Params,
        state: optax.EmptyState,
        params: Params | None = None,
        *,
        scale: Array | float = 1.0,
        factor: Array | float = 1.0,
        **_: Any,
    ) -> tuple[Params, optax.EmptyState]:
        return jax.tree.map(lambda gradient: gradient * (scale * factor), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` (arXiv 1412.6980, algorithm 1), whose moments and count stay where `skip`.

    The update is made from the moments that are kept: then each is read and written once, in place, where a choice
    between whole old and new states makes a copy of both.
    """
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(
        updates: Params,
        state: optax.ScaleByAdamState,
        params: Params | None = None,
        *,
        skip: Array | bool = False,
        **_: Any,
    ) -> tuple[Params, optax.ScaleByAdamState]:
        _, stepped = adam.update(updates, state, params)
        state = keep(skip, state, stepped)
        count = jnp.maximum(state.count, 1)  # a first step that is skipped has no moments yet
        mean = optax.tree.bias_correction(state.mu, b1, count)
        square = optax.tree.bias_correction(state.nu, b2, count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mean, square), state

    return optax.GradientTransformationExtraArgs(adam.init, update)


def kept_where_skipped(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner`, whose state stays where `skip`: for states of a few numbers."""

    def update(
        updates: Params, state: optax.OptState, params: Params | None = None, *, skip: Array | bool = False, **_: Any
    ) -> tuple[Params, optax.OptState]:
        updates, stepped = inner.update(updates, state, params)
        return updates, keep(skip, state, stepped)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def keep(skip: Array | bool, old: Any, new: Any) -> Any:
    """`old` where `skip`, leaf by leaf."""
    return jax.tree.map(lambda old, new: jnp.where(skip, old, new), old, new)


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
