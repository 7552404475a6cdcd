"""Which positions open a block, and what each block reads and predicts."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from dflash_jax.parallel import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch of rows. Offsets count from the anchor; offset 0 is given and never predicted."""

    anchors: Leaf
    """`[batch, blocks]` int32: position of offset 0, ascending; 0 for padding blocks."""
    keep: Leaf
    """`[batch, blocks]` bool: false for padding blocks, which rows with few eligible positions carry."""
    tokens: Leaf
    """`[batch, blocks]` int32: the token at each anchor; all else that a block reads are masks."""
    labels: Leaf
    """`[batch, blocks, offsets]` int32: tokens at offsets 1..block-1."""
    valid: Leaf
    """`[batch, blocks, offsets]` bool: whether the label exists, is supervised and belongs to a kept block."""


def eligible_anchors(
    loss_mask: Bool[Array, "batch seq"], lengths: Int[Array, "batch"], block_size: int
) -> Bool[Array, "batch seq"]:
    """Supervised positions with at least one supervised label in their block.

    A block may run past the end of its row, so the tail is trained; the rule drops only anchors without any label.
    """
    seq = loss_mask.shape[1]
    supervised = loss_mask & (jnp.arange(seq)[None, :] < lengths[:, None])
    padded = jnp.pad(supervised, ((0, 0), (0, block_size - 1)))
    follows = [padded[:, k : k + seq] for k in range(1, block_size)]
    return supervised & jnp.stack(follows).any(axis=0)


def draw_anchors(
    key: Key[Array, ""],
    epoch: Int[Array, ""],
    row_ids: Int[Array, "batch"],
    eligible: Bool[Array, "batch seq"],
    count: int,
) -> tuple[Int[Array, "batch blocks"], Bool[Array, "batch blocks"]]:
    """Draw up to `count` anchors a row without replacement, ascending, from the key of (epoch, row).

    A row gets the same anchors in an epoch on any mesh, in any batch, after any restart. Returns anchors and `keep`;
    rows with fewer eligible positions are filled up with anchor 0 and `keep` false.
    """
    seq = eligible.shape[1]
    count = min(count, seq)

    def draw(row_key: Array, row_eligible: Array) -> tuple[Array, Array]:
        # One number a position, drawn position by position: the draw does not depend on the padded length.
        scores = jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(row_key, position)))(jnp.arange(seq))
        _, chosen = jax.lax.top_k(jnp.where(row_eligible, scores, -1.0), count)
        keep = row_eligible[chosen]
        order = jnp.argsort(jnp.where(keep, chosen, seq))
        chosen, keep = chosen[order], keep[order]
        return jnp.where(keep, chosen, 0).astype(jnp.int32), keep

    return jax.vmap(draw)(row_keys(key, epoch, row_ids), eligible)


def row_keys(key: Key[Array, ""], epoch: Int[Array, ""], row_ids: Int[Array, "batch"]) -> Key[Array, "batch"]:
    """The key of each (epoch, row)."""
    epoch_key = jax.random.fold_in(key, epoch)
    return jax.vmap(lambda row_id: jax.random.fold_in(epoch_key, row_id))(row_ids)


def lay_out_blocks(
    tokens: Int[Array, "batch seq"],
    loss_mask: Bool[Array, "batch seq"],
    lengths: Int[Array, "batch"],
    anchors: Int[Array, "batch blocks"],
    keep: Bool[Array, "batch blocks"],
    block_size: int,
) -> Blocks:
    """Inputs and same-position labels of each block: the row at offset k predicts the token at anchor + k."""
    positions = anchors[:, :, None] + jnp.arange(1, block_size)[None, None, :]
    inside = positions < lengths[:, None, None]
    clipped = jnp.minimum(positions, tokens.shape[1] - 1)
    flat = clipped.reshape(clipped.shape[0], -1)
    labels = jnp.take_along_axis(tokens, flat, axis=1).reshape(clipped.shape)
    supervised = jnp.take_along_axis(loss_mask, flat, axis=1).reshape(clipped.shape)
    return Blocks(
        anchors=anchors,
        keep=keep,
        tokens=jnp.take_along_axis(tokens, anchors, axis=1),
        labels=labels,
        valid=supervised & inside & keep[:, :, None],
    )
