"""How the target's next token is chosen: greedily, or drawn from its tempered and filtered law.

A draw depends on the seed, the prompt's number and the token's place in the answer, and on nothing else. So answers do
not depend on batches, and speculative decoding, which asks for the same draws, gives the very tokens of plain decoding.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from dflash_jax.errors import UserError

NEVER = -jnp.inf


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p, in the order of the common servers. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    """Only so many of the likeliest tokens (and those that tie with the last of them)."""
    top_p: float = 1.0
    """Only the likeliest tokens, as long as those before them have less than this mass."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature {self.temperature} is negative; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k {self.top_k} leaves no token; it must be at least 1")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p} must be above 0 and at most 1")
        if self.greedy and (self.top_k is not None or self.top_p < 1):
            raise UserError("top-k and top-p have no effect at temperature 0; give a temperature")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


def filtered(logits: Float[Array, "*batch vocab"], sampling: Sampling) -> Float[Array, "*batch vocab"]:
    """Logits of the law that is drawn from: its tokens' logits over the temperature, -inf for all others."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits >= least, logits, NEVER)
    if sampling.top_p < 1:
        descending = jnp.sort(logits, axis=-1, descending=True)
        mass = jax.nn.softmax(descending, axis=-1)
        kept = jnp.cumsum(mass, axis=-1) - mass < sampling.top_p
        least = jnp.where(kept, descending, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, NEVER)
    return logits


def row_keys(key: Key[Array, ""], numbers: Int[Array, "batch"]) -> Key[Array, "batch"]:
    """The key of each prompt."""
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)


def token_keys(keys: Key[Array, "batch"], places: Int[Array, "batch time"]) -> Key[Array, "batch time"]:
    """The key of each place in an answer."""
    return jax.vmap(lambda key, row: jax.vmap(lambda place: jax.random.fold_in(key, place))(row))(keys, places)


def choose(
    logits: Float[Array, "batch time vocab"],
    sampling: Sampling,
    keys: Key[Array, "batch"],
    places: Int[Array, "batch time"],
) -> Int[Array, "batch time"]:
    """The target's token for each place: the likeliest, or a draw.

    Args:
        keys: of the rows' prompts.
        places: index in the answer that each token would have.
    """
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draw = jax.vmap(jax.vmap(jax.random.categorical))
    return draw(token_keys(keys, places), filtered(logits, sampling)).astype(jnp.int32)
