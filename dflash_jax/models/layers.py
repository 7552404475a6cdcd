"""What target and drafter share: linear, RMSNorm, rotary embedding, gated MLP.

Matrices are `[out, in]` and multiply from the right as `x @ W.T`. Norms, rotary tables and softmax are float32;
matmuls run in the dtype of their left operand.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.models.architecture import Rope
from dflash_jax.models.weights import ones, weight, zeros
from dflash_jax.parallel import constrain, platform


def matmul(
    x: Float[Array, "*batch inner"],
    matrix: Float[Array, "outer inner"],
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "*batch outer"]:
    """`x @ matrix.T` with a two-dimensional left operand (faster on CPU), in the dtype of `x`.

    `out_dtype` keeps the accumulator's precision, as float32 for logits.
    """
    flat = x.reshape(-1, x.shape[-1])
    contract = (((1,), (1,)), ((), ()))
    out = jax.lax.dot_general(flat, matrix.astype(x.dtype), contract, preferred_element_type=out_dtype)
    return out.reshape(*x.shape[:-1], matrix.shape[0])


def contract(subscripts: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """`einsum` accumulated in float32. CPUs, which cannot multiply every shape in bfloat16, convert first: the same."""
    if platform() == "cpu":
        operands = tuple(x.astype(jnp.float32) for x in operands)
    return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)


def along_last(vector: Float[Array, "size"], rank: int) -> Float[Array, "*ones size"]:
    """`[size]` -> `[1, .., 1, size]` of the given rank: broadcasting is spelled out, never promoted."""
    return vector.reshape((1,) * (rank - 1) + vector.shape)


class Linear(nnx.Module):
    """`weight [out, in]`, optionally `bias [out]`; `axes` are the logical axes of (out, in)."""

    def __init__(self, inputs: int, outputs: int, axes: tuple[str | None, str | None], bias: bool = False):
        self.weight = weight((outputs, inputs), axes)
        self.bias = weight((outputs,), axes[:1], zeros) if bias else None

    def __call__(self, x: Float[Array, "*batch inner"]) -> Float[Array, "*batch outer"]:
        y = matmul(x, self.weight[...])
        return y if self.bias is None else y + along_last(self.bias[...].astype(y.dtype), y.ndim)


class RMSNorm(nnx.Module):
    """`x * rsqrt(mean(x^2) + eps) * weight`, computed in float32, returned in the dtype of `x`."""

    def __init__(self, size: int, eps: float):
        self.weight = weight((size,), (None,), ones)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * along_last(self.weight[...].astype(jnp.float32), x.ndim)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, intermediate: int):
        self.gate_proj = Linear(hidden, intermediate, ("mlp", "embed"))
        self.up_proj = Linear(hidden, intermediate, ("mlp", "embed"))
        self.down_proj = Linear(intermediate, hidden, ("embed", "mlp"))

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))

    def gathered(self) -> Callable[[Array], Array]:
        """The same function with its weights gathered over `fsdp` once, for a loop that would do so in each pass."""
        gate, up = (constrain(linear.weight[...], "mlp", None) for linear in (self.gate_proj, self.up_proj))
        down = constrain(self.down_proj.weight[...], None, "mlp")
        return lambda x: matmul(jax.nn.silu(matmul(x, gate)) * matmul(x, up), down)


def rotary_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Inverse frequencies `[head_dim/2]` float32: `theta^(-2j/head_dim)`, with Llama 3.1's scaling when asked.

    The scaling is the one of Hugging Face's `llama3` rope type: wavelengths above the low-frequency bound are
    stretched by `factor`, those below the high-frequency bound kept, the ones between blended.
    """
    frequencies = (1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(np.float32)
    scaling = rope.llama3
    if scaling is None:
        return frequencies
    wavelength = 2.0 * np.pi / frequencies
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / span
    blended = (1.0 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = np.where(wavelength > low, frequencies / scaling.factor, frequencies)
    return np.where((wavelength <= low) & (wavelength >= high), blended, scaled).astype(np.float32)


def rotary_table(
    rope: Rope, head_dim: int, positions: Int[Array, "*batch"], limit: int | None = None
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """float32 cosines and sines at absolute `positions`.

    With a `limit` above all positions they are looked up in a constant. Otherwise compilers fuse them into what reads
    them, and make them anew for every head of every layer: on CPUs 4 to 7 % of a step.
    """
    frequencies = rotary_frequencies(rope, head_dim)
    if limit is not None:
        angles = np.arange(limit, dtype=np.float32)[:, None] * frequencies[None, :]
        return tuple(jnp.asarray(table).at[positions].get(mode="clip") for table in (np.cos(angles), np.sin(angles)))
    angles = positions.astype(jnp.float32)[..., None] * along_last(jnp.asarray(frequencies), positions.ndim + 1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "*batch heads head_dim"], cos: Float[Array, "*batch half"], sin: Float[Array, "*batch half"]
) -> Float[Array, "*batch heads head_dim"]:
    """Rotate the two halves of each head (NeoX convention), in float32."""
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    cos = cos[..., None, None, :]
    # The halves change places by a reversed axis, which fuses; CPUs copy a concatenation piece by piece.
    signs = jnp.array([-1.0, 1.0]).reshape(*[1] * (sin.ndim - 1), 2, 1)
    sin = (signs * sin[..., None, :])[..., None, :, :]
    return (halves * cos + jnp.flip(halves, axis=-2) * sin).reshape(x.shape).astype(x.dtype)
