"""Both attentions against a dense softmax in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models import attention


def dense(q, k, v, visible):
    """`q [rows, heads, d]`, `k, v [keys, kv, d]`, `visible [rows, keys]`; float64 oracle with repeated kv heads."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
    scores = np.einsum("rhd,chd->hrc", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(visible[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hrc,chd->rhd", weights, v)


@pytest.mark.parametrize(("time", "chunk"), [(7, 512), (48, 16), (50, 16)])
def test_causal_attention(time, chunk, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_CHUNK", chunk)
    rng = np.random.default_rng(time)
    q = rng.standard_normal((2, time, 4, 8), np.float32)
    k, v = rng.standard_normal((2, 2, time + 5, 2, 8), np.float32)
    starts = np.array([0, 5])
    positions = starts[:, None] + np.arange(time)[None]
    out = attention.causal_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(positions))
    for row in range(2):
        visible = np.arange(time + 5)[None] <= positions[row][:, None]
        np.testing.assert_allclose(out[row], dense(q[row], k[row], v[row], visible), atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows_at_once", [512, 8])
def test_context_and_block_attention(window, causal, rows_at_once, monkeypatch):
    """Context strictly before the anchor, own block, nothing else; unsorted and equal anchors, anchor 0."""
    monkeypatch.setattr(attention, "BLOCK_ROWS", rows_at_once)
    rng = np.random.default_rng(3)
    anchors = np.array([[0, 5, 5, 19, 2, 11], [20, 1, 7, 0, 3, 13]])
    blocks, block, context = 6, 4, 20
    q = rng.standard_normal((2, blocks, block, 4, 8), np.float32)
    context_k, context_v = rng.standard_normal((2, 2, context, 2, 8), np.float32)
    block_k, block_v = rng.standard_normal((2, 2, blocks, block, 2, 8), np.float32)
    out = attention.context_and_block_attention(
        *map(jnp.asarray, (q, context_k, context_v, block_k, block_v, anchors)), window=window, causal=causal
    )
    for row in range(2):
        for b in range(blocks):
            anchor, offsets = anchors[row, b], np.arange(block)
            far = np.broadcast_to(np.arange(context)[None] < anchor, (block, context))
            near = np.ones((block, block), bool)
            distance = offsets[:, None] - offsets[None]
            if causal:
                near = near & (distance >= 0)
            if window is not None:
                far = far & (anchor + offsets[:, None] - np.arange(context)[None] < window)
                near = near & (np.abs(distance) < window)
            keys = np.concatenate([context_k[row], block_k[row, b]])
            values = np.concatenate([context_v[row], block_v[row, b]])
            expected = dense(q[row, b], keys, values, np.concatenate([far, near], axis=1))
            np.testing.assert_allclose(out[row, b], expected, atol=1e-5)
