"""Attention of the target over whole rows, as training runs it, behind one name. The target is frozen: forward only.

`cudnn` and `splash` are kept libraries' kernels. `blocked` is the drafter's tiled attention: a row cut into blocks that
see the keys before them and, causally, their own is a causal row.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.models.blocked_attention import CHUNK_KEYS, blocked_attention
from dflash_jax.models.causal_attention import causal_attention
from dflash_jax.parallel import platform, spec_of
from dflash_jax.sections import TargetAttention

SHORT = 1024
"""Rows of up to so many tokens are faster without tiles."""
LANES = 128
"""Splash takes rows in multiples of it."""
SPLASH_BLOCKS = (512, 256, 128)
"""Queries and keys of one of its tiles: the largest that divides a row."""


def self_attention(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    *,
    window: int | None = None,
    implementation: TargetAttention = "auto",
) -> Float[Array, "batch time heads head_dim"]:
    """Each row of a sequence sees itself and those before it; with a `window` W, only those less than W back.

    Only `reference` has a gradient everywhere.
    """
    if implementation == "auto":
        implementation = best_implementation(q.shape[1], q.shape[3], q.dtype)
    functions = {"reference": _reference, "blocked": _blocked, "cudnn": _cudnn, "splash": _splash}
    function = partial(functions[implementation], window=window)
    if jax.sharding.get_abstract_mesh().empty:
        return function(q, k, v)
    rows, keys = spec_of(("batch", None, "heads", None)), spec_of(("batch", None, "kv_heads", None))
    return jax.shard_map(function, in_specs=(rows, keys, keys), out_specs=rows, check_vma=False)(q, k, v)


def best_implementation(time: int, head_dim: int, dtype: jax.typing.DTypeLike) -> TargetAttention:
    """The backend's own kernel where it takes these operands; else blocked, or all scores where a row is short."""
    backend = platform()
    if backend == "gpu" and cudnn_takes(head_dim, dtype):
        return "cudnn"
    if backend == "tpu":
        return "splash"
    return "reference" if time <= SHORT else "blocked"


def cudnn_takes(head_dim: int, dtype: jax.typing.DTypeLike) -> bool:
    """Its flash attention is for half precision, heads of up to 128 in steps of 8, and NVIDIA's GPUs from Ampere on."""
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))  # AMD's are words
    capable = capability.replace(".", "").isdecimal() and float(capability) >= 8.0
    return capable and jnp.dtype(dtype).itemsize == 2 and head_dim <= 128 and head_dim % 8 == 0


def _reference(q: Array, k: Array, v: Array, window: int | None) -> Array:
    positions = jnp.broadcast_to(jnp.arange(q.shape[1])[None, :], q.shape[:2])
    return causal_attention(q, k, v, positions, window=window)


def _blocked(q: Array, k: Array, v: Array, window: int | None) -> Array:
    batch, time = q.shape[:2]
    blocks = math.ceil(time / CHUNK_KEYS)

    def cut(x: Array) -> Array:
        """`[batch, time, heads, d]` -> `[batch, blocks, block, heads, d]`; zeros fill up, behind what is seen."""
        x = jnp.pad(x, ((0, 0), (0, blocks * CHUNK_KEYS - time), (0, 0), (0, 0)))
        return x.reshape(batch, blocks, CHUNK_KEYS, *x.shape[2:])

    # A block is a tile and begins where a chunk of keys does: no chunk is read in part.
    starts = jnp.broadcast_to(CHUNK_KEYS * jnp.arange(blocks)[None, :], (batch, blocks))
    out = blocked_attention(cut(q), k, v, cut(k), cut(v), starts, window=window, causal=True, tile_rows=CHUNK_KEYS)
    return out.reshape(batch, blocks * CHUNK_KEYS, *q.shape[2:])[:, :time]


def _cudnn(q: Array, k: Array, v: Array, window: int | None) -> Array:
    left = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=left, implementation="cudnn")


def _splash(q: Array, k: Array, v: Array, window: int | None) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    time, heads = q.shape[1:3]
    padded = math.ceil(time / LANES) * LANES

    def laid_out(x: Array) -> Array:
        """`[batch, time, heads, d]` -> `[batch, heads, padded, d]`; zeros fill up, behind what is seen."""
        return jnp.pad(x, ((0, 0), (0, padded - time), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    shape = (padded, padded)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    size = next(size for size in SPLASH_BLOCKS if padded % size == 0)
    attend = kernel.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernel.BlockSizes(block_q=size, block_kv=size, block_kv_compute=size),
        interpret=platform() == "cpu",
    )
    # Mosaic refuses the precision of the ambient `on_mesh` for half-precision operands. Splash does not scale.
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        out = jax.vmap(attend)(laid_out(q * q.shape[3] ** -0.5), laid_out(k), laid_out(v))
    return out.transpose(0, 2, 1, 3)[:, :time].astype(q.dtype)
