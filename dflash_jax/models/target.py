"""The frozen target: a Qwen3, Qwen2 or Llama decoder with tapped features and a KV cache.

Attribute names equal the Hugging Face tensor names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.architecture import TargetArchitecture
from dflash_jax.models.causal_attention import causal_attention
from dflash_jax.models.layers import GatedMLP, Linear, RMSNorm, matmul, rotary_table, rotate
from dflash_jax.models.target_attention import self_attention
from dflash_jax.models.vocabulary import embed
from dflash_jax.models.weights import Params, weight
from dflash_jax.parallel import constrain
from dflash_jax.sections import TargetAttention

Cache = list[tuple[Array, Array]]
"""Keys and values `[batch, capacity, kv_heads, head_dim]`, a pair a layer; slot index is absolute position."""


class Embedding(nnx.Module):
    """Rows `weight [vocab, hidden]`; also the output projection of a target with tied embeddings."""

    def __init__(self, vocab: int, hidden: int):
        self.weight = weight((vocab, hidden), ("vocab", None))


class Attention(nnx.Module):
    """Grouped-query causal attention."""

    def __init__(self, arch: TargetArchitecture, layer: int):
        inner, kv_inner = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.q_proj = Linear(arch.hidden_size, inner, ("heads", "embed"), arch.qkv_bias)
        self.k_proj = Linear(arch.hidden_size, kv_inner, ("kv_heads", "embed"), arch.qkv_bias)
        self.v_proj = Linear(arch.hidden_size, kv_inner, ("kv_heads", "embed"), arch.qkv_bias)
        self.o_proj = Linear(inner, arch.hidden_size, ("embed", "heads"), arch.output_bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps) if arch.qk_norm else None
        self.head_dim, self.window = arch.head_dim, arch.window(layer)

    def __call__(
        self,
        x: Float[Array, "batch time hidden"],
        positions: Int[Array, "batch time"],
        rotary: tuple[Array, Array],
        cache: tuple[Array, Array] | None,
        ancestors: Bool[Array, "batch time time"] | None,
        implementation: TargetAttention,
    ) -> tuple[Float[Array, "batch time hidden"], tuple[Array, Array]]:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (proj(x).reshape(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache is None:
            out = self_attention(q, k, v, window=self.window, implementation=implementation)
        else:
            k, v = (write_rows(slots, rows, positions) for slots, rows in zip(cache, (k, v), strict=True))
            out = causal_attention(q, k, v, positions, ancestors, self.window)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), (k, v)


class Block(nnx.Module):
    """Pre-norm decoder block."""

    def __init__(self, arch: TargetArchitecture, layer: int):
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = Attention(arch, layer)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = GatedMLP(arch.hidden_size, arch.intermediate_size)

    def __call__(
        self,
        x: Array,
        positions: Array,
        rotary: tuple[Array, Array],
        cache: tuple[Array, Array] | None,
        ancestors: Array | None,
        implementation: TargetAttention,
    ) -> tuple[Array, tuple[Array, Array]]:
        normed = self.input_layernorm(x)
        attended, cache = self.self_attn(normed, positions, rotary, cache, ancestors, implementation)
        x = x + attended
        x = x + self.mlp(self.post_attention_layernorm(x))
        return constrain(x, "batch", None, None), cache


class Decoder(nnx.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, arch: TargetArchitecture):
        self.embed_tokens = Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nnx.List([Block(arch, layer) for layer in range(arch.num_layers)])
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)


class Target(nnx.Module):
    """The whole target; `arch.tie_word_embeddings` decides whether it has its own `lm_head`."""

    def __init__(self, arch: TargetArchitecture):
        self.model = Decoder(arch)
        self.lm_head = None if arch.tie_word_embeddings else Embedding(arch.vocab_size, arch.hidden_size)
        self.arch = arch

    def embedding(self) -> Float[Array, "vocab hidden"]:
        """The input table, frozen and shared with the drafter."""
        return self.model.embed_tokens.weight[...]

    def projection(self) -> Float[Array, "vocab hidden"]:
        """The output table, frozen and shared with the drafter."""
        return self.embedding() if self.lm_head is None else self.lm_head.weight[...]

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        *,
        taps: Sequence[int] = (),
        cache: Cache | None = None,
        layers: int | None = None,
        ancestors: Bool[Array, "batch time time"] | None = None,
        attention: TargetAttention = "reference",
    ) -> tuple[Float[Array, "batch time hidden"], tuple[Float[Array, "batch time hidden"], ...], Cache]:
        """Run the blocks over `tokens` at absolute `positions`: from 0 on where there is no cache.

        Args:
            taps: 0-based blocks whose outputs are returned: after both residual adds, before the final norm.
            cache: keys and values of earlier positions; the new ones are written at `positions` first.
            layers: number of blocks to run; none: all.
            ancestors: with a cache, where the tokens are the nodes of a tree, root first, at the root's position plus
                their depth: which nodes each of them sees. Their keys and values are written one behind the other from
                the root on.
            attention: implementation where there is no cache; a kernel may have no gradient.

        Returns:
            The residual stream after the last block run (before the final norm), the taps, and the new cache
            (without one given: the keys and values of these tokens).
        """
        x = constrain(embed(self.embedding(), tokens), "batch", None, None)
        rotary = rotary_table(self.arch.rope, self.arch.head_dim, positions, tokens.shape[1] if cache is None else None)
        tapped, new_cache = {}, []
        for index, block in enumerate(self.model.layers[:layers]):
            slots = cache[index] if cache is not None else None
            x, slots = block(x, positions, rotary, slots, ancestors, attention)
            new_cache.append(slots)
            if index in taps:
                tapped[index] = x
        return x, tuple(tapped[index] for index in taps), new_cache

    def states(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        taps: Sequence[int],
        final: bool,
        attention: TargetAttention,
    ) -> tuple[Float[Array, "batch time hidden"], ...]:
        """What a drafter learns from: the taps, and with `final` the hidden states behind the final norm.

        Without them nothing above the last tapped block is run.
        """
        layers = None if final else taps[-1] + 1
        x, tapped, _ = self(tokens, positions, taps=taps, layers=layers, attention=attention)
        return (*tapped, self.model.norm(x)) if final else tapped

    def logits(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """float32 logits of a residual stream before the final norm."""
        return matmul(self.model.norm(x), self.projection(), jnp.float32)


@dataclass(frozen=True)
class FrozenTarget:
    """A target with its weights in place."""

    arch: TargetArchitecture
    graph: nnx.GraphDef
    params: Params
    stop_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""


def write_rows(
    slots: Float[Array, "batch capacity kv_heads head_dim"],
    rows: Float[Array, "batch time kv_heads head_dim"],
    positions: Int[Array, "batch time"],
) -> Float[Array, "batch capacity kv_heads head_dim"]:
    """Write the rows of keys or values one behind the other from their first position on."""

    def write(slot: Array, row: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(slot, row.astype(slot.dtype), start, axis=0)

    return jax.vmap(write)(slots, rows, positions[:, 0])
