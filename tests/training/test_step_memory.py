"""What the compiled step holds and moves, read from its HLO: no dense mask, no full logits, no gathered vocabulary."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dflash_jax.data.buckets import Bucket
from dflash_jax.models import blocked_attention, target_attention, weights
from dflash_jax.models import drafter as drafter_module
from dflash_jax.models.target import Target
from dflash_jax.parallel import compiler_options
from dflash_jax.sections import OptimizerSection
from dflash_jax.training import chunk_losses, objective
from dflash_jax.training.optimizer import make_optimizer
from dflash_jax.training.state import StepSettings, tables_of
from dflash_jax.training.step import abstract_features, abstract_state, make_step
from tests.helpers import colocated, make_drafter, relative_error, tiny_drafter, tiny_target

SEQ, VOCAB, ANCHORS, BLOCK = 512, 4096, 128, 4
CHUNK = 2**16
"""Logits at a time, and more than the scores at a time."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(blocked_attention, "TILE_ROWS", 64)
    monkeypatch.setattr(blocked_attention, "CHUNK_KEYS", 64)
    monkeypatch.setattr(objective, "CPU_LOGIT_BUDGET", CHUNK)
    monkeypatch.setattr(chunk_losses, "CPU_SLICE", 512)


def accumulate_of(mesh_shape=(1, 1, 1), rows=1, **changes):
    """The compiled function; by default one sequence on one device, without looks at trees."""
    target = tiny_target(vocab_size=VOCAB)
    settings = settings_of(target, **changes)
    step = make_step(settings, colocated(mesh_shape))
    _, specs = weights.split(Target(target))
    tables = tables_of(weights.abstract(specs, step.meshes.drafter))
    features = abstract_features(step, settings, Bucket(SEQ, rows))
    lowered = step.accumulate.lower(abstract_state(step, settings), tables, features)
    return lowered.compile(compiler_options(step.meshes.drafter))


def settings_of(target, **changes):
    schedule = optax.constant_schedule(1e-3)
    settings = StepSettings(
        drafter=tiny_drafter(target, block_size=BLOCK),
        target=target,
        optimizer=make_optimizer(OptimizerSection(), schedule),
        schedule=schedule,
        anchors=ANCHORS,
        gamma=4.0,
        compute_dtype=jnp.float32,
        edges=(SEQ,),
    )
    return replace(settings, **changes)


def shapes_of(text):
    """Every array shape in an HLO text."""
    found = re.findall(r"\b(?:pred|[suf]\d+|bf16)\[([\d,]+)\]", text)
    return {tuple(map(int, shape.split(","))) for shape in found}


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_no_dense_array(loss):
    """Neither rows x keys nor rows x vocabulary, of whatever type; the reference has the first."""
    sizes = [np.prod(shape) for shape in shapes_of(accumulate_of(loss=loss).as_text())]
    dense = ANCHORS * BLOCK * SEQ
    assert max(sizes) <= VOCAB * 32  # the tables
    assert VOCAB * 32 < dense < ANCHORS * (BLOCK - 1) * VOCAB
    whole = [np.prod(shape) for shape in shapes_of(accumulate_of(loss=loss, attention="reference").as_text())]
    assert max(whole) >= dense


