"""What a block may see, told by gradients, and that training and decoding lay a block out alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.decoding.generate import prefill
from dflash_jax.decoding.prompts import PromptBatch
from dflash_jax.decoding.speculative import draft_logits, write_context
from dflash_jax.models import weights
from dflash_jax.models.architecture import SLIDING
from dflash_jax.models.layers import rotary_table
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
    context = module.context(taps, jnp.arange(SEQ)[None])
    return module(jnp.take_along_axis(tokens, anchors, axis=1), anchors, context, table, jnp.float32)


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
        size = np.abs(np.asarray(gradient)[:, :, 0]).sum(axis=-1)  # [blocks, offsets, seq]
        for index, anchor in enumerate(ANCHORS[0]):
            assert (size[index, :, :anchor] > 0).all()
            assert (size[index, :, anchor:] == 0).all()


def test_no_gradient_across_blocks(pair):
    """An anchor's embedding reaches all rows of its own block and no other's; the mask's reaches every row."""
    _, drafter = pair
    rng = np.random.default_rng(1)
    taps = [jnp.asarray(rng.standard_normal((1, SEQ, 32), np.float32)) for _ in range(2)]
    # One private table row for every anchor, so that a gradient names its block; ids beyond take the last row.
    count = ANCHORS.shape[1]
    tokens = jnp.arange(count, dtype=jnp.int32)[None]
    table = jnp.asarray(rng.standard_normal((count + 1, 32), np.float32))
    assert drafter.arch.mask_token_id >= count

    def outputs(table):
        module = nnx.merge(drafter.graph, drafter.params)
        context = module.context(taps, jnp.arange(SEQ)[None])
        return module(tokens, jnp.asarray(ANCHORS), context, table, jnp.float32)[0]

    jacobian = jax.jit(jax.jacrev(lambda table: outputs(table) @ jnp.arange(32.0)))(table)
    jacobian = np.abs(np.asarray(jacobian)).sum(axis=-1)  # [blocks, offsets, table rows]
    for source in range(count):
        for sink in range(count):
            reached = jacobian[sink, :, source]
            assert (reached > 0).all() if source == sink else (reached == 0).all()
    assert (jacobian[:, :, count] > 0).all()


@pytest.mark.parametrize(("layers", "scan"), [(1, False), (2, False), (4, False), (1, True), (2, True), (5, True)])
def test_rows_that_are_alike_count_once(layers, scan):
    """Hidden states and gradients equal those of a pass that takes every row of every block through every layer."""
    arch = tiny_drafter(tiny_target(), block_size=BLOCK, num_layers=layers)
    drafter = make_drafter(arch)
    rng = np.random.default_rng(7)
    tokens, anchors = jnp.asarray(rng.integers(0, 64, (3, 5))), jnp.asarray(rng.integers(0, SEQ, (3, 5)))
    table, *taps = jnp.asarray(rng.standard_normal((3, 3, SEQ, 32), np.float32))
    table = jnp.concatenate(list(table))[:64]
    direction = jnp.asarray(rng.standard_normal((3, 5, BLOCK - 1, 32), np.float32))
    positions = jnp.broadcast_to(jnp.arange(SEQ), (3, SEQ))

    def of_some_rows(params):
        module = nnx.merge(drafter.graph, params)
        return module(tokens, anchors, module.context(taps, positions), table, jnp.float32, scan=scan)

    def of_all_rows(params):
        module = nnx.merge(drafter.graph, params)
        masks = jnp.full((3, 5, BLOCK - 1), arch.mask_token_id)
        x = table[jnp.concatenate([tokens[:, :, None], masks], axis=2)]
        rotary = rotary_table(arch.rope, arch.head_dim, anchors[:, :, None] + jnp.arange(BLOCK)[None, None])
        for layer, context in zip(module.layers, module.context(taps, positions), strict=True):
            layer.self_attn.block, layer.self_attn.first_offset = None, 0
            x = layer(x, rotary, context, anchors, "reference", False)
        return module.norm(x)[:, :, 1:]

    found, backward = jax.vjp(of_some_rows, drafter.params)
    expected, expected_backward = jax.vjp(of_all_rows, drafter.params)
    assert relative_error(np.asarray(found), np.asarray(expected)) < 1e-5
    found, expected = (weights.by_name(f(direction)[0]) for f in (backward, expected_backward))
    for name, value in expected.items():
        assert relative_error(found[name], value) < 1e-5, name


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
        return nnx.merge(drafter.graph, params).logits(hidden[0], module.projection())

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
