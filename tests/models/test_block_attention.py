"""Every implementation of the drafter's attention against a dense softmax in float64: output and all gradients."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from dflash_jax.models import attention_kernels, block_attention, blocked_attention
from dflash_jax.models.block_attention import context_and_block_attention, reference_attention
from dflash_jax.parallel import MESH_AXES, mesh_of, on_mesh, sharding_of
from tests.helpers import MESHES
from tests.models.test_causal_attention import dense

OPERANDS = ["q", "context_k", "context_v", "block_k", "block_v"]


def draw(seed, batch, context, blocks, block, heads, kv_heads, head_dim, anchors):
    """Random operands, and anchors: sorted, any, equal, or with padding blocks at 0 behind the others."""
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, blocks, block, heads, head_dim),
        *[(batch, context, kv_heads, head_dim)] * 2,
        *[(batch, blocks, block, kv_heads, head_dim)] * 2,
    ]
    operands = [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]
    drawn = rng.integers(0, context, (batch, blocks))
    drawn[:, 0] = 0
    if anchors == "sorted":
        drawn = np.sort(drawn, axis=1)
    elif anchors == "equal":
        drawn[:] = rng.integers(0, context)
    elif anchors == "padding":
        drawn = np.sort(drawn, axis=1)
        drawn[:, blocks // 2 :] = 0
    return operands, jnp.asarray(drawn, jnp.int32)


def with_gradients(attend, operands, direction):
    """Output, and the gradient of its product with `direction` by every operand."""
    out, pull = jax.vjp(attend, *operands)
    return (out, *pull(direction.astype(out.dtype)))


def assert_close(found, expected, tolerance):
    """Relative to the largest magnitude of each array."""
    for name, a, b in zip(["out", *OPERANDS], found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30), name


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "blocked", "kernel"])
def test_against_float64(window, causal, implementation, monkeypatch):
    """Context strictly before the anchor, own block, nothing else; unsorted and equal anchors, anchor 0."""
    for module in (blocked_attention, attention_kernels):
        monkeypatch.setattr(module, "TILE_ROWS", 8)
        monkeypatch.setattr(module, "CHUNK_KEYS", 6)
    rng = np.random.default_rng(3)
    anchors = np.array([[0, 5, 5, 19, 2, 11], [20, 1, 7, 0, 3, 13]])
    blocks, block, context = 6, 4, 20
    q = rng.standard_normal((2, blocks, block, 4, 8), np.float32)
    context_k, context_v = rng.standard_normal((2, 2, context, 2, 8), np.float32)
    block_k, block_v = rng.standard_normal((2, 2, blocks, block, 2, 8), np.float32)
    operands = map(jnp.asarray, (q, context_k, context_v, block_k, block_v, anchors))
    out = context_and_block_attention(*operands, window=window, causal=causal, implementation=implementation)
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


GRID = [
    # context, blocks, block, (heads, kv heads), anchors, window, causal
    (64, 1, 4, (4, 4), "any", None, False),
    (64, 7, 4, (4, 1), "any", None, True),
    (100, 5, 8, (4, 2), "equal", None, False),
    (128, 16, 16, (4, 2), "sorted", 24, False),
    (128, 16, 16, (2, 2), "any", 5, True),
    (200, 33, 4, (4, 2), "padding", None, False),
    (257, 12, 8, (6, 2), "any", 100, False),
    (512, 64, 4, (4, 2), "sorted", None, False),
    (512, 24, 16, (2, 1), "padding", 64, True),
    (1024, 64, 16, (2, 1), "sorted", None, False),
    (1024, 40, 16, (2, 2), "any", 300, False),
]


TILED = {
    "blocked": blocked_attention.blocked_attention,
    "kernel": attention_kernels.kernel_attention,
    "kernel, as on a TPU": attention_kernels.kernel_attention,
}


CASES = [
    *itertools.product(["blocked"], range(len(GRID)), ["float32", "bfloat16"]),
    *itertools.product(["kernel"], range(9), ["float32"]),
    *(pytest.param("kernel", case, "float32", marks=pytest.mark.long) for case in range(9, len(GRID))),
    *itertools.product(["kernel"], (1, 4, 6), ["bfloat16"]),
    *itertools.product(["kernel, as on a TPU"], (0, 2, 4, 5, 6), ["float32"]),
    ("kernel, as on a TPU", 6, "bfloat16"),
]


@pytest.mark.parametrize(("implementation", "case", "dtype"), CASES)
def test_every_gradient(implementation, case, dtype, monkeypatch):
    """Against the reference in float32, relative to the largest magnitude; kernels are interpreted."""
    context, blocks, block, (heads, kv_heads), anchors, window, causal = GRID[case]
    operands, drawn = draw(case, 2, context, blocks, block, heads, kv_heads, 16, anchors)
    direction = jnp.asarray(np.random.default_rng(case).standard_normal(operands[0].shape, np.float32))
    monkeypatch.setattr(attention_kernels, "programs_in_turn", lambda: implementation.endswith("TPU"))
    # What the operands are once rounded: the kernels must not add much to that.
    rounded = [x.astype(dtype) for x in operands]

    def tiled(*operands):
        return TILED[implementation](*operands, drawn, window=window, causal=causal, tile_rows=64, chunk_keys=48)

    def oracle(*operands):
        return reference_attention(*operands, drawn, window=window, causal=causal)

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda *x: with_gradients(oracle, x, direction))(*[x.astype("float32") for x in rounded])
        found = jax.jit(lambda *x: with_gradients(tiled, x, direction))(*rounded)
    assert all(x.dtype == dtype for x in found)
    assert_close(found, expected, 1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize(
    ("mesh_shape", "implementation"), [*((shape, "auto") for shape in MESHES[1:]), ((2, 2, 2), "kernel")], ids=str
)
def test_mesh(mesh_shape, implementation):
    """Rows and heads on their devices; no collective is needed."""
    mesh = mesh_of(mesh_shape)
    operands, drawn = draw(0, 8, 64, 40, 4, 4, 4, 8, "sorted")
    direction = jnp.ones_like(operands[0])
    axes = [("batch", *[None] * (x.ndim - 3), "heads", None) for x in operands]
    placed = [jax.device_put(x, sharding_of(mesh, *names)) for x, names in zip(operands, axes, strict=True)]
    anchors = jax.device_put(drawn, sharding_of(mesh, "batch", None))

    def attend(anchors, *operands):
        function = partial(context_and_block_attention, anchors=anchors, implementation=implementation)
        return with_gradients(function, operands, direction)

    compiled = jax.jit(on_mesh(mesh, attend)).lower(anchors, *placed).compile()
    expected = with_gradients(lambda *x: reference_attention(*x, drawn), operands, direction)
    assert_close(compiled(anchors, *placed), expected, 1e-5)
    text = compiled.as_text()
    assert not [word for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if word in text]


@pytest.mark.parametrize("window", [None, 40])
def test_only_visible_chunks_are_read(window, monkeypatch):
    """The scores computed follow the sum of the anchors' positions, not blocks x context; counted, three sizes."""
    visits = []
    chunk_scores = blocked_attention._scores

    def counted(q, k):
        jax.debug.callback(lambda: visits.append(q.shape[1] * k.shape[1]))
        return chunk_scores(q, k)

    monkeypatch.setattr(blocked_attention, "_scores", counted)
    for blocks, context in ((16, 512), (32, 512), (64, 1024)):
        block, tile, chunk = 4, 16, 32
        operands, anchors = draw(blocks, 1, context, blocks, block, 2, 2, 8, "sorted")

        def attend(*operands, anchors=anchors, tile=tile, chunk=chunk):
            return blocked_attention.blocked_attention(
                *operands, anchors, window=window, tile_rows=tile, chunk_keys=chunk
            )

        visits.clear()
        out, pull = jax.vjp(attend, *operands)
        jax.block_until_ready(out)
        jax.effects_barrier()
        forward = sum(visits)
        jax.block_until_ready(pull(out))
        jax.effects_barrier()
        assert sum(visits) == 2 * forward
        # Needed: each row's visible keys. Read beyond: up to a chunk at either end, and up to the tile's last anchor.
        positions = np.asarray(anchors)[0]
        visible = positions if window is None else np.minimum(positions, window)
        spread = np.diff(positions.reshape(-1, tile // block)[:, [0, -1]], axis=1).sum() * tile
        assert visible.sum() * block <= forward <= visible.sum() * block + spread + 2 * chunk * blocks * block
        if window is None:
            assert forward < 0.75 * blocks * block * context


def test_a_few_rows_need_no_tiles(monkeypatch):
    """Decoding drafts one block a row: the automatic choice is one small matrix of scores."""
    monkeypatch.setattr(block_attention, "blocked_attention", None)
    operands, anchors = draw(0, 2, 32, 1, 16, 4, 2, 8, "any")
    out = context_and_block_attention(*operands, anchors)
    np.testing.assert_array_equal(out, reference_attention(*operands, anchors))


@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize(("kind", "cores", "name"), [("NVIDIA H200", 132, "cuda"), ("TPU v5 lite", 1, "tpu")])
def test_kernels_are_lowered_for_hardware_that_is_not_here(kind, cores, name, window):
    """By Triton and by Mosaic, with their rules for shapes; what remains is their compilers' and the hardware's."""
    device = jax.sharding.AbstractDevice(kind, cores, "tpu" if name == "tpu" else "gpu")
    mesh = jax.sharding.AbstractMesh((1, 1, 1), MESH_AXES, (AxisType.Auto,) * 3, abstract_device=device)
    context, keys, rows = (1, 1024, 2, 128), (1, 64, 16, 2, 128), (1, 64, 16, 8, 128)
    operands = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (rows, context, context, keys, keys)]
    anchors = jax.ShapeDtypeStruct((1, 64), "int32")

    def both(anchors, *operands):
        function = partial(context_and_block_attention, anchors=anchors, window=window, implementation="kernel")
        out, pull = jax.vjp(function, *operands)
        return out, pull(out)

    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(both).trace(anchors, *operands).lower(lowering_platforms=(name,)).as_text()
    assert text.count({"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}[name]) == 3
