"""Seconds of drafting and of verifying, round by round. Each waits for the other here, so the sum is no speed."""

import time
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from dflash_jax.decoding.prompts import PromptBatch
from dflash_jax.decoding.speculative import SpeculativeDecoder
from dflash_jax.models.weights import Params
from dflash_jax.parallel import on_mesh, sharding_of


def time_rounds(
    decode: SpeculativeDecoder,
    params: tuple[Params, Params],
    batches: Sequence[PromptBatch],
    mesh: Mesh,
    rounds: int | None = None,
) -> tuple[float, float]:
    """Seconds that all drafts, and all verifications with what follows from them, took; prefill left out.

    Args:
        params: of target and drafter.
        rounds: stop after so many of each batch.
    """
    begin = jax.jit(on_mesh(mesh, decode.begin))
    draft = jax.jit(on_mesh(mesh, decode.draft))
    verify = jax.jit(on_mesh(mesh, decode.verify), donate_argnums=1)
    key = jax.device_put(jax.random.key(0), sharding_of(mesh))
    seconds, warm = [0.0, 0.0], set()
    for batch in batches:
        if batch.tokens.shape not in warm:  # compiled outside the clock; the second round has the shardings of all
            state = begin(params, batch, key)
            for _ in range(2):
                state = verify(params, state, draft(params, state))
            warm.add(batch.tokens.shape)
        state = jax.block_until_ready(begin(params, batch, key))
        done = 0
        while not state.done.all() and done != rounds:
            start = time.perf_counter()
            proposed = jax.block_until_ready(draft(params, state))
            drafted = time.perf_counter()
            state = jax.block_until_ready(verify(params, state, proposed))
            seconds[0] += drafted - start
            seconds[1] += time.perf_counter() - drafted
            done += 1
    return seconds[0], seconds[1]
