"""The target's attention against a dense softmax in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models import causal_attention as attention


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