@pytest.mark.parametrize("mesh_shape", [(2, 2, 2), (1, 8, 1)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"loss": "lk"}, {"tree_blocks": 8}], ids=["tokens", "distribution", "trees"])
def test_the_vocabulary_is_not_gathered(mesh_shape, changes):
    """Each device keeps to its slice of the tables and of the logits."""
    text = accumulate_of(mesh_shape, rows=8, **changes).as_text()
    results = re.findall(r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    assert results, "weights are sharded, so something is gathered"
    # Reshaped or flattened too, and as parts of a tuple.
    whole = [result for result in results if any(size % VOCAB == 0 for shape in shapes_of(result) for size in shape)]
    assert not whole, whole


def test_a_loop_over_layers_holds_one_layer():
    """And the first and the last: the number of products does not grow with the number of layers."""

    def products(layers, scan):
        arch = tiny_drafter(tiny_target(vocab_size=VOCAB), block_size=BLOCK, num_layers=layers)
        return len(re.findall(r" dot\(", accumulate_of(drafter=arch, scan_layers=scan).as_text()))

    # The context's keys and values of every layer are made before the loop: two products, and two more for gradients
    # of weights and two for that of the fused feature.
    assert products(8, True) - products(4, True) == 4 * 6
    assert products(8, False) - products(4, False) > 4 * 20


@pytest.mark.parametrize("attention", ["reference", "blocked"])
def test_the_target_in_tiles_has_no_dense_array(attention, monkeypatch):
    """Neither a mask nor scores of a row's queries by its keys; the reference has them, 512 queries at a time."""
    monkeypatch.setattr(target_attention, "CHUNK_KEYS", 64)
    target = tiny_target(vocab_size=64)
    settings = settings_of(target, target_attention=attention)
    step = make_step(settings, colocated((1, 1, 1)))
    _, specs = weights.split(Target(target))
    batch = abstract_features(step, settings, Bucket(SEQ, 1)).batch
    lowered = step.features.lower(weights.abstract(specs, step.meshes.target), batch)
    shapes = shapes_of(lowered.compile(compiler_options(step.meshes.target)).as_text())
    assert (max(np.prod(shape) for shape in shapes) >= SEQ * SEQ) == (attention == "reference")


def test_temporaries_grow_linearly_in_anchors():
    """And so do the operations outside of the attention's loops; those inside are counted in its own tests.

    From a size on from which the chunks of the loss are full.
    """
    few, some, many = (accumulate_of(anchors=anchors) for anchors in (128, 256, 512))

    def grows(quantity):
        first, second, third = map(quantity, (few, some, many))
        assert third - second == pytest.approx(2 * (second - first), rel=0.1)
        assert second > first

    grows(lambda compiled: compiled.memory_analysis().temp_size_in_bytes)
    grows(lambda compiled: compiled.cost_analysis()["flops"])


def test_recomputation(monkeypatch):
    """Less memory, with the MLP in parts that do not divide."""
    monkeypatch.setattr(drafter_module, "MLP_ROWS", 100)
    arch = tiny_drafter(tiny_target(vocab_size=VOCAB), block_size=BLOCK, num_layers=8)
    made = [accumulate_of(remat=remat, anchors=256, drafter=arch) for remat in ("none", "layer", "all")]
    none, layer, everything = (compiled.memory_analysis().temp_size_in_bytes for compiled in made)
    assert none > 2 * layer
    assert layer > everything


def test_neither_recomputation_nor_a_loop_over_layers_changes_a_gradient(monkeypatch):
    monkeypatch.setattr(drafter_module, "MLP_ROWS", 100)
    target = tiny_target()
    made = make_drafter(tiny_drafter(target, num_layers=4))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 64, (2, 40)))
    anchors = jnp.asarray(np.sort(rng.integers(0, 60, (2, 40)), axis=1))
    table, *taps = jnp.asarray(rng.standard_normal((3, 2, 64, 32), np.float32))
    positions = jnp.broadcast_to(jnp.arange(64), (2, 64))

    def total(params, remat, scan=False):
        drafter = nnx.merge(made.graph, params)
        context = drafter.context(taps, positions)
        return jnp.square(drafter(tokens, anchors, context, table[0], jnp.float32, remat=remat, scan=scan)).sum()

    expected = jax.grad(total)(made.params, "none")
    for changes in [("layer", False), ("all", False), ("none", True), ("layer", True)]:
        found = jax.grad(total)(made.params, *changes)
        for name, value in weights.by_name(found).items():
            assert relative_error(value, weights.by_name(expected)[name]) < 1e-5, name
