"""The formula against the compiler's own count, where nothing is looped, masked or done twice."""

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.models import weights
from dflash_jax.models.drafter import Drafter
from dflash_jax.parallel import mesh_of
from dflash_jax.training.flops import step_flops, target_flops
from dflash_jax.training.state import DraftSettings, Tables
from dflash_jax.training.step import block_loss
from tests.helpers import abstract_blocks, tiny_drafter, tiny_target


def test_against_the_compiler():
    """Anchors at the end of the context, so that every score counts; large matrices, so that the rest is little."""
    seq, count, block, vocab = 128, 16, 8, 512
    target = tiny_target(vocab_size=vocab, hidden_size=256, intermediate_size=512, head_dim=64)
    arch = tiny_drafter(target, block_size=block)
    graph, specs = weights.split(Drafter(arch))
    settings = DraftSettings(drafter=arch, gamma=4.0, compute_dtype="float32", attention="reference")

    def array(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    def loss(params, tables, taps, blocks, lengths):
        return block_loss(params, graph, tables, taps, blocks, lengths, settings)[0]

    blocks = abstract_blocks(count, block)
    table = array(vocab, 256)
    taps = (array(1, seq, 256),) * 2
    params = weights.abstract(specs, mesh_of((1, 1, 1)))
    lowered = jax.jit(jax.grad(loss)).lower(params, Tables(table, table), taps, blocks, array(1, dtype="int32"))
    counted = lowered.compile().cost_analysis()["flops"]
    formula = step_flops(arch, vocab, seq, count, count * seq, count * (block - 1))
    assert counted == pytest.approx(formula.total, rel=0.05)
    assert formula.total == formula.linear + formula.attention + formula.projection
    assert jnp.isclose(formula.recomputed, formula.linear / 3, rtol=0.5)


def test_a_target_sees_half_a_row_or_a_window():
    full, sliding = tiny_target(), tiny_target(windows=(None, 8, None, 200))
    inner, tokens, length = full.num_heads * full.head_dim, 64, 64
    saved = target_flops(full, 4, tokens, length) - target_flops(sliding, 4, tokens, length)
    assert saved == 2 * tokens * 2 * inner * (length // 2 - 8)
    assert target_flops(full, 2, tokens, length) * 2 == target_flops(full, 4, tokens, length)
