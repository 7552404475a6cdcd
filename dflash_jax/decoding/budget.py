"""A tree's node budget from measured costs (CaDDTree, arXiv 2606.01813): more nodes as long as tokens a second rise."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dflash_jax.decoding.prompts import PromptBatch
from dflash_jax.decoding.speculative import DecodingState, SpeculativeDecoder, draft_logits
from dflash_jax.decoding.tree import Tree
from dflash_jax.models.weights import Params
from dflash_jax.parallel import on_mesh, sharding_of
from dflash_jax.telemetry.trees import draft_tree

CANDIDATES = (8, 16, 32, 64, 128, 256, 512)
ROUNDS = 8
"""Rounds of the first batch in which drafts are looked at."""
REPEATS = 3
"""Timings of each candidate; their median counts."""


@dataclass(frozen=True)
class Candidate:
    """A budget, what it brings and what it costs."""

    budget: int
    foretold: float
    """Accepted tokens a round by the drafter's probabilities."""
    seconds: float
    """A round: drafting and verifying."""

    @property
    def tokens_per_second(self) -> float:
        """Of one row."""
        return (1.0 + self.foretold) / self.seconds


def measure_budgets(
    decode: SpeculativeDecoder, params: tuple[Params, Params], batch: PromptBatch, mesh: Mesh, force_spine: bool
) -> list[Candidate]:
    """Candidates from small to large, up to the first that is slower than the one before.

    Args:
        decode: of any method; its rounds lead to the states in which drafts are looked at.
    """
    key = jax.device_put(jax.random.key(0), sharding_of(mesh))
    largest = decode_with(decode, CANDIDATES[-1], force_spine)
    state = jax.jit(on_mesh(mesh, largest.begin))(params, batch, key)
    advance = jax.jit(on_mesh(mesh, lambda params, state: decode.verify(params, state, decode.draft(params, state))))
    look = jax.jit(on_mesh(mesh, partial(_gains, largest)))
    gains = []
    for _ in range(ROUNDS):
        gains.append(np.asarray(look(params, state)))
        state = advance(params, state)
    foretold = np.mean(gains, axis=0)
    found: list[Candidate] = []
    for budget in CANDIDATES:
        candidate = decode_with(decode, budget, force_spine)
        seconds = _seconds_of_round(candidate, params, state, mesh)
        found.append(Candidate(budget, float(foretold[budget - 1]), seconds))
        if len(found) > 1 and found[-1].tokens_per_second < found[-2].tokens_per_second:
            break
    return found


def decode_with(decode: SpeculativeDecoder, budget: int, force_spine: bool) -> SpeculativeDecoder:
    """The same models with a tree of so many nodes."""
    method = replace(decode.method, name="tree", budget=budget, force_spine=force_spine)
    return replace(decode, drafting=Tree(budget, force_spine), method=method)


def _gains(decode: SpeculativeDecoder, params: tuple[Params, Params], state: DecodingState) -> Float[Array, "budgets"]:
    """Foretold acceptance by number of nodes, mean over rows."""
    models = decode.models(params)
    logits = draft_logits(models.drafter, models.target, state.anchor, state.position, state.draft_cache)
    budget = CANDIDATES[-1]
    best, _ = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), min(budget, logits.shape[-1]))
    scores = jax.vmap(partial(draft_tree, budget=budget))(best).scores[:, 1:]
    gains = jnp.cumsum(jnp.sort(jnp.exp(scores), axis=1, descending=True), axis=1)
    gains = jnp.pad(gains, ((0, 0), (0, budget - gains.shape[1])), mode="edge")
    return (gains * ~state.done[:, None]).sum(axis=0) / jnp.maximum((~state.done).sum(), 1)


def _seconds_of_round(
    decode: SpeculativeDecoder, params: tuple[Params, Params], state: DecodingState, mesh: Mesh
) -> float:
    draft, verify = (jax.jit(on_mesh(mesh, function)) for function in (decode.draft, decode.verify))

    def once() -> Any:
        return jax.block_until_ready(verify(params, state, draft(params, state)))

    once()
    return median(_timed(once) for _ in range(REPEATS))


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
