"""The optimizer against Optax's own AdamW behind its own clip, on fresh random gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax.sections import OptimizerSection
from dflash_jax.training.optimizer import make_optimizer, make_schedule

SECTION = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, clip_norm=2.0)
SCALE = 1 / 64


def params_of(rng):
    return {"matrix": rng.standard_normal((6, 5), np.float32), "norm": rng.standard_normal(5, np.float32)}


def plain(schedule):
    return optax.chain(
        optax.clip_by_global_norm(SECTION.clip_norm),
        optax.adamw(
            schedule,
            b1=SECTION.b1,
            b2=SECTION.b2,
            eps=SECTION.eps,
            weight_decay=SECTION.weight_decay,
            mask={"matrix": True, "norm": False},
        ),
    )


@pytest.mark.parametrize("skipped", [(), (0,), (3,), (0, 1, 5)], ids=str)
def test_against_adamw(skipped):
    """Sums with their scale make what means make; a skipped gradient, a bad one too, leaves no trace at all."""
    rng = np.random.default_rng(len(skipped))
    schedule = make_schedule(SECTION, 8)
    ours, theirs = make_optimizer(SECTION, schedule), plain(schedule)
    params = expected = params_of(rng)
    state, expected_state = ours.init(params), theirs.init(params)
    update = jax.jit(lambda sums, state, params, skip: ours.update(sums, state, params, scale=SCALE, skip=skip))
    for step in range(8):
        # Above the clip's norm and below it.
        size = 0.1 + step % 2
        mean = {name: size * x for name, x in params_of(rng).items()}
        sums = jax.tree.map(lambda x: x / SCALE, mean)
        if step in skipped:
            sums = jax.tree.map(lambda x: np.nan * x, sums)
            updates, after = update(sums, state, params, True)
            jax.tree.map(np.testing.assert_array_equal, after, state)
            assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
            continue
        updates, state = update(sums, state, params, False)
        params = optax.apply_updates(params, updates)
        updates, expected_state = theirs.update(mean, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), params, expected)


def test_the_factor_comes_behind_the_clip():
    rng = np.random.default_rng(5)
    optimizer = make_optimizer(SECTION, make_schedule(SECTION, 8))
    params, sums = params_of(rng), jax.tree.map(lambda x: 100 * x, params_of(rng))
    _, state = optimizer.update(sums, optimizer.init(params), params, scale=SCALE, factor=0.25)
    norm = optax.tree.norm(optax.tree.get(state, "mu")) / (1 - SECTION.b1)
    np.testing.assert_allclose(norm, 0.25 * SECTION.clip_norm, rtol=1e-5)
