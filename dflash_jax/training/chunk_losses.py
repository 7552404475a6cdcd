"""Losses of a chunk of rows through the frozen projection, and the gradient of each by its hidden state.

Cross-entropy and the KL divergences are means of logits under a softmax. They and their gradients are made in one pass
over slices of the vocabulary, under a running maximum, as attention is made over keys (arXiv 2205.14135). Total
variation and LK ask of each token which distribution gives it more, so they need both normalisers first: the chunk's
logits of the whole vocabulary.

On a mesh all of this is one device's part: some rows, and its own share of the vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models.causal_attention import MASKED
from dflash_jax.models.layers import contract, matmul
from dflash_jax.models.vocabulary import VocabularyAxes, softmax
from dflash_jax.parallel import Leaf, platform
from dflash_jax.sections import Loss

SLICE = 2**15
"""Tokens whose logits exist at a time on an accelerator."""
CPU_SLICE = 2**11
"""The same on a CPU: what its caches hold is read again at no cost."""

AT_ONCE = ("total_variation", "lk")
"""Losses that need the logits of the whole vocabulary."""

Scale = Callable[[Array], Array]
"""What a drafter does to its logits, one by one."""


def slice_size(loss: Loss, vocab: int) -> int:
    """Tokens whose logits exist at a time, of the `vocab` on this device."""
    if loss in AT_ONCE:
        return vocab
    return min(vocab, CPU_SLICE if platform() == "cpu" else SLICE)


def chunk_losses(
    scale: Scale,
    loss: Loss,
    axes: VocabularyAxes,
    differentiate: bool,
    hidden: Float[Array, "rows hidden"],
    labels: Int[Array, "rows"],
    projection: Float[Array, "vocab hidden"],
    target_hidden: Float[Array, "rows hidden"] | None = None,
) -> tuple[Array, ...]:
    """Loss, cross-entropy of the label and the label's rank by row; if asked, the gradients `[rows, hidden]` of the
    losses, which are still to be summed over the devices' shares of the vocabulary."""
    label = Label.of(scale, axes, hidden, labels, projection)
    rule = _at_once if loss in AT_ONCE else _in_slices
    return rule(scale, loss, axes, differentiate, hidden, label, projection, target_hidden)


