"""What is known about drafts, as sums that are added over micro-batches and devices and divided once."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.parallel import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftingSums:
    """Numerators and denominators of one optimizer step, on the device.

    Counts are int32 scalars unless a shape is given.
    """

    loss: Leaf
    """float32: weighted cross-entropies."""
    weight: Leaf
    """float32: their weights, the global denominator of loss and gradient."""
    correct_at: Leaf
    """Labels that the drafter's argmax hits, `[offsets]`: offset 1..block-1."""
    labels_at: Leaf
    """Labels, `[offsets]`."""
    streak: Leaf
    """Leading hits, over blocks."""
    blocks: Leaf
    """Blocks, padding excluded."""
    tokens: Leaf
    """Real tokens that the target read."""
    padded_tokens: Leaf
    """Tokens of the padded shape, real ones included."""

    @classmethod
    def zeros(cls, block_size: int) -> "DraftingSums":
        by_offset = jnp.zeros((block_size - 1,), jnp.int32)
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.zeros(()), jnp.zeros(()), by_offset, by_offset, zero, zero, zero, zero)

    def __add__(self, other: "DraftingSums") -> "DraftingSums":
        return jax.tree.map(jnp.add, self, other)


def leading_run(hits: Bool[Array, "*batch offsets"]) -> Int[Array, "*batch"]:
    """Number of leading true entries."""
    return jnp.cumprod(hits.astype(jnp.int32), axis=-1).sum(axis=-1)


def leading_hits(correct: Bool[Array, "*batch offsets"], valid: Bool[Array, "*batch offsets"]) -> Int[Array, "*batch"]:
    """Number of leading offsets whose label exists and is hit: what a greedy chain would accept of the block."""
    return leading_run(correct & valid)


def drafting_sums(
    loss: Float[Array, ""],
    weight: Float[Array, ""],
    correct: Bool[Array, "batch blocks offsets"],
    valid: Bool[Array, "batch blocks offsets"],
    keep: Bool[Array, "batch blocks"],
    lengths: Int[Array, "batch"],
    seq: int,
) -> DraftingSums:
    """The sums of a micro-batch of `seq`-padded rows."""
    return DraftingSums(
        loss=loss,
        weight=weight,
        correct_at=(correct & valid).sum(axis=(0, 1), dtype=jnp.int32),
        labels_at=valid.sum(axis=(0, 1), dtype=jnp.int32),
        streak=leading_hits(correct, valid).sum(dtype=jnp.int32),
        blocks=keep.sum(dtype=jnp.int32),
        tokens=lengths.sum(dtype=jnp.int32),
        padded_tokens=jnp.int32(lengths.shape[0] * seq),
    )


def drafting_metrics(sums: DraftingSums) -> dict[str, Array]:
    """Divide once. A step without labels gives zeros, not NaN."""
    streak = ratio(sums.streak, sums.blocks)
    return {
        "loss": ratio(sums.loss, sums.weight),
        "accuracy": ratio(sums.correct_at.sum(), sums.labels_at.sum()),
        "accuracy_at": ratio(sums.correct_at, sums.labels_at),
        "streak": streak,
        "acceptance_length": 1.0 + streak,
        "tokens": sums.tokens,
        "padded_tokens": sums.padded_tokens,
        "anchors": sums.blocks,
    }


def ratio(numerator: Array, denominator: Array) -> Float[Array, "..."]:
    """float32 quotient; 0 where nothing was counted."""
    denominator = denominator.astype(jnp.float32)
    return jnp.where(denominator > 0, numerator.astype(jnp.float32) / jnp.maximum(denominator, 1e-30), 0.0)
