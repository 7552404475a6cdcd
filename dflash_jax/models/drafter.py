"""The DFlash drafter (arXiv 2602.06036): a small pre-norm transformer over blocks of one anchor and masks.

The target's tapped features enter as extra keys and values of every layer. Embedding and output projection are the
target's own. Attribute names equal the published checkpoint's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import checkpoint_policies
from jaxtyping import Array, Float, Int

from dflash_jax.models.architecture import DrafterArchitecture
from dflash_jax.models.block_attention import context_and_block_attention
from dflash_jax.models.blocked_attention import SAVED
from dflash_jax.models.layers import GatedMLP, Linear, RMSNorm, matmul, rotary_table, rotate
from dflash_jax.models.target import Cache
from dflash_jax.models.vocabulary import embed
from dflash_jax.models.weights import Params, weight
from dflash_jax.parallel import constrain
from dflash_jax.sections import Attention, Remat

MLP_ROWS = 1024
"""Rows of a sequence whose MLP activations exist at a time where they are made anew in the backward pass."""


class Fusion(nnx.Module):
    """`fc`: linear map of the concatenated taps."""

    def __init__(self, arch: DrafterArchitecture):
        self.taps, width = len(arch.target_layer_ids), arch.target_hidden_size
        self.weight = weight((arch.hidden_size, self.taps * width), ("embed", "taps"))

    def __call__(
        self, taps: Sequence[Float[Array, "batch time target_hidden"]], split: bool = True
    ) -> Float[Array, "batch time hidden"]:
        """As a sum of one product a tap, which needs no concatenated copy, or (`split` false) as one product.

        Raises:
            ValueError: there are more or fewer taps than the weight was made for.
        """
        if len(taps) != self.taps:
            raise ValueError(f"the fusion layer takes {self.taps} taps, not {len(taps)}")
        if not split:
            return matmul(jnp.concatenate(list(taps), axis=-1), self.weight[...], jnp.float32).astype(taps[0].dtype)
        parts = jnp.split(self.weight[...], self.taps, axis=1)
        products = (matmul(tap, part, jnp.float32) for tap, part in zip(taps, parts, strict=True))
        return sum(products).astype(taps[0].dtype)  # rounded once, as the one product is


class DrafterAttention(nnx.Module):
    """Queries from the block; keys and values from the context and the block, by the same projections.

    The first layer reads what differs of its rows, as `lay_out` takes it; the last returns no row of offset 0.
    """

    def __init__(self, arch: DrafterArchitecture, layer: int):
        inner, kv_inner = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.q_proj = Linear(arch.hidden_size, inner, ("heads", "embed"))
        self.k_proj = Linear(arch.hidden_size, kv_inner, ("kv_heads", "embed"))
        self.v_proj = Linear(arch.hidden_size, kv_inner, ("kv_heads", "embed"))
        self.o_proj = Linear(inner, arch.hidden_size, ("embed", "heads"))
        self.q_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps)
        self.k_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps)
        self.head_dim = arch.head_dim
        self.window, self.causal = arch.window(layer), arch.causal(layer)
        self.block = arch.block_size if layer == 0 else None
        self.first_offset = 1 if layer == arch.num_layers - 1 else 0

    def keys_values(
        self, x: Float[Array, "*rows hidden"], rotary: tuple[Array, Array], block: int | None = None
    ) -> tuple[Float[Array, "*batch kv_heads head_dim"], Float[Array, "*batch kv_heads head_dim"]]:
        """Normed, rotated keys and plain values; of the fused context as well as of block rows.

        Args:
            block: lay the rows out in blocks of this size.
        """
        k, v = self.k_norm(self._heads(self.k_proj(x))), self._heads(self.v_proj(x))
        return rotate(lay_out(k, block), *rotary), lay_out(v, block)

    def __call__(
        self,
        x: Float[Array, "batch *rows hidden"],
        rotary: tuple[Array, Array],
        context: tuple[Array, Array],
        anchors: Int[Array, "batch blocks"],
        implementation: Attention,
    ) -> Float[Array, "batch blocks offsets hidden"]:
        q = rotate(lay_out(self.q_norm(self._heads(self.q_proj(x))), self.block), *rotary)
        k, v = self.keys_values(x, rotary, self.block)
        out = context_and_block_attention(
            q, *context, k, v, anchors, window=self.window, causal=self.causal, implementation=implementation
        )
        out = out[:, :, self.first_offset :]
        return self.o_proj(out.reshape(*out.shape[:3], -1))

    def _heads(self, x: Float[Array, "*rows inner"]) -> Float[Array, "*rows heads head_dim"]:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


class DrafterBlock(nnx.Module):
    """Pre-norm block; `input_layernorm` applies to block rows only, never to the context.

    Rows in and out are as those of its attention.
    """

    def __init__(self, arch: DrafterArchitecture, layer: int):
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = DrafterAttention(arch, layer)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = GatedMLP(arch.hidden_size, arch.intermediate_size)

    def __call__(
        self,
        x: Array,
        rotary: tuple[Array, Array],
        context: tuple[Array, Array],
        anchors: Array,
        implementation: Attention,
        in_parts: bool,
    ) -> Array:
        """`in_parts`: the MLP takes some rows after the other, so that few of its wide activations exist at a time."""
        attended = self.self_attn(self.input_layernorm(x), rotary, context, anchors, implementation)
        x = lay_out(x, self.self_attn.block)[:, :, self.self_attn.first_offset :] + attended
        mlp = self.mlp.gathered() if in_parts else self.mlp

        def feed(x: Array) -> Array:
            return x + mlp(self.post_attention_layernorm(x))

        x = by_blocks(jax.checkpoint(feed), x) if in_parts else feed(x)
        return constrain(x, "batch", None, None, None)


class Drafter(nnx.Module):
    """All trained weights of a DFlash drafter."""

    def __init__(self, arch: DrafterArchitecture):
        self.fc = Fusion(arch)
        self.hidden_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.layers = nnx.List([DrafterBlock(arch, layer) for layer in range(arch.num_layers)])
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.arch = arch

    def context(
        self,
        taps: Sequence[Float[Array, "batch time target_hidden"]],
        positions: Int[Array, "batch time"],
        split_fc: bool = True,
        limit: int | None = None,
    ) -> Cache:
        """Keys and values of every layer for target positions; the fused feature is the same for all layers.

        Args:
            limit: one above all positions, where that is known; see `rotary_table`.
        """
        fused = constrain(self.hidden_norm(self.fc(taps, split_fc)), "batch", None, None)
        rotary = rotary_table(self.arch.rope, self.arch.head_dim, positions, limit)
        return [layer.self_attn.keys_values(fused, rotary) for layer in self.layers]

    def __call__(
        self,
        tokens: Int[Array, "batch blocks"],
        anchors: Int[Array, "batch blocks"],
        context: Cache,
        embedding: Float[Array, "vocab hidden"],
        dtype: jax.typing.DTypeLike,
        *,
        attention: Attention = "auto",
        remat: Remat = "none",
        scan: bool = False,
    ) -> Float[Array, "batch blocks offsets hidden"]:
        """Final-normed hidden states of blocks `[token, MASK, .., MASK]`: of offsets 1 and on, which are predicted.

        Offset k of a block predicts the token at anchor + k.

        Args:
            tokens: the token at each anchor.
            anchors: absolute position of offset 0; the block sees the context strictly before it.
            context: from `context(...)`, or a cache filled with its rows; slot index is absolute position.
            embedding: the target's table.
            dtype: of the matmuls.
            remat: what the backward pass makes anew instead of keeping it.
            scan: compile one layer between the first and the last and loop over them, which must be alike, with their
                weights stacked on each call.
        """
        arch = self.arch
        mask = jnp.full((tokens.shape[0], 1), arch.mask_token_id, tokens.dtype)
        x = embed(embedding, jnp.concatenate([tokens, mask], axis=1)).astype(dtype) * arch.input_embedding_scale
        x = constrain(x, "batch", None, None)
        positions = anchors[:, :, None] + jnp.arange(arch.block_size)[None, None, :]
        rotary = rotary_table(arch.rope, arch.head_dim, positions, context[0][0].shape[1] + arch.block_size)

        def run(graph: nnx.GraphDef, x: Array, state: Params, keys_values: tuple[Array, Array]) -> Array:
            return nnx.merge(graph, state)(x, rotary, keys_values, anchors, attention, remat != "none")

        graphs, states = zip(*map(nnx.split, self.layers), strict=True)
        layers = [
            (rematerialised(partial(run, graph), remat), (nnx.to_pure_dict(state), keys_values))
            for graph, state, keys_values in zip(graphs, states, context, strict=True)
        ]

        def each(x: Array, layers: list[Any]) -> Array:
            for layer, operands in layers:
                x = layer(x, *operands)
            return x

        def loop(x: Array, layers: list[Any]) -> Array:
            if not layers:
                return x
            layer = layers[0][0]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(operands for _, operands in layers))
            return jax.lax.scan(lambda x, operands: (layer(x, *operands), None), x, stacked)[0]

        x = each(x, layers[:1])
        x = (loop if scan else each)(x, layers[1:-1])
        x = each(x, layers[1:][-1:])
        return self.norm(x)

    def logits(
        self, hidden: Float[Array, "*batch hidden"], projection: Float[Array, "vocab hidden"]
    ) -> Float[Array, "*batch vocab"]:
        """float32 draft logits through the target's projection."""
        return scale_logits(matmul(hidden, projection, jnp.float32), self.arch)


