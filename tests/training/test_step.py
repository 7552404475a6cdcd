"""The step's contracts: same numbers on any mesh and accumulation, donated state, one norm, one executable a shape."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax.data.buckets import Bucket
from dflash_jax.data.loader import Batch
from dflash_jax.models import weights
from dflash_jax.models.target import Target
from dflash_jax.sections import DETECTORS, HealthSection, OptimizerSection
from dflash_jax.training.compiled import compile_step
from dflash_jax.training.optimizer import make_optimizer, make_schedule
from dflash_jax.training.state import StepSettings, tables_of
from dflash_jax.training.step import init_state, make_step, module_names
from tests.helpers import colocated, features_of, random_params, tiny_drafter, tiny_target

ROWS, SEQ = 32, 32


def make_settings(**optimizer):
    target = tiny_target()
    schedule = make_schedule(OptimizerSection(**optimizer), 10)
    chain = make_optimizer(OptimizerSection(**optimizer), schedule)
    return StepSettings(
        drafter=tiny_drafter(target),
        target=target,
        optimizer=chain,
        schedule=schedule,
        anchors=5,
        gamma=4.0,
        compute_dtype=jnp.float32,
        edges=(SEQ // 2, SEQ),
        tree_blocks=ROWS,
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


def run(mesh_shape, accumulation, steps=2, **changes):
    """Losses, norms, accuracies and final weights of a few steps."""
    meshes, settings = colocated(mesh_shape), replace(make_settings(), **changes)
    if accumulation > 1:  # of smaller batches other blocks would be looked at
        settings = replace(settings, tree_blocks=0)
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
    assert_equal_runs(run(mesh_shape, accumulation), reference)


@pytest.mark.parametrize("loss", ["forward_kl", "lk"])
def test_mesh_and_recomputation_change_nothing_of_another_objective(loss):
    """The target's distribution as label, weights by D-PACE, tiles instead of a dense mask, layers in a loop."""
    objective = {"loss": loss, "weighting": "d_pace", "attention": "blocked", "anchors": 12}
    reference = run((1, 1, 1), 1, **objective | {"attention": "reference"})
    layers = {"remat": "layer"} if loss == "lk" else {"remat": "all", "scan_layers": True}
    assert_equal_runs(run((2, 2, 2), 1, **objective, **layers), reference)


def assert_equal_runs(found, reference):
    history, params, _ = found
    for actual, expected in zip(history, reference[0], strict=True):
        assert all(name in actual or name.startswith("ddtree_accept@") for name in expected)
        assert expected["anchors"] > 20
        for name, value in actual["by_bucket"].items():
            np.testing.assert_allclose(value, expected["by_bucket"][name], rtol=1e-5, atol=1e-7, err_msg=name)
        for name in actual.keys() - {"by_bucket"}:
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


def square_sums(compiled):
    """Number of reductions of a whole weight to one number in the update."""
    text = compiled.update_once.executable.as_text()
    return len(re.findall(r"= f32\[\](?:\{\})? reduce\(", text))


def test_norm_is_one_reduction(reference):
    """The reported norm, the norms by module and the clip share their reductions: one square sum a weight.

    With the monitor there are two more, of the weights and of what the optimizer adds.
    """
    _, params, compiled = reference
    weights_of = len(jax.tree.leaves(params))
    # A few more are the monitor's own statistics; a norm computed twice would be one more for each weight.
    assert 3 * weights_of <= square_sums(compiled) < 4 * weights_of
    settings = replace(make_settings(), health=HealthSection(enabled=False))
    unwatched = compile_step(make_step(settings, colocated((1, 1, 1))), settings, (Bucket(SEQ, ROWS),))
    # And two over buckets, of losses and weights.
    assert square_sums(unwatched) == weights_of + 2


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


def after_sound_updates(actions):
    """A step, and a state after 100 updates with gradients like each other."""
    settings = replace(make_settings(learning_rate=1e-3), baseline_steps=16, clip_norm=1.0)
    settings = replace(settings, health=HealthSection(actions=actions))
    step = make_step(settings, colocated((2, 2, 2)))
    state = init_state(step, settings, 0)
    for seed in range(100):
        state, _ = step.update(with_gradient(state, seed))
    return step, state


