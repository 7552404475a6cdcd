"""What a block may see, told by gradients, and that training and decoding lay a block out alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.decoding.generate import prefill
from dflash_jax.decoding.prompts import PromptBatch
from dflash_jax.decoding.speculative import draft_logits, write_context
from dflash_jax.models.architecture import SLIDING
from dflash_jax.models.drafter import mask_blocks
from tests.helpers import make_drafter, make_target, relative_error, tiny_drafter, tiny_target

SEQ, BLOCK = 24, 4
ANCHORS = np.array([[0, 3, 4, 11, 17, 20]])


@pytest.fixture(scope="module")
def pair():
    target, _ = make_target(tiny_target())
    drafter = make_drafter(tiny_drafter(target.arch, block_size=BLOCK))
    return target, drafter


def packed_hidden(drafter, params, taps, tokens, table):
    module = nnx.merge(drafter.graph, params)
    anchors = jnp.asarray(ANCHORS)
    blocks = mask_blocks(jnp.take_along_axis(tokens, anchors, axis=1), BLOCK, drafter.arch.mask_token_id)
    context = module.context(taps, jnp.arange(SEQ)[None])
    return module(blocks, anchors, context, table, jnp.float32)


def test_no_gradient_from_the_anchor_on(pair):
    """Each block's output depends on every feature before its anchor, and on none at or after it."""
    target, drafter = pair
    rng = np.random.default_rng(0)
    taps = [jnp.asarray(rng.standard_normal((1, SEQ, 32), np.float32)) for _ in range(2)]
    tokens = jnp.asarray(rng.integers(0, 64, (1, SEQ)), jnp.int32)
    table = target.params["model"]["embed_tokens"]["weight"]
    probe = jnp.asarray(rng.standard_normal(32, np.float32))

    @jax.jit
    def jacobian(taps):
        return jax.jacrev(lambda taps: packed_hidden(drafter, drafter.params, taps, tokens, table)[0] @ probe)(taps)

    for gradient in jacobian(taps):
        size = np.abs(np.asarray(gradient)[:, :, 0]).sum(axis=-1)  # [blocks, block, seq]
        for index, anchor in enumerate(ANCHORS[0]):
            assert (size[index, :, :anchor] > 0).all()
            assert (size[index, :, anchor:] == 0).all()


def test_no_gradient_across_blocks(pair):
    """A block's input embeddings reach its own rows, all of them, and no other block's."""
    _, drafter = pair
    rng = np.random.default_rng(1)
    taps = [jnp.asarray(rng.standard_normal((1, SEQ, 32), np.float32)) for _ in range(2)]
    # One private table row for every block row, so that a gradient names its block.
    rows = ANCHORS.shape[1] * BLOCK
    blocks = jnp.arange(rows, dtype=jnp.int32).reshape(1, -1, BLOCK)
    table = jnp.asarray(rng.standard_normal((rows, 32), np.float32))

    def outputs(table):
        module = nnx.merge(drafter.graph, drafter.params)
        context = module.context(taps, jnp.arange(SEQ)[None])
        return module(blocks, jnp.asarray(ANCHORS), context, table, jnp.float32)[0]

    jacobian = jax.jit(jax.jacrev(lambda table: outputs(table) @ jnp.arange(32.0)))(table)
    jacobian = np.abs(np.asarray(jacobian)).sum(axis=-1)
    jacobian = jacobian.reshape(-1, BLOCK, ANCHORS.shape[1], BLOCK)
    for source in range(ANCHORS.shape[1]):
        for sink in range(ANCHORS.shape[1]):
            reached = jacobian[sink, :, source, :]
            assert (reached > 0).all() if source == sink else (reached == 0).all()


@pytest.mark.parametrize("window", [None, 6])
def test_training_layout_equals_decoding(window):
    """A block's logits in the packed pass equal the decoder's draft logits for the same anchor.

    The decoder's cache is filled as in decoding: a prefill of the prompt, then rounds of a whole block each, of which
    only some rows are accepted, so stale rows lie behind the valid ones.
    """
    target, _ = make_target(tiny_target())
    changes = {} if window is None else {"layer_types": (SLIDING, SLIDING), "sliding_window": window}
    drafter = make_drafter(tiny_drafter(target.arch, block_size=BLOCK, **changes))
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(0, 63, (1, SEQ)), jnp.int32)
    taps = drafter.arch.target_layer_ids

    @jax.jit
    def packed(target_params, params):
        module = nnx.merge(target.graph, target_params)
        _, tapped, _ = module(tokens, jnp.arange(SEQ)[None], taps=taps)
        hidden = packed_hidden(drafter, params, tapped, tokens, module.embedding())
        return nnx.merge(drafter.graph, params).logits(hidden[0, :, 1:], module.projection())

    expected = np.asarray(packed(target.params, drafter.params))

    module, draft = nnx.merge(target.graph, target.params), nnx.merge(drafter.graph, drafter.params)
    prompt, capacity = 3, SEQ + BLOCK
    batch = PromptBatch(tokens[:, :8] * (jnp.arange(8)[None] < prompt), jnp.array([prompt]), jnp.array([0]))
    _, cache, context = prefill(module, batch, capacity, taps, draft.context)
    start, seen = prompt, 0
    while start < SEQ:
        if start in ANCHORS[0]:
            logits = draft_logits(draft, module, tokens[:, start], jnp.array([start]), context)
            index = list(ANCHORS[0]).index(start)
            assert relative_error(np.asarray(logits)[0], expected[index]) < 1e-5
            seen += 1
        # The round verifies the true next token and wrong ones behind it; one token is accepted.
        positions = start + jnp.arange(BLOCK)[None]
        round_tokens = jnp.concatenate([tokens[:, start : start + 1], jnp.zeros((1, BLOCK - 1), jnp.int32)], axis=1)
        _, tapped, cache = module(round_tokens, positions, taps=taps, cache=cache)
        context = write_context(context, draft.context(tapped, positions), positions)
        start += 1
    assert seen == len(ANCHORS[0]) - 1  # all but anchor 0, which has no prompt before it


def test_fusion_as_a_sum_and_as_one_product(pair):
    """Equal values and gradients, elementwise; only the one product concatenates; a missing tap is an error."""
    _, drafter = pair
    rng = np.random.default_rng(5)
    taps = [jnp.asarray(rng.standard_normal((3, SEQ, 32), np.float32)) for _ in range(2)]
    seen = jnp.asarray(rng.standard_normal((3, SEQ, 32), np.float32))

    def fused(params, taps, split):
        return nnx.merge(drafter.graph, params).fc(taps, split)

    def scalar(params, taps, split):
        return (fused(params, taps, split) * seen).sum()

    for split in (True, False):
        concatenates = "concatenate" in str(jax.make_jaxpr(lambda taps: fused(drafter.params, taps, split))(taps))  # noqa: B023
        assert concatenates == (not split)
    one, parts = fused(drafter.params, taps, False), fused(drafter.params, taps, True)
    assert relative_error(np.asarray(parts), np.asarray(one)) < 1e-5
    gradients = [jax.grad(scalar, argnums=(0, 1))(drafter.params, taps, split) for split in (True, False)]
    for left, right in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert np.abs(left - right).max() <= 1e-5 * max(np.abs(right).max(), 1e-30)
    with pytest.raises(ValueError, match="takes 2 taps, not 1"):
        fused(drafter.params, taps[:1], True)
