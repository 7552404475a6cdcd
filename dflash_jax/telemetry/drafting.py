"""What is known about drafts, as sums that are added over micro-batches and devices and divided once.

Everything follows from ranks: the rank of a label is the number of tokens that the drafter holds more likely, 0 for a
hit. Training, held-out data and decoding all go through `drafting_sums` and `drafting_metrics`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.parallel import Leaf

TOPS = (1, 4, 8, 16)
"""Accuracies: the label is among so many best tokens."""
STREAK_TOPS = (1, 4, 8)
"""Streaks: all labels up to some offset are among so many best tokens."""
TREE_BUDGETS = (16, 64, 256)
"""Node budgets of `ddtree_accept@`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftingSums:
    """Numerators and denominators of one optimizer step, by length bucket, on the device. Counts are int32."""

    loss: Leaf
    """`[buckets]` float32: weighted cross-entropies."""
    weight: Leaf
    """`[buckets]` float32: their weights; summed, the global denominator of loss and gradient."""
    hits_at: Leaf
    """`[buckets, TOPS, offsets]`: labels among the best tokens; offset 1..block-1."""
    labels_at: Leaf
    """`[buckets, offsets]`."""
    reached_at: Leaf
    """`[buckets, offsets]`: labels behind hits only."""
    kept_at: Leaf
    """`[buckets, offsets]`: of those, hits."""
    streaks: Leaf
    """`[buckets, STREAK_TOPS]`: leading labels among the best tokens, over blocks."""
    blocks: Leaf
    """`[buckets]`: blocks, padding excluded."""
    tree_accepted: Leaf
    """`[buckets, TREE_BUDGETS]`: leading labels inside the tree, over the blocks that were looked at."""
    tree_blocks: Leaf
    """`[buckets]`: those blocks."""
    tokens: Leaf
    """`[buckets]`: real tokens that the target read."""
    padded_tokens: Leaf
    """`[buckets]`: tokens of the padded shape, real ones included."""

    @classmethod
    def zeros(cls, block_size: int, buckets: int) -> "DraftingSums":
        def counts(*shape: int) -> Array:
            return jnp.zeros((buckets, *shape), jnp.int32)

        offsets = block_size - 1
        return cls(
            loss=jnp.zeros((buckets,)),
            weight=jnp.zeros((buckets,)),
            hits_at=counts(len(TOPS), offsets),
            labels_at=counts(offsets),
            reached_at=counts(offsets),
            kept_at=counts(offsets),
            streaks=counts(len(STREAK_TOPS)),
            blocks=counts(),
            tree_accepted=counts(len(TREE_BUDGETS)),
            tree_blocks=counts(),
            tokens=counts(),
            padded_tokens=counts(),
        )

    def plus(self, bucket: int, other: "DraftingSums") -> "DraftingSums":
        """With one micro-batch of that bucket added; `other` has no bucket axis."""
        return jax.tree.map(lambda mine, new: mine.at[bucket].add(new), self, other)

    def total(self) -> "DraftingSums":
        """Over all buckets, without that axis."""
        return jax.tree.map(lambda x: x.sum(axis=0), self)


def leading_run(hits: Bool[Array, "*batch offsets"]) -> Int[Array, "*batch"]:
    """Number of leading true entries."""
    return jnp.cumprod(hits.astype(jnp.int32), axis=-1).sum(axis=-1)


def drafting_sums(
    loss: Float[Array, ""],
    weight: Float[Array, ""],
    ranks: Int[Array, "batch blocks offsets"],
    valid: Bool[Array, "batch blocks offsets"],
    keep: Bool[Array, "batch blocks"],
    lengths: Int[Array, "batch"],
    seq: int,
) -> DraftingSums:
    """The sums of a micro-batch of `seq`-padded rows, without a bucket axis and without trees."""
    inside = [(ranks < top) & valid for top in TOPS]
    hit = inside[0]
    kept = jnp.cumprod(hit.astype(jnp.int32), axis=-1) > 0
    reached = jnp.concatenate([jnp.ones_like(kept[..., :1]), kept[..., :-1]], axis=-1) & valid

    # All counts of a row side by side, so that one sum over rows, one collective on a mesh, gives every total.
    of_rows = {
        "hits_at": jnp.stack([flags.sum(axis=1, dtype=jnp.int32) for flags in inside], axis=1),
        "labels_at": valid.sum(axis=1, dtype=jnp.int32),
        "reached_at": reached.sum(axis=1, dtype=jnp.int32),
        "kept_at": kept.sum(axis=1, dtype=jnp.int32),
        "streaks": jnp.stack([leading_run(inside[TOPS.index(top)]).sum(axis=1) for top in STREAK_TOPS], axis=1),
        "blocks": keep.sum(axis=1, dtype=jnp.int32),
        "tokens": lengths,
    }
    batch = lengths.shape[0]
    flat = [x.reshape(batch, -1).astype(jnp.int32) for x in of_rows.values()]
    totals = jnp.concatenate(flat, axis=1).sum(axis=0)
    parts = jnp.split(totals, np.cumsum([x.shape[1] for x in flat])[:-1])
    counts = {name: part.reshape(of_rows[name].shape[1:]) for name, part in zip(of_rows, parts, strict=True)}
    return DraftingSums(
        loss=loss,
        weight=weight,
        tree_accepted=jnp.zeros(len(TREE_BUDGETS), jnp.int32),
        tree_blocks=jnp.int32(0),
        padded_tokens=jnp.int32(batch * seq),
        **counts,
    )


def drafting_metrics(sums: DraftingSums) -> dict[str, Array]:
    """Divide once; sums with a bucket axis give values with one. Without labels the values are zeros, not NaN."""
    streaks = [ratio(sums.streaks[..., index], sums.blocks) for index in range(len(STREAK_TOPS))]
    accuracies = [ratio(sums.hits_at[..., index, :].sum(-1), sums.labels_at.sum(-1)) for index in range(len(TOPS))]
    return {
        "loss": ratio(sums.loss, sums.weight),
        "accuracy": accuracies[0],
        **{f"top{top}_accuracy": value for top, value in zip(TOPS[1:], accuracies[1:], strict=True)},
        "accuracy_at": ratio(sums.hits_at[..., 0, :], sums.labels_at),
        "conditional_accuracy_at": ratio(sums.kept_at, sums.reached_at),
        "streak": streaks[0],
        **{f"ddtree_streak{top}": value for top, value in zip(STREAK_TOPS[1:], streaks[1:], strict=True)},
        "acceptance_length": 1.0 + streaks[0],
        "tokens": sums.tokens,
        "padded_tokens": sums.padded_tokens,
        "anchors": sums.blocks,
    }


def tree_metrics(sums: DraftingSums) -> dict[str, Array]:
    """`ddtree_accept@n`: mean accepted depth of the exact tree with n nodes; NaN where no block was looked at."""
    accepted = [ratio(sums.tree_accepted[..., index], sums.tree_blocks) for index in range(len(TREE_BUDGETS))]
    return {
        f"ddtree_accept@{budget}": jnp.where(sums.tree_blocks > 0, value, jnp.nan)
        for budget, value in zip(TREE_BUDGETS, accepted, strict=True)
    }


def ratio(numerator: Array, denominator: Array) -> Float[Array, "..."]:
    """float32 quotient; 0 where nothing was counted."""
    denominator = denominator.astype(jnp.float32)
    return jnp.where(denominator > 0, numerator.astype(jnp.float32) / jnp.maximum(denominator, 1e-30), 0.0)