def lay_out(rows: Float[Array, "batch *rows"], block: int | None) -> Float[Array, "batch blocks block *rest"]:
    """Whole blocks from the rows `[batch, blocks + 1, ..]` that differ: one an anchor, and at the end that of the mask.

    Before the first attention all masks are the same row, so what is done to each row is done to so few. Without
    `block` the rows are whole already.
    """
    if block is None:
        return rows
    offsets = jnp.arange(block).reshape(1, 1, -1, *[1] * (rows.ndim - 2))
    return jnp.where(offsets == 0, rows[:, :-1, None], rows[:, -1:, None])


def by_blocks(
    function: Callable[[Array], Array], x: Float[Array, "batch blocks block hidden"]
) -> Float[Array, "batch blocks block hidden"]:
    """A function of rows, over about `MLP_ROWS` rows of each sequence at a time."""
    batch, blocks, *row = x.shape
    parts = math.ceil(blocks * row[0] / MLP_ROWS)
    part = math.ceil(blocks / parts)
    x = jnp.pad(x, ((0, 0), (0, parts * part - blocks), (0, 0), (0, 0)))
    x = jnp.moveaxis(x.reshape(batch, parts, part, *row), 1, 0)
    return jnp.moveaxis(jax.lax.map(function, x), 0, 1).reshape(batch, parts * part, *row)[:, :blocks]


def rematerialised(layer: Callable[..., Array], remat: Remat) -> Callable[..., Array]:
    """`layer`, keeping for its backward pass what the policy says."""
    if remat == "none":
        return layer
    names = (SAVED,) if remat == "layer" else ()
    return jax.checkpoint(layer, policy=checkpoint_policies.save_only_these_names(*names))


@dataclass(frozen=True)
class TrainedDrafter:
    """A drafter with its weights in place."""

    arch: DrafterArchitecture
    graph: nnx.GraphDef
    params: Params


def scale_logits(logits: Float[Array, "*batch"], arch: DrafterArchitecture) -> Float[Array, "*batch"]:
    """Multiplier, then `c * tanh(logits / c)` where the drafter has a soft cap."""
    if arch.output_multiplier != 1.0:
        logits = logits * arch.output_multiplier
    cap = arch.final_logit_softcapping
    return logits if cap is None else cap * jnp.tanh(logits / cap)
