"""Noise on the features: its size, its schedule, and what a draw belongs to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from dflash_jax.sections import NoiseSection
from dflash_jax.training.noise import make_noise

KEY = jax.random.key(3)


def noise_of(distribution="gaussian", steps=100, **values):
    return make_noise(NoiseSection(distribution=distribution, **values), steps)


def add(noise, taps, level, row_ids, epoch=0):
    taps = tuple(jnp.asarray(tap, jnp.float32) for tap in taps)
    return noise.add(taps, jnp.float32(level), KEY, jnp.int32(epoch), jnp.asarray(row_ids, jnp.int32))


@pytest.mark.parametrize("distribution", ["uniform", "gaussian"])
def test_level_zero_changes_no_bit(distribution):
    taps = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32)
    for before, after in zip(taps, add(noise_of(distribution), taps, 0.0, [0, 1, 2]), strict=True):
        np.testing.assert_array_equal(before, after)


def test_the_two_distributions():
    zeros = np.zeros((1, 2, 64, 128), np.float32)
    (uniform,) = add(noise_of("uniform"), zeros, 0.3, [0, 1])
    assert 0.29 < np.abs(uniform).max() <= 0.3
    np.testing.assert_allclose(np.std(uniform), 0.3 / np.sqrt(3), rtol=0.03)
    (gaussian,) = add(noise_of("gaussian"), zeros, 0.3, [0, 1])
    np.testing.assert_allclose(np.std(gaussian), 0.3, rtol=0.03)
    assert abs(np.mean(gaussian)) < 0.01


def test_a_draw_belongs_to_epoch_row_tap_and_position():
    zeros = np.zeros((2, 2, 6, 8), np.float32)
    noise = noise_of()
    first = add(noise, zeros, 1.0, [4, 9])
    # Another batch, another padded length: the row keeps its noise.
    longer = add(noise, np.zeros((2, 3, 10, 8), np.float32), 1.0, [9, 1, 4])
    for tap in range(2):
        np.testing.assert_array_equal(first[tap][0], longer[tap][2, :6])
        np.testing.assert_array_equal(first[tap][1], longer[tap][0, :6])
    assert not np.allclose(first[0], first[1])
    assert not np.allclose(first[0][0], first[0][1])
    assert not np.allclose(first[0], add(noise, zeros, 1.0, [4, 9], epoch=1)[0])


def test_level_schedule():
    level = noise_of(initial_level=0.1, level=0.5, ramp_ratio=0.2).level
    np.testing.assert_allclose([level(jnp.int32(step)) for step in (0, 10, 20, 90)], [0.1, 0.3, 0.5, 0.5], rtol=1e-6)
    assert noise_of(level=0.5).level(jnp.int32(0)) == 0.5


def test_off():
    assert make_noise(NoiseSection(), 100) is None
    with pytest.raises(ValidationError, match="level is set but distribution is off"):
        NoiseSection(level=0.1)
