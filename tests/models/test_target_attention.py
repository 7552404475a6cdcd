"""The target's attention over whole rows: each implementation against a dense softmax in float64; sliding windows."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.models import blocked_attention, target_attention
from dflash_jax.models.target import Target
from dflash_jax.models.target_attention import best_implementation, self_attention
from dflash_jax.parallel import mesh_of, on_mesh, sharding_of
from tests.helpers import MESHES, make_target, tiny_target
from tests.models.test_causal_attention import dense

IMPLEMENTATIONS = ["reference", "blocked", "splash"]
"""Splash is interpreted here; cuDNN runs on its GPUs only."""


def draw(seed, batch, time, heads, kv_heads, head_dim):
    rng = np.random.default_rng(seed)
    shapes = [(batch, time, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def visible(time, window):
    back = np.arange(time)[:, None] - np.arange(time)[None]
    return (back >= 0) & (back < (window or time))


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(("time", "head_dim"), [(1, 16), (48, 16), (100, 64), (130, 128)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_against_float64(implementation, time, head_dim, window, monkeypatch):
    """Rows that fill no tile, and query heads that share a key head."""
    monkeypatch.setattr(target_attention, "CHUNK_KEYS", 32)
    q, k, v = draw(time, 2, time, 4, 2, head_dim)
    with jax.default_matmul_precision("highest"):
        out = jax.jit(partial(self_attention, window=window, implementation=implementation))(q, k, v)
    for row in range(2):
        np.testing.assert_allclose(out[row], dense(q[row], k[row], v[row], visible(time, window)), atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision(implementation, head_dim):
    """Of bfloat16 operands, against the plain formula of the same in float32."""
    operands = [x.astype(jnp.bfloat16) for x in draw(0, 1, 96, 4, 2, head_dim)]
    out = self_attention(*operands, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    expected = self_attention(*(x.astype(jnp.float32) for x in operands), implementation="reference")
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)


@pytest.mark.parametrize("mesh_shape", MESHES[1:], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mesh(implementation, mesh_shape):
    """Rows and heads on their devices; no collective is needed."""
    mesh, operands = mesh_of(mesh_shape), draw(1, 8, 40, 4, 2, 16)
    sharding = sharding_of(mesh, "batch", None, "heads", None)
    attend = jax.jit(on_mesh(mesh, partial(self_attention, implementation=implementation)))
    placed = [jax.device_put(x, sharding) for x in operands]
    compiled = attend.lower(*placed).compile()
    np.testing.assert_allclose(compiled(*placed), self_attention(*operands, implementation="reference"), atol=1e-5)
    text = compiled.as_text()
    assert not [word for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if word in text]


def test_only_visible_chunks_are_read(monkeypatch):
    """Blocked: a triangle of tiles; those on its diagonal are a tile's own block and not counted here."""
    visits = []
    chunk_scores = blocked_attention._scores

    def counted(q, k):
        jax.debug.callback(lambda: visits.append(1))
        return chunk_scores(q, k)

    monkeypatch.setattr(blocked_attention, "_scores", counted)
    monkeypatch.setattr(blocked_attention, "CHUNK_KEYS", 32)
    monkeypatch.setattr(target_attention, "CHUNK_KEYS", 32)
    for window, expected in ((None, 4 * 3 // 2), (32, 3)):
        visits.clear()
        jax.block_until_ready(self_attention(*draw(0, 1, 128, 2, 2, 8), window=window, implementation="blocked"))
        jax.effects_barrier()
        assert len(visits) == expected


@pytest.mark.parametrize(
    ("backend", "capability", "time", "dtype", "head_dim", "expected"),
    [
        ("cpu", None, 1024, "float32", 64, "reference"),
        ("cpu", None, 1025, "float32", 64, "blocked"),
        ("gpu", "9.0", 3072, "bfloat16", 128, "cudnn"),
        ("gpu", "7.5", 3072, "bfloat16", 128, "blocked"),
        ("gpu", "gfx90a", 3072, "bfloat16", 128, "blocked"),
        ("gpu", "9.0", 3072, "float32", 128, "blocked"),
        ("gpu", "9.0", 3072, "bfloat16", 256, "blocked"),
        ("tpu", None, 3072, "bfloat16", 128, "splash"),
    ],
)
def test_automatic_choice(backend, capability, time, dtype, head_dim, expected, monkeypatch):
    """A Turing card, as Colab lends it, has no flash attention in cuDNN."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    assert best_implementation(time, head_dim, jnp.dtype(dtype)) == expected


def test_windows_in_decoding():
    """A target whose layers slide says the same token by token, through its cache, as over the whole row."""
    target, _ = make_target(tiny_target(windows=(None, 3, 5, None)))
    model: Target = nnx.merge(target.graph, target.params)
    full: Target = nnx.merge(make_target(tiny_target())[0].graph, target.params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)))
    positions = jnp.broadcast_to(jnp.arange(12)[None], (2, 12))
    expected, _, _ = model(tokens, positions)
    cache = [(jnp.zeros((2, 16, 2, 8)), jnp.zeros((2, 16, 2, 8))) for _ in range(4)]
    for at in range(12):
        one, _, cache = model(tokens[:, at : at + 1], positions[:, at : at + 1], cache=cache)
        np.testing.assert_allclose(one[:, 0], expected[:, at], atol=1e-4)
    assert jnp.abs(full(tokens, positions)[0] - expected).max() > 1e-2


def test_windows_over_a_tree():
    """Each node sees, of its own path, what a row of that path would: by its depth, not by its place."""
    target, _ = make_target(tiny_target(windows=(2, 3, 2, 3)))
    model: Target = nnx.merge(target.graph, target.params)
    rng = np.random.default_rng(1)
    prompt, nodes = rng.integers(0, 64, (1, 6)), rng.integers(0, 64, 7)
    parents = [-1, 0, 0, 1, 2, 3, 4]
    paths = [[node] for node in range(7)]
    for node in range(1, 7):
        paths[node] = [*paths[parents[node]], node]
    depths = jnp.asarray([[len(path) - 1 for path in paths]])
    ancestors = jnp.asarray([[[other in paths[node] for other in range(7)] for node in range(7)]])
    cache = [(jnp.zeros((1, 16, 2, 8)), jnp.zeros((1, 16, 2, 8))) for _ in range(4)]
    _, _, cache = model(jnp.asarray(prompt), jnp.arange(6)[None], cache=cache)
    out, _, _ = model(jnp.asarray(nodes)[None], 6 + depths, cache=cache, ancestors=ancestors)
    for node, path in enumerate(paths):
        row = jnp.asarray([[*prompt[0], *nodes[path]]])
        expected, _, _ = model(row, jnp.arange(row.shape[1])[None])
        np.testing.assert_allclose(out[0, node], expected[0, -1], atol=1e-4)