@dataclass(frozen=True)
class Label:
    """The token of each row."""

    place: Int[Array, "rows"]
    """In this device's share of the vocabulary, or outside of it."""
    logit: Float[Array, "rows"]
    slope: Float[Array, "rows"]
    """Of the logit by what the projection gave."""
    projection: Float[Array, "rows hidden"]
    """Its row; zero where the token is in another share."""

    @classmethod
    def of(
        cls,
        scale: Scale,
        axes: VocabularyAxes,
        hidden: Float[Array, "rows hidden"],
        labels: Int[Array, "rows"],
        projection: Float[Array, "vocab hidden"],
    ) -> "Label":
        place = labels - axes.first_token(projection.shape[0])
        mine = (place >= 0) & (place < projection.shape[0])
        rows = projection.at[jnp.where(mine, place, 0)].get(mode="clip").astype(hidden.dtype).astype(jnp.float32)
        rows = jnp.where(mine[:, None], rows, 0.0)
        logit, to_raw = jax.vjp(scale, axes.sum((hidden.astype(jnp.float32) * rows).sum(axis=-1)))
        return cls(place, logit, to_raw(jnp.ones_like(logit))[0], rows)

    def logit_of(self, hidden: Float[Array, "rows hidden"], axes: VocabularyAxes) -> Float[Array, "rows"]:
        """The same token's logit by another hidden state, as the projection gives it."""
        return axes.sum((hidden.astype(jnp.float32) * self.projection).sum(axis=-1))

    def beaten_by(self, logits: Float[Array, "rows tokens"], places: Int[Array, "1 tokens"]) -> Int[Array, "rows"]:
        """How many of these other tokens have a larger logit.

        A count in the pass that reads the logits anyway; sorting them or an index reduction would read them once more.
        Written so that logits that are not numbers count as larger: a broken batch hits nothing.
        """
        larger = ~(logits <= self.logit[:, None]) & (places != self.place[:, None])
        return larger.sum(axis=-1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Running:
    """Sums of exp(logit - top) times something over the tokens seen so far."""

    top: Leaf
    """`[rows]`: the largest logit."""
    sums: Leaf
    """`[1 + quantities, rows]`: of the exponentials themselves, and times each quantity."""
    products: Leaf
    """`[factors, rows, hidden]`: times each factor and the token's row of the projection."""

    @classmethod
    def start(cls, rows: int, width: int, quantities: int, factors: int) -> "Running":
        return cls(jnp.full(rows, MASKED), jnp.zeros((1 + quantities, rows)), jnp.zeros((factors, rows, width)))

    def plus(
        self,
        logits: Float[Array, "rows tokens"],
        quantities: Sequence[Float[Array, "rows tokens"]],
        factors: Sequence[Float[Array, "rows tokens"]],
        projection: Float[Array, "tokens hidden"],
    ) -> "Running":
        """With a slice of the vocabulary more."""
        top = jnp.maximum(self.top, logits.max(axis=-1))
        exponentials, shrink = jnp.exp(logits - top[:, None]), jnp.exp(self.top - top)
        sums = [exponentials.sum(axis=-1), *((exponentials * x).sum(axis=-1) for x in quantities)]
        sums = self.sums * shrink[None] + jnp.stack(sums)
        if not factors:
            return Running(top, sums, self.products)
        dtype = projection.dtype
        products = [contract("rv,vd->rd", (exponentials * x).astype(dtype), projection) for x in factors]
        return Running(top, sums, self.products * shrink[None, :, None] + jnp.stack(products))

    def over_all(self, axes: VocabularyAxes) -> tuple[Array, list[Array], list[Array]]:
        """Log-sum-exp, the mean of each quantity, and of each product this share's part."""
        top = axes.max(self.top)
        shrink = jnp.exp(self.top - top)
        total, *sums = axes.sum(self.sums * shrink[None])
        products = self.products * (shrink / total)[None, :, None]
        return top + jnp.log(total), [x / total for x in sums], list(products)


def _in_slices(
    scale: Scale,
    loss: Loss,
    axes: VocabularyAxes,
    differentiate: bool,
    hidden: Float[Array, "rows hidden"],
    label: Label,
    projection: Float[Array, "vocab hidden"],
    target_hidden: Float[Array, "rows hidden"] | None,
) -> tuple[Array, ...]:
    """Cross-entropy and KL: q is the drafter's distribution with logits z, p the target's with logits t."""
    (rows, width), vocab = hidden.shape, projection.shape[0]
    size = slice_size(loss, vocab)
    reverse = loss == "reverse_kl"
    # Log ratios are taken relative to the label's: only differences count, and half precision keeps small numbers best.
    offset = label.logit - label.logit_of(target_hidden, axes) if reverse else None

    def visit(index: Array, seen: tuple[Running, Running | None, Array]) -> tuple[Running, Running | None, Array]:
        drafter, target, ranks = seen
        # The last slice begins sooner rather than reach beyond the end; what it sees again counts nothing.
        first = jnp.minimum(index * size, vocab - size)
        part = jax.lax.dynamic_slice_in_dim(projection, first, size).astype(hidden.dtype)
        places = first + jnp.arange(size)[None, :]
        new = places >= index * size
        z, to_raw = jax.vjp(scale, matmul(hidden, part, jnp.float32))
        slope = to_raw(jnp.ones_like(z))[0]
        drafter_z = jnp.where(new, z, MASKED)
        ranks += label.beaten_by(drafter_z, places)
        quantities, factors = [], [slope]
        if target is not None:
            t = matmul(target_hidden, part, jnp.float32)
            target_t = jnp.where(new, t, MASKED)
            if reverse:
                ratio = z - t - offset[:, None]
                quantities, factors = [ratio], [slope, ratio * slope]
                target = target.plus(target_t, [], [], part)
            else:
                target = target.plus(target_t, [t - z], [slope] if differentiate else [], part)
        return drafter.plus(drafter_z, quantities, factors if differentiate else [], part), target, ranks

    quantities, factors = (1, 2) if reverse else (0, 1)
    drafter = Running.start(rows, width, quantities, factors if differentiate else 0)
    target = None
    if loss == "forward_kl":
        target = Running.start(rows, width, 1, 1 if differentiate else 0)
    elif reverse:
        target = Running.start(rows, width, 0, 0)
    seen = (drafter, target, jnp.zeros(rows, jnp.int32))
    drafter, target, ranks = jax.lax.fori_loop(0, math.ceil(vocab / size), visit, seen)

    z_normaliser, means, products = drafter.over_all(axes)
    label_loss = z_normaliser - label.logit
    if target is None:
        value, gradient = label_loss, [q - label.slope[:, None] * label.projection for q in products]
    else:
        t_normaliser, target_means, target_products = target.over_all(axes)
        if reverse:
            # sum q ((z - log Z) - (t - log T)), and its gradient q (z - t - sum q (z - t)).
            value = means[0] + offset - z_normaliser + t_normaliser
            gradient = [products[1] - means[0][:, None] * products[0]] if products else []
        else:
            value = target_means[0] - t_normaliser + z_normaliser
            gradient = [q - p for q, p in zip(products, target_products, strict=True)]
    return value, label_loss, axes.sum(ranks), *gradient


def _at_once(
    scale: Scale,
    loss: Loss,
    axes: VocabularyAxes,
    differentiate: bool,
    hidden: Float[Array, "rows hidden"],
    label: Label,
    projection: Float[Array, "vocab hidden"],
    target_hidden: Float[Array, "rows hidden"],
) -> tuple[Array, ...]:
    """Total variation and `lk`, which is -log sum min(p, q): the log of the probability that a draw is accepted
    (arXiv 2602.23881). For a loss with dloss/dq = g the gradient by the logits is q (g - sum q g)."""
    z, to_raw = jax.vjp(scale, matmul(hidden, projection, jnp.float32))
    q, z_normaliser = softmax(z, axes)
    p, _ = softmax(matmul(target_hidden, projection, jnp.float32), axes)
    ranks = axes.sum(label.beaten_by(z, jnp.arange(z.shape[1])[None, :]))

    def total(x: Array) -> Array:
        return axes.sum(x.sum(axis=-1))

    if loss == "total_variation":
        value, by_q = 0.5 * total(jnp.abs(p - q)), 0.5 * jnp.sign(q - p)
    else:
        accepted = total(jnp.minimum(p, q))
        value, by_q = -jnp.log(accepted), -(q < p).astype(jnp.float32) / accepted[:, None]
    if not differentiate:
        return value, z_normaliser - label.logit, ranks
    (raw_gradient,) = to_raw(q * (by_q - total(q * by_q)[:, None]))
    to_hidden = contract("rv,vd->rd", raw_gradient.astype(hidden.dtype), projection.astype(hidden.dtype))
    return value, z_normaliser - label.logit, ranks, to_hidden
