"""The step's contracts: same numbers on any mesh and accumulation, donated state, one norm, one executable a shape."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import OptimizerSection
from dflash_jax.data.buckets import Bucket
from dflash_jax.data.loader import Batch
from dflash_jax.models import weights
from dflash_jax.models.target import Target
from dflash_jax.training.compiled import compile_step
from dflash_jax.training.optimizer import make_optimizer, make_schedule
from dflash_jax.training.step import StepSettings, init_state, make_step, tables_of
from tests.helpers import colocated, features_of, random_params, tiny_drafter, tiny_target

ROWS, SEQ = 32, 32


def make_settings(**optimizer):
    target = tiny_target()
    schedule = make_schedule(OptimizerSection(**optimizer), 10)
    chain = make_optimizer(OptimizerSection(**optimizer), schedule)
    return StepSettings(
        tiny_drafter(target), target, chain, schedule, 5, 4.0, jnp.float32, (SEQ // 2, SEQ), tree_blocks=ROWS
    )


def random_rows(seed, rows=ROWS):
    """Rows of different lengths; some without an anchor, one empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, SEQ + 1, rows).astype(np.int32)
    lengths[3] = 0
    mask = np.arange(SEQ)[None] >= rng.integers(1, SEQ, (rows, 1))
    mask &= np.arange(SEQ)[None] < lengths[:, None]
    tokens = rng.integers(0, 63, (rows, SEQ)).astype(np.int32)
    return Batch(tokens, mask, lengths, np.arange(rows, dtype=np.int32), np.int32(2))


def run(mesh_shape, accumulation, steps=2):
    """Losses, norms, accuracies and final weights of a few steps."""
    meshes, settings = colocated(mesh_shape), make_settings()
    step = make_step(settings, meshes)
    _, specs = weights.split(Target(settings.target))
    target_params = random_params(specs, meshes.target, 0)
    state = init_state(step, settings, 0, random_params(step.specs, meshes.drafter, 1))
    rows = ROWS // accumulation
    compiled = compile_step(step, settings, (Bucket(SEQ, rows),))
    history = []
    for number in range(steps):
        whole = random_rows(number)
        for part in range(accumulation):
            mine = slice(part * rows, (part + 1) * rows)
            cut = jax.tree.map(lambda x, mine=mine: x[mine] if np.ndim(x) else x, whole)
            batch = jax.device_put(cut, step.batch_shardings)
            features = features_of(compiled, target_params, batch)
            state, finished = compiled.accumulate(state, tables_of(target_params), features)
            assert finished == cut.lengths.sum()
        state, metrics = compiled.update(state)
        history.append(jax.device_get(metrics))
    return history, jax.device_get(state.params), compiled


@pytest.fixture(scope="module")
def reference():
    return run((1, 1, 1), 1)


@pytest.mark.parametrize(
    ("mesh_shape", "accumulation"),
    [((1, 1, 1), 4), ((8, 1, 1), 1), ((8, 1, 1), 4), ((2, 2, 2), 1), ((2, 2, 2), 4), ((1, 4, 2), 1)],
    ids=str,
)
def test_mesh_and_accumulation_change_nothing(mesh_shape, accumulation, reference):
    history, params, _ = run(mesh_shape, accumulation)
    for actual, expected in zip(history, reference[0], strict=True):
        assert actual.keys() == expected.keys()
        assert expected["anchors"] > 20
        for name, value in expected["by_bucket"].items():
            np.testing.assert_allclose(actual["by_bucket"][name], value, rtol=1e-5, atol=1e-7, err_msg=name)
        for name in expected.keys() - {"by_bucket"}:
            if accumulation == 1 or not name.startswith("ddtree_accept"):  # smaller batches have more looked at
                np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    for name, value in weights.by_name(reference[1]).items():
        np.testing.assert_allclose(weights.by_name(params)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_state_is_donated(reference):
    """Every byte of the state that goes in comes out in place."""
    _, params, compiled = reference
    state_bytes = sum(array.nbytes for array in jax.tree.leaves(params))
    for item in (compiled.accumulate_at[SEQ], compiled.update_once):
        analysis = item.executable.memory_analysis()
        # params, gradient and two moments
        assert analysis.alias_size_in_bytes >= 4 * state_bytes


def test_norm_is_one_reduction(reference):
    """The reported norm and the clip share their reductions: one square sum a weight in the compiled update."""
    _, params, compiled = reference
    text = compiled.update_once.executable.as_text()
    square_sums = re.findall(r"= f32\[\](?:\{\})? reduce\(", text)
    assert len(square_sums) == len(jax.tree.leaves(params))


def test_one_executable_a_shape():
    """Compiled ahead: another shape is an error, not a compile."""
    meshes, settings = colocated((8, 1, 1)), make_settings()
    step = make_step(settings, meshes)
    compiled = compile_step(step, settings, (Bucket(SEQ, ROWS),))
    batch = random_rows(0)
    foreign = replace(batch, tokens=batch.tokens[:, :16], loss_mask=batch.loss_mask[:, :16])
    with pytest.raises(ValueError, match=f"{ROWS}x16 tokens was not compiled; known bucket edges: .{SEQ}."):
        compiled.features({}, foreign)


def test_jit_compiles_once_a_shape():
    """The state keeps its sharding from init through every step, so plain jit compiles each function once."""
    meshes, settings = colocated((2, 2, 2)), make_settings()
    step = make_step(settings, meshes)
    _, specs = weights.split(Target(settings.target))
    target_params = random_params(specs, meshes.target, 0)
    state = init_state(step, settings, 0)
    batches = [jax.device_put(random_rows(number), step.batch_shardings) for number in range(3)]
    compiles = []

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for batch in batches:
            features = features_of(step, target_params, batch)
            state, _ = step.accumulate(state, tables_of(target_params), features)
            state, _ = step.update(state)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert len(compiles) == 3


def test_rows_without_anchors_weigh_nothing():
    """A batch of only such rows gives zero loss and norm, and leaves the weights alone."""
    meshes, settings = colocated((1, 1, 1)), make_settings()
    step = make_step(settings, meshes)
    _, specs = weights.split(Target(settings.target))
    target_params = random_params(specs, meshes.target, 0)
    state = init_state(step, settings, 0)
    before = jax.device_get(state.params)
    batch = random_rows(0)
    batch = replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    features = features_of(step, target_params, jax.device_put(batch, step.batch_shardings))
    state, metrics = step.update(step.accumulate(state, tables_of(target_params), features)[0])
    metrics = jax.device_get(metrics)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["anchors"] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


def test_schedule():
    """Warm-up over 4 % of the run from the first update on, the peak, then a cosine down to the floor."""
    schedule = make_schedule(OptimizerSection(learning_rate=1.0, warmup_ratio=0.04, final_ratio=0.1), 100)
    rates = np.array([schedule(step) for step in range(100)])
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert (np.diff(rates[3:]) < 0).all()
    np.testing.assert_allclose(rates[51], 0.55, atol=1e-2)
    np.testing.assert_allclose(rates[99], 0.1, rtol=1e-5)
