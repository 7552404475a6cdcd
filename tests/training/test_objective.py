"""The fused loss against plain softmax cross-entropy, forward and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.parallel import mesh_of, on_mesh, sharding_of
from dflash_jax.training import chunk_losses, objective
from tests.helpers import MESHES, relative_error, tiny_drafter, tiny_target

VOCAB, ROWS = 40, 11


LOSSES = ["cross_entropy", "forward_kl", "reverse_kl", "total_variation", "lk"]


def plain(loss, hidden, projection, labels, states, multiplier, cap):
    """Each row's loss, the cross-entropy of its label, and the label's rank, from full logits."""
    logits = hidden @ projection.T * multiplier
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(states @ projection.T)
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    nll = -jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0]
    value = {
        "cross_entropy": nll,
        "forward_kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "total_variation": 0.5 * jnp.abs(p - q).sum(-1),
        "lk": -jnp.log(jnp.minimum(p, q).sum(-1)),
    }[loss]
    ranks = jnp.argsort(jnp.argsort(-logits, axis=-1), axis=-1)
    return value, nll, jnp.take_along_axis(ranks, labels[..., None], axis=-1)[..., 0]


def draw(seed, batch=2, seq=7, width=16):
    rng = np.random.default_rng(seed)
    return dict(
        hidden=jnp.asarray(rng.standard_normal((batch, ROWS, width), np.float32)),
        projection=jnp.asarray(rng.standard_normal((VOCAB, width), np.float32)),
        labels=jnp.asarray(rng.integers(0, VOCAB, (batch, ROWS)), jnp.int32),
        needed=jnp.asarray(rng.random((batch, ROWS)) > 0.3),
        target_hidden=jnp.asarray(rng.standard_normal((batch, seq, width), np.float32)),
        target_rows=jnp.asarray(rng.integers(0, seq, (batch, ROWS)), jnp.int32),
    )


def assert_equals_plain(found, drawn, loss, weights, multiplier=1.0, cap=None):
    """`found`: value and gradient of a weighted sum, with the losses by row, label losses and ranks beside it."""
    states = jnp.take_along_axis(drawn["target_hidden"], drawn["target_rows"][..., None], axis=1)

    def total(hidden):
        by_row = plain(loss, hidden, drawn["projection"], drawn["labels"], states, multiplier, cap)
        return (weights * by_row[0] * drawn["needed"]).sum(), by_row

    (value, by_row), gradient = jax.value_and_grad(total, has_aux=True)(drawn["hidden"])
    (found_value, found_rows), found_gradient = found
    np.testing.assert_allclose(found_value, value, rtol=1e-5)
    np.testing.assert_allclose(found_gradient, gradient, atol=2e-5)
    for found_values, values in zip(found_rows, by_row, strict=True):
        np.testing.assert_allclose(found_values, values * drawn["needed"], rtol=1e-4, atol=1e-5)
    assert len(np.unique(found_rows[2])) > 5


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("budget", "tokens"), [(2**26, VOCAB), (6 * VOCAB, 16), (2 * VOCAB, 7)], ids=["whole", "chunks", "small chunks"]
)
@pytest.mark.parametrize(("multiplier", "cap"), [(1.0, None), (0.4, None), (1.5, 3.0)])
def test_against_plain_formula(loss, budget, tokens, multiplier, cap, monkeypatch):
    """Rows and vocabulary in chunks that divide neither."""
    monkeypatch.setattr(objective, "CPU_LOGIT_BUDGET", budget)
    monkeypatch.setattr(chunk_losses, "CPU_SLICE", tokens)
    arch = tiny_drafter(tiny_target(), output_multiplier=multiplier, final_logit_softcapping=cap)
    drawn = draw(0)
    weights = jnp.asarray(np.random.default_rng(1).random((2, ROWS), np.float32))

    @jax.jit
    def total(hidden):
        by_row = objective.row_losses(**drawn | {"hidden": hidden}, arch=arch, loss=loss)
        return (weights * by_row[0]).sum(), by_row

    assert_equals_plain(
        jax.jit(jax.value_and_grad(total, has_aux=True))(drawn["hidden"]), drawn, loss, weights, multiplier, cap
    )
    np.testing.assert_allclose(total(drawn["hidden"])[1][0], total(drawn["hidden"])[1][0] * drawn["needed"])


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_in_half_precision(loss, monkeypatch):
    """As accelerators multiply, where target and drafter agree but for a constant that no loss can see."""
    monkeypatch.setattr(chunk_losses, "CPU_SLICE", 16)
    drawn = draw(4, batch=1, seq=ROWS)
    projection = drawn["projection"].at[:, 0].set(1.0)
    states = drawn["hidden"].at[..., 0].add(8.0) + 0.1 * drawn["target_hidden"]
    half = drawn | {
        "projection": projection,
        "needed": jnp.ones((1, ROWS), bool),
        "target_hidden": states,
        "target_rows": jnp.arange(ROWS)[None],
    }
    half = {name: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for name, x in half.items()}

    def gradient(drawn):
        def total(hidden):
            drafter = tiny_drafter(tiny_target())
            return objective.row_losses(**drawn | {"hidden": hidden}, arch=drafter, loss=loss)[0].sum()

        return jax.grad(total)(drawn["hidden"]).astype(jnp.float32)

    expected = gradient({name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in half.items()})
    assert relative_error(gradient(half), expected) < 2e-2


@pytest.mark.parametrize("mesh_shape", MESHES[1:], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_vocabulary_in_slices(loss, mesh_shape, monkeypatch):
    """Rows and vocabulary spread over the mesh, both of them over `fsdp`; chunks that not every device needs."""
    monkeypatch.setattr(objective, "CPU_LOGIT_BUDGET", 24)
    monkeypatch.setattr(chunk_losses, "CPU_SLICE", 3)
    mesh, arch, drawn = mesh_of(mesh_shape), tiny_drafter(tiny_target()), draw(2, batch=8)
    drawn["needed"] = drawn["needed"].at[:3, 2:].set(False)
    weights = jnp.asarray(np.random.default_rng(1).random((8, ROWS), np.float32))
    axes = {"projection": ("vocab", None)}
    placed = {
        name: jax.device_put(x, sharding_of(mesh, *axes.get(name, ("batch", *[None] * (x.ndim - 1)))))
        for name, x in drawn.items()
    }

    def total(hidden, rest):
        by_row = objective.row_losses(hidden, **rest, arch=arch, loss=loss)
        return (weights * by_row[0]).sum(), by_row

    hidden = placed.pop("hidden")
    found = jax.jit(on_mesh(mesh, jax.value_and_grad(total, has_aux=True)))(hidden, placed)
    assert_equals_plain(found, drawn, loss, weights)


def test_rows_that_are_not_needed_cost_no_chunk(monkeypatch):
    """The loop ends behind the last needed row, and never begins without one."""
    monkeypatch.setattr(objective, "CPU_LOGIT_BUDGET", VOCAB * 2)
    visited = []
    of_chunk = objective.chunk_losses

    def counted(*arguments):
        jax.debug.callback(lambda: visited.append(1))
        return of_chunk(*arguments)

    monkeypatch.setattr(objective, "chunk_losses", counted)
    drawn, arch = draw(3), tiny_drafter(tiny_target())
    for count in (0, 1, 2, 3, 2 * ROWS):
        visited.clear()
        needed = jnp.zeros(2 * ROWS, bool).at[np.random.default_rng(count).permutation(2 * ROWS)[:count]].set(True)
        losses, _, _ = objective.row_losses(**drawn | {"needed": needed.reshape(2, ROWS)}, arch=arch)
        jax.block_until_ready(losses)
        jax.effects_barrier()
        assert len(visited) == -(-count // 2)
        assert int((losses > 0).sum()) == count


def test_d_pace_weights():
    """By the definition, offset by offset; one without a label is left out of product and sum."""
    rng = np.random.default_rng(0)
    losses, valid = rng.random((5, 6)) * 4, rng.random((5, 6)) > 0.3
    expected = np.zeros((5, 6))
    for block in range(5):
        kept = np.flatnonzero(valid[block])
        reached = np.cumprod(0.5 + 0.5 * np.exp(-losses[block, kept]))
        for place, offset in enumerate(kept):
            expected[block, offset] = reached[place:].sum()
    weights = objective.d_pace_weights(jnp.asarray(losses), jnp.asarray(valid), 0.5)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    gradient = jax.grad(lambda x: objective.d_pace_weights(x, jnp.asarray(valid), 0.5).sum())(jnp.asarray(losses))
    assert not gradient.any()


def test_position_weights():
    """dflash.md 3.4: gamma 7, offsets 1..15."""
    expected = [1.0, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135]
    np.testing.assert_allclose(objective.position_weights(16, 7.0), expected, atol=6e-4)
