"""Plain decoding of many prompts: a finished row gives its place to the next prompt.

The loop over tokens runs on the devices until a share of the rows has finished; then the host takes their answers and
lets new prompts in, a few at a time and always as many, so that there is one executable a prompt width. Answers come
out in the order of the prompts.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from dflash_jax.decoding.generate import PlainDecoding, PlainState
from dflash_jax.decoding.prompts import PROMPT_MULTIPLE, PromptBatch, batch_prompts
from dflash_jax.decoding.sampling import GREEDY, Sampling
from dflash_jax.models.target import FrozenTarget
from dflash_jax.models.weights import Params
from dflash_jax.parallel import batch_shards, on_mesh, sharding_of

REFILL_SHARE = 4
"""A quarter of the rows must have finished before prompts are let in: each time costs a pass over their tokens."""


def generate_refilling(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    mesh: Mesh,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """(prompt number, answer ids) in the order of the prompts, the stop token included where it was reached.

    Args:
        batch_size: rows that are decoded at a time; rounded up to what the mesh divides.
        numbers: the prompts' numbers in their file when only some of it is answered; draws depend on them.
    """
    numbers = list(range(len(prompts)) if numbers is None else numbers)
    shards = batch_shards(mesh)
    rows = -(-min(batch_size, len(prompts)) // shards) * shards
    let_in = -(-max(1, rows // REFILL_SHARE) // shards) * shards
    widest = -(-max(map(len, prompts)) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    decoding = PlainDecoding(target.graph, target.stop_ids, max_new_tokens, sampling)
    key = jax.device_put(jax.random.key(seed), sharding_of(mesh))
    capacity = widest + max_new_tokens
    admit_rows = jax.jit(on_mesh(mesh, partial(admit, decoding, capacity)), donate_argnums=1)
    run = jax.jit(on_mesh(mesh, partial(run_until, decoding)), donate_argnums=1)
    state = jax.jit(on_mesh(mesh, partial(empty_state, decoding, capacity, rows)))(target.params, key)
    batches = iter(batch_prompts(prompts, let_in, mesh, numbers))
    place_of: dict[int, int] = {}  # row -> index of its prompt
    answers: dict[int, list[int]] = {}
    taken = given = 0
    while given < len(prompts):
        free = [row for row in range(rows) if row not in place_of]
        while taken < len(prompts) and len(free) >= min(let_in, len(prompts) - taken):
            slots = np.full(let_in, rows, np.int32)  # beyond the last row: a filler is let in nowhere
            for at in range(min(let_in, len(prompts) - taken)):
                slots[at] = row = free.pop(0)
                place_of[row] = taken + at
            taken += min(let_in, len(prompts) - taken)
            state = admit_rows(target.params, state, next(batches), jax.device_put(slots, sharding_of(mesh)), key)
        open_places = rows - len(place_of)
        enough = min(rows, open_places + let_in) if taken < len(prompts) else rows
        state = run(target.params, state, jax.device_put(np.int32(enough), sharding_of(mesh)))
        done, counts, tokens = jax.device_get((state.done, state.answers.counts, state.answers.tokens))
        for row in [row for row in place_of if done[row]]:
            answers[place_of.pop(row)] = tokens[row, : counts[row]].tolist()
        while given in answers:
            yield numbers[given], answers.pop(given)
            given += 1


def empty_state(decoding: PlainDecoding, capacity: int, rows: int, params: Params, key: Array) -> PlainState:
    """Rows that are all done."""
    nothing = PromptBatch(jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32), jnp.full(rows, -1, jnp.int32))
    return decoding.begin(params, nothing, key, capacity)


def admit(
    decoding: PlainDecoding,
    capacity: int,
    params: Params,
    state: PlainState,
    batch: PromptBatch,
    slots: Int[Array, "new"],
    key: Array,
) -> PlainState:
    """Read new prompts and put them into rows; a slot behind the last row is none."""
    new = decoding.begin(params, batch, key, capacity)
    return jax.tree.map(lambda rows, fresh: rows.at[slots].set(fresh, mode="drop"), state, new)


def run_until(decoding: PlainDecoding, params: Params, state: PlainState, enough: Int[Array, ""]) -> PlainState:
    """Decode until so many rows are done."""
    return jax.lax.while_loop(lambda state: state.done.sum() < enough, partial(decoding.step, params), state)
