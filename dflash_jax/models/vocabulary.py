"""What reads the target's tables: on a mesh every device keeps to its slice of the vocabulary, none is gathered."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models.layers import matmul
from dflash_jax.parallel import BATCH_AXES, RULES, spec_of

TABLE, ROWS = ("vocab", None), ("batch", None)
"""Logical axes of the tables, and of values by row."""


def embed(table: Float[Array, "vocab hidden"], tokens: Int[Array, "batch *rest"]) -> Float[Array, "batch *rest hidden"]:
    """Rows of the table; ids are valid by construction."""
    if not VocabularyAxes.of_mesh().vocab:
        return table.at[tokens].get(mode="clip")

    def of_shard(table: Array, tokens: Array) -> Array:
        axes = VocabularyAxes.of_mesh()
        place = axes.gather(tokens) - axes.first_token(table.shape[0])
        mine = (place >= 0) & (place < table.shape[0])
        found = table.at[jnp.where(mine, place, 0)].get(mode="clip")
        return axes.scatter(jnp.where(mine[..., None], found, 0))

    batch = spec_of(("batch", *[None] * (tokens.ndim - 1)))
    out = spec_of(("batch", *[None] * tokens.ndim))
    return jax.shard_map(of_shard, in_specs=(spec_of(TABLE), batch), out_specs=out, check_vma=False)(table, tokens)


def softmax(
    logits: Float[Array, "rows vocab"], axes: "VocabularyAxes"
) -> tuple[Float[Array, "rows vocab"], Float[Array, "rows"]]:
    """Probabilities and each row's log-sum-exp; on a mesh, of a device's slice."""
    top = axes.max(jnp.max(logits, axis=-1))
    exponentials = jnp.exp(logits - top[:, None])
    total = axes.sum(exponentials.sum(axis=-1))
    return exponentials / total[:, None], jnp.log(total) + top


def top_log_probabilities(
    hidden: Float[Array, "batch rows hidden"],
    projection: Float[Array, "vocab hidden"],
    count: int,
    scale: Callable[[Array], Array] = lambda logits: logits,
) -> Float[Array, "batch rows count"]:
    """The largest log-probabilities of each row, descending; a slice's candidates are what devices exchange.

    Args:
        scale: what is done to the logits first.
    """

    def of_shard(hidden: Array, projection: Array) -> Array:
        axes = VocabularyAxes.of_mesh()
        rows = axes.gather(hidden.reshape(-1, hidden.shape[-1]))
        logits = scale(matmul(rows, projection, jnp.float32))
        _, normaliser = softmax(logits, axes)
        top, _ = jax.lax.top_k(logits, min(count, logits.shape[1]))
        if axes.vocab:
            top = jax.lax.all_gather(top, axes.vocab, axis=1, tiled=True)
            top, _ = jax.lax.top_k(top, min(count, top.shape[1]))
        return axes.own(top - normaliser[:, None]).reshape(*hidden.shape[:2], -1)

    if jax.sharding.get_abstract_mesh().empty:
        return of_shard(hidden, projection)
    rows = spec_of((*ROWS, None))
    return jax.shard_map(of_shard, in_specs=(rows, spec_of(TABLE)), out_specs=rows, check_vma=False)(hidden, projection)


@dataclass(frozen=True)
class VocabularyAxes:
    """The mesh axes that a row's logits are spread over, seen from inside a `shard_map`; outside a mesh, none."""

    vocab: tuple[str, ...] = ()
    """Axes that slice the vocabulary."""
    shared: tuple[str, ...] = ()
    """Those of them that slice the rows too: their devices gather each other's rows and hand gradients back."""
    sharers: int = 1

    @classmethod
    def of_mesh(cls) -> "VocabularyAxes":
        sizes = jax.sharding.get_abstract_mesh().shape
        vocab = tuple(axis for axis in RULES["vocab"] if sizes.get(axis, 1) > 1)
        shared = tuple(axis for axis in vocab if axis in BATCH_AXES)
        return cls(vocab, shared, math.prod(sizes[axis] for axis in shared))

    def sum(self, x: Array) -> Array:
        return jax.lax.psum(x, self.vocab) if self.vocab else x

    def max(self, x: Array) -> Array:
        return jax.lax.pmax(x, self.vocab) if self.vocab else x

    def first_token(self, slice_size: int) -> Array | int:
        return jax.lax.axis_index(self.vocab) * slice_size if self.vocab else 0

    def most(self, x: Array) -> Array:
        """Of those who work on chunks together."""
        return jax.lax.pmax(x, self.shared) if self.shared else x

    def gather(self, x: Array) -> Array:
        """The rows of all sharers, one behind the other."""
        return jax.lax.all_gather(x, self.shared, tiled=True) if self.shared else x

    def own(self, x: Array) -> Array:
        """One's own rows of what all sharers know."""
        if not self.shared:
            return x
        size = x.shape[0] // self.sharers
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.shared) * size, size)

    def scatter(self, x: Array) -> Array:
        """One's own rows of the sum over all slices of the vocabulary."""
        if self.shared:
            x = jax.lax.psum_scatter(x, self.shared, tiled=True)
        others = tuple(axis for axis in self.vocab if axis not in self.shared)
        return jax.lax.psum(x, others) if others else x
