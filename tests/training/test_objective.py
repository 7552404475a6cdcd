"""The fused loss against plain softmax cross-entropy, forward and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.training import objective
from tests.helpers import tiny_drafter, tiny_target

VOCAB, ROWS = 40, 11


def plain(hidden, projection, labels, weights, multiplier, cap):
    logits = hidden @ projection.T * multiplier
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    ranks = jnp.argsort(jnp.argsort(-logits, axis=-1), axis=-1)
    return (weights * nll).sum(), jnp.take_along_axis(ranks, labels[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("budget", [2**26, VOCAB * 6, VOCAB * 2])
@pytest.mark.parametrize(("multiplier", "cap"), [(1.0, None), (0.4, None), (1.5, 3.0)])
def test_against_plain_formula(budget, multiplier, cap, monkeypatch):
    monkeypatch.setattr(objective, "LOGIT_BUDGET", budget)
    arch = tiny_drafter(tiny_target(), output_multiplier=multiplier, final_logit_softcapping=cap)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, ROWS, 16), np.float32))
    projection = jnp.asarray(rng.standard_normal((VOCAB, 16), np.float32))
    labels = jnp.asarray(rng.integers(0, VOCAB, (2, ROWS)), jnp.int32)
    weights = jnp.asarray(rng.random((2, ROWS), np.float32) * (rng.random((2, ROWS)) > 0.3).astype(np.float32))

    def fused(hidden):
        total, ranks = objective.projected_cross_entropy(hidden, projection, labels, weights, arch)
        return 2.0 * total, ranks  # a factor outside, as the backward pass must scale

    def reference(hidden):
        total, ranks = plain(hidden, projection, labels, weights, multiplier, cap)
        return 2.0 * total, ranks

    (value, ranks), gradient = jax.value_and_grad(fused, has_aux=True)(hidden)
    (expected, expected_ranks), expected_gradient = jax.value_and_grad(reference, has_aux=True)(hidden)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(fused(hidden)[0], expected, rtol=1e-5)  # without a gradient
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-5)
    np.testing.assert_array_equal(ranks, expected_ranks)
    assert len(np.unique(ranks)) > 5


def test_position_weights():
    """dflash.md 3.4: gamma 7, offsets 1..15."""
    expected = [1.0, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135]
    np.testing.assert_allclose(objective.position_weights(16, 7.0), expected, atol=6e-4)
