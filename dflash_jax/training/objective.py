"""The loss: row by row through the target's frozen projection, without logits in memory beyond a chunk.

The projection has no gradient, so the pass that makes a row's logits already knows the gradient of its hidden state:
(dloss/dlogits) @ W. It is kept instead of the logits; the backward pass only scales it by the row's weight. Rows that
weigh nothing are never projected.

The label is a token (cross-entropy) or the target's own distribution at the position before, whose logits are made
from the target's last hidden state in the same chunk. What happens inside a chunk stands in `chunk_losses.py`.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.architecture import DrafterArchitecture
from dflash_jax.models.drafter import scale_logits
from dflash_jax.models.vocabulary import ROWS, TABLE, VocabularyAxes
from dflash_jax.parallel import platform, spec_of
from dflash_jax.sections import Loss
from dflash_jax.training.chunk_losses import chunk_losses, slice_size

LOGIT_BUDGET = 2**26
"""Logits in memory at a time on an accelerator (256 MiB in float32)."""
CPU_LOGIT_BUDGET = 2**22
"""The same on a CPU."""

HIDDEN = ("batch", None, None)
"""Logical axes of hidden states."""


def position_weights(block_size: int, gamma: float) -> Float[Array, "offsets"]:
    """`exp(-(k-1)/gamma)` for offsets k = 1..block_size-1; arXiv 2602.06036 section 4."""
    return jnp.exp(-jnp.arange(block_size - 1, dtype=jnp.float32) / gamma)


def d_pace_weights(
    label_loss: Float[Array, "*batch offsets"], valid: Bool[Array, "*batch offsets"], alpha: float
) -> Float[Array, "*batch offsets"]:
    """What a better draft at an offset adds to the expected accepted length, by arXiv 2605.18810.

    With p_i the drafter's probability of the label at offset i, c_m = prod_{i <= m} (alpha + (1 - alpha) p_i) and
    w_j = sum_{m >= j} c_m; offsets without a label are left out of both. Constants for the gradient.
    """
    probability = jnp.exp(-jax.lax.stop_gradient(label_loss))
    smoothed = jnp.where(valid, alpha + (1.0 - alpha) * probability, 1.0)
    reached = jnp.cumprod(smoothed, axis=-1) * valid
    return jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1) * valid


def row_losses(
    hidden: Float[Array, "batch rows hidden"],
    projection: Float[Array, "vocab hidden"],
    labels: Int[Array, "batch rows"],
    needed: Bool[Array, "batch rows"],
    arch: DrafterArchitecture,
    loss: Loss = "cross_entropy",
    target_hidden: Float[Array, "batch seq hidden"] | None = None,
    target_rows: Int[Array, "batch rows"] | None = None,
) -> tuple[Float[Array, "batch rows"], Float[Array, "batch rows"], Int[Array, "batch rows"]]:
    """Each row's loss, its cross-entropy of the label, and how many tokens have a larger logit than the label.

    Only `hidden` receives a gradient, and only through the loss. Rows that are not `needed` give zeros.

    Args:
        target_hidden: the target's states behind its final norm, and `target_rows`: which of them is a row's label;
            for losses against the target's distribution.
    """
    distribution = loss != "cross_entropy"

    def of_shard(hidden: Array, projection: Array, labels: Array, needed: Array, *target: Array) -> tuple[Array, ...]:
        batch, rows = labels.shape
        if distribution:
            states, at = target
            seq = states.shape[1]
            target = states.reshape(-1, states.shape[-1]), (at + seq * jnp.arange(batch)[:, None]).reshape(-1)
        flat = hidden.reshape(batch * rows, -1)
        found = _losses(arch, loss, flat, projection, labels.reshape(-1), needed.reshape(-1), target)
        return tuple(x.reshape(batch, rows) for x in found)

    operands, specs = [hidden, projection, labels, needed], [HIDDEN, TABLE, ROWS, ROWS]
    if distribution:
        operands, specs = [*operands, target_hidden, target_rows], [*specs, HIDDEN, ROWS]
    if jax.sharding.get_abstract_mesh().empty:
        return of_shard(*operands)
    in_specs, out_specs = tuple(map(spec_of, specs)), (spec_of(ROWS),) * 3
    return jax.shard_map(of_shard, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(arch: DrafterArchitecture, loss: Loss, *operands: Any) -> tuple[Array, Array, Array]:
    return _visit_rows(arch, loss, False, *operands)[:3]


def _losses_forward(arch: DrafterArchitecture, loss: Loss, *operands: Any) -> tuple[tuple[Array, ...], Array]:
    *found, to_hidden = _visit_rows(arch, loss, True, *operands)
    return tuple(found), to_hidden


def _losses_backward(
    arch: DrafterArchitecture, loss: Loss, to_hidden: Array, cotangents: tuple[Array, Any, Any]
) -> tuple[Array | None, ...]:
    scaled = to_hidden.astype(jnp.float32) * cotangents[0][:, None]
    return scaled.astype(to_hidden.dtype), None, None, None, None


_losses.defvjp(_losses_forward, _losses_backward)


def _visit_rows(
    arch: DrafterArchitecture,
    loss: Loss,
    differentiate: bool,
    hidden: Float[Array, "rows hidden"],
    projection: Float[Array, "vocab hidden"],
    labels: Int[Array, "rows"],
    needed: Bool[Array, "rows"],
    target: tuple[Array, ...],
) -> tuple[Array, ...]:
    """Losses, label losses and ranks by row, and the gradient of each loss by its hidden state if asked.

    On a mesh this is one device's part: its rows, and its slice of the vocabulary. Devices that hold other slices
    *and* other rows (`fsdp`) look at each chunk of rows together.
    """
    axes, scale = VocabularyAxes.of_mesh(), partial(scale_logits, arch=arch)
    rows, width = hidden.shape
    budget = CPU_LOGIT_BUDGET if platform() == "cpu" else LOGIT_BUDGET
    chunks = math.ceil(rows * slice_size(loss, projection.shape[0]) * axes.sharers / budget)
    size = math.ceil(rows / chunks)
    # Needed rows first; the loop ends behind the last of them.
    order = jnp.argsort(~needed, stable=True)
    place = jnp.where(needed, jnp.cumsum(needed) - 1, needed.sum() + jnp.cumsum(~needed) - 1)
    order = jnp.pad(order, (0, chunks * size - rows), constant_values=rows)
    used = axes.most((needed.sum(dtype=jnp.int32) + size - 1) // size)

    def visit(chunk: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        at = jax.lax.dynamic_slice_in_dim(order, chunk * size, size)

        def take(x: Array) -> Array:
            return axes.gather(x.at[at].get(mode="fill", fill_value=0))

        states = [target[0].at[target[1].at[at].get(mode="fill", fill_value=0)].get(mode="clip")] if target else []
        states = [axes.gather(x) for x in states]
        new = chunk_losses(scale, loss, axes, differentiate, take(hidden), take(labels), projection, *states)
        new = (*map(axes.own, new[:3]), *map(axes.scatter, new[3:]))
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), chunk * size, axis=0)
            for old, x in zip(found, new, strict=True)
        )

    padded = chunks * size
    found = (jnp.zeros(padded), jnp.zeros(padded), jnp.zeros(padded, jnp.int32))
    if differentiate:
        found += (jnp.zeros((padded, width), hidden.dtype),)
    found = jax.lax.fori_loop(0, used, visit, found)
    # The last chunk had room for rows that nobody needs.
    kept = [needed.reshape(-1, *[1] * (x.ndim - 1)) for x in found]
    return tuple(jnp.where(mask, x.at[place].get(mode="clip"), 0) for mask, x in zip(kept, found, strict=True))