@pytest.fixture(scope="module")
def sound():
    return after_sound_updates({"severe": "skip"})


class TestMonitor:
    """The monitor inside the update, on a sound run of updates and what is injected into it."""

    @pytest.mark.parametrize(
        ("scale", "flag"), [(20.0, "severe"), (np.nan, "nonfinite")], ids=["twentyfold", "not a number"]
    )
    def test_an_injected_gradient_is_flagged_and_skipped(self, sound, scale, flag):
        """Weights and moments are bit-equal to before, the schedule stands still, the next update trains."""
        step, state = sound
        before = jax.device_get((state.params, state.optimizer, state.applied, state.step))
        state = jax.tree.map(jnp.copy, state)
        state, metrics = step.update(with_gradient(state, 200, scale))
        flags = dict(zip(DETECTORS, np.asarray(metrics["flags"]), strict=True))
        assert flags[flag]
        assert metrics["skipped_in_row"] == 1
        params, optimizer, applied, number = jax.device_get((state.params, state.optimizer, state.applied, state.step))
        jax.tree.map(np.testing.assert_array_equal, (params, optimizer, applied), before[:3])
        assert number == before[3] + 1
        state, metrics = step.update(with_gradient(state, 201))
        assert not np.asarray(metrics["flags"]).any()
        assert metrics["skipped_in_row"] == 0
        assert metrics["skipped"] == 1
        assert state.applied == applied + 1
        after = jax.device_get(state.params)
        assert all((now != then).any() for now, then in zip(*map(jax.tree.leaves, (after, params)), strict=True))

    @pytest.mark.parametrize("action", ["skip", "alert"])
    def test_an_update_that_is_too_large_itself(self, action):
        """Its gradient is as usual, its second moments are not; only the update's own norm shows it."""
        step, state = after_sound_updates({"update_norm": action})
        small = jax.tree.map(lambda square: 1e-4 * square, optax.tree.get(state.optimizer, "nu"))
        state = replace(state, optimizer=optax.tree.set(state.optimizer, nu=small))
        before = jax.device_get((state.params, state.optimizer, state.applied))
        state, metrics = step.update(with_gradient(state, 200))
        flags = dict(zip(DETECTORS, np.asarray(metrics["flags"]), strict=True))
        assert flags["update_norm"]
        if action == "skip":
            after = jax.device_get((state.params, state.optimizer, state.applied))
            jax.tree.map(np.testing.assert_array_equal, after, before)
            assert metrics["update_norm"] == 0
        else:
            assert state.applied == before[2] + 1
            assert metrics["update_norm"] > 0

    def test_norms_by_module(self, sound):
        step, state = sound
        state = with_gradient(jax.tree.map(jnp.copy, state), 300)
        named = weights.by_name(jax.device_get(state.gradient))
        _, metrics = step.update(state)
        names = module_names(step.specs)
        assert names[:2] == ["fc", "hidden_norm"]
        assert {"layers.0.self_attn", "layers.1.mlp", "layers.1.norms", "norm"} <= set(names)
        norms = dict(zip(names, np.asarray(metrics["module_norms"]), strict=True))
        np.testing.assert_allclose(norms["fc"], np.linalg.norm(named["fc.weight"]), rtol=1e-5)
        mlp = [np.sum(value**2) for name, value in named.items() if name.startswith("layers.1.mlp.")]
        np.testing.assert_allclose(norms["layers.1.mlp"], np.sqrt(sum(mlp)), rtol=1e-5)
        np.testing.assert_allclose(np.sqrt(sum(norm**2 for norm in norms.values())), metrics["grad_norm"], rtol=1e-5)


def with_gradient(state, seed, scale=1.0):
    """The state before an update with a random mean gradient."""
    rng = np.random.default_rng(seed)
    level = scale * np.exp(0.1 * rng.standard_normal())
    gradient = jax.tree.map(
        lambda old: jax.device_put((level * rng.standard_normal(old.shape)).astype(np.float32), old.sharding),
        state.gradient,
    )
    ones = jax.device_put(np.array([0.0, 1.0], np.float32), state.sums.weight.sharding)
    return replace(state, gradient=gradient, sums=replace(state.sums, weight=ones, loss=jnp.copy(ones)))
