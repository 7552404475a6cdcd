"""Detectors of the monitor on made-up runs: what each finds, what none may find, and what is remembered."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sections import DETECTORS, HealthSection
from dflash_jax.training.health import (
    RING,
    HealthState,
    Reading,
    adaptive_factor,
    observe,
    recent_quantiles,
)

BASELINE = 64


def sound_run(steps, seed=0):
    """Log-norms of a mixed run: normal, correlated from step to step."""
    rng = np.random.default_rng(seed)
    log_norms, level = np.empty(steps), 0.0
    for step in range(steps):
        level = 0.6 * level + 0.8 * rng.standard_normal() * 0.15
        log_norms[step] = level
    return np.exp(log_norms).astype(np.float32)


@cache
def runner(section, baseline):
    """Compiled once for each section and length of run."""
    section = HealthSection.model_validate_json(section)

    def visit(state, inputs):
        norm, loss, update, share = inputs
        reading = Reading(norm, loss, share, norm > 5.0, norm == 0, jnp.bool_(True), update)
        state, verdict = observe(section, state, reading, baseline)
        return state, (verdict.flags, verdict.skip)

    return jax.jit(lambda state, inputs: jax.lax.scan(visit, state, inputs))


def drive(norms, losses=None, updates=None, shares=None, section=None, state=None, baseline=BASELINE):
    """Flags by detector `[steps]`, skips `[steps]`, and the state at the end."""
    section = section or HealthSection()
    norms = np.asarray(norms, np.float32)
    steps = len(norms)
    rng = np.random.default_rng(9)
    losses = 3.0 + 0.05 * rng.standard_normal(steps) if losses is None else losses
    updates = np.full(steps, 0.1) if updates is None else updates
    shares = np.tile([0.5, 0.5], (steps, 1)) if shares is None else shares

    inputs = (
        jnp.asarray(norms),
        jnp.asarray(losses, jnp.float32),
        jnp.asarray(updates, jnp.float32),
        jnp.asarray(shares, jnp.float32),
    )
    state, (flags, skips) = runner(section.model_dump_json(), baseline)(
        state or HealthState.start(len(shares[0])), inputs
    )
    flags = np.asarray(flags)
    return {name: flags[:, index] for index, name in enumerate(DETECTORS)}, np.asarray(skips), state


@pytest.mark.parametrize("seed", range(3))
def test_a_sound_run_of_5000_steps(seed):
    """Fewer than five notes in a thousand steps, and nothing that would act."""
    flags, skips, _ = drive(sound_run(5000, seed), baseline=500)  # a tenth, as by default
    notes = sum(flags[name].sum() for name in DETECTORS)
    assert notes < 25
    for name in ("nonfinite", "severe", "drift", "vanishing", "loss_spike", "update_norm", "module"):
        assert not flags[name].any(), name
    assert not skips.any()


@pytest.mark.parametrize("times", [3, 20, 50])
def test_a_spike(times):
    norms = sound_run(600)
    norms[400] = times * np.median(norms)
    flags, skips, _ = drive(norms)
    assert flags["spike"][400]
    assert flags["severe"][400] == (times > 10 or norms[400] > norms[272:400].mean() + 6 * norms[272:400].std())
    assert not skips.any()
    _, skips, state = drive(norms, section=HealthSection(actions={"severe": "skip"}))
    assert skips.nonzero()[0].tolist() == [400]
    assert (state.skipped, state.skipped_in_row) == (1, 0)


def test_flagged_values_stay_out_of_the_statistics():
    norms = sound_run(600)
    clean = drive(norms[:500])[2]
    norms[450] = 1e6
    flags, _, state = drive(norms[:500])
    assert flags["severe"][450]
    assert state.count == clean.count - 1
    assert jnp.exp(state.norms).max() < 100
    assert state.severe == 1


def test_a_value_that_is_not_finite_is_skipped_at_any_time():
    for position in (0, 30, 300):
        for wrong in (np.nan, np.inf):
            norms = sound_run(400)
            norms[position] = wrong
            flags, skips, state = drive(norms)
            assert flags["nonfinite"].nonzero()[0].tolist() == [position]
            assert skips.nonzero()[0].tolist() == [position]
            assert np.isfinite(state.norms).all()
            assert state.nonfinite == 1
    losses = np.full(100, 3.0)
    losses[50] = np.nan
    assert drive(sound_run(100), losses)[1].nonzero()[0].tolist() == [50]


def test_before_the_baseline_only_the_hundredfold_counts():
    norms = sound_run(BASELINE - 1)
    norms[40] = 30.0
    flags, _, _ = drive(norms)
    assert not any(flags[name].any() for name in DETECTORS)
    norms[40] = 300.0
    assert drive(norms)[0]["severe"].nonzero()[0].tolist() == [40]


def test_a_slow_ramp_is_a_drift_once():
    norms = sound_run(1500)
    norms[500:] *= np.exp(np.arange(1000) * 0.006)
    flags, _, _ = drive(norms)
    assert flags["drift"].sum() == 1
    assert not flags["severe"].any()


def test_a_line_that_rises_is_a_drift():
    """Too slow for the means: 3 % in a hundred steps, found at the end of a window of a thousand; no fall is."""
    rise = np.exp(np.arange(2000) * 0.0003)
    assert drive(sound_run(2000) * rise)[0]["drift"].nonzero()[0].tolist() == [999, 1999]
    assert not drive(sound_run(2000) / rise)[0]["drift"].any()


def test_a_module_that_jumps():
    """Tenfold its usual share, and at least a tenth of all; the verdict names it."""
    shares = np.tile([0.99, 0.005, 0.005], (400, 1))
    shares[300], shares[350] = [0.88, 0.0, 0.12], [0.92, 0.08, 0.0]
    section = HealthSection(module_share=0.999)
    flags, _, _ = drive(sound_run(400), shares=shares, section=section)
    assert flags["module"].nonzero()[0].tolist() == [300]


def test_vanishing():
    """A norm of nothing at once, and again after a hundred steps as a small one; an update of nothing too."""
    norms = sound_run(600)
    norms[300:] = 0.0
    assert drive(norms)[0]["vanishing"].nonzero()[0].tolist() == [300, 399]
    norms = sound_run(600)
    norms[300:] *= 0.02
    assert drive(norms)[0]["vanishing"].nonzero()[0].tolist() == [399]
    updates = np.full(100, 0.1)
    updates[20:] = 0.0
    assert drive(sound_run(100), updates=updates)[0]["vanishing"].nonzero()[0].tolist() == [20]


def test_a_new_level_begins_a_new_baseline():
    """Fifty outliers in a row are no outliers."""
    norms = sound_run(1000)
    norms[500:] *= 1000
    flags, _, state = drive(norms)
    assert flags["severe"][500:550].all()
    assert not flags["severe"][550:].any()
    assert state.baseline_count == BASELINE
    assert jnp.median(state.baseline[:BASELINE]) > np.log(500)


def test_the_other_detectors():
    losses = np.full(400, 3.0) + 0.01 * np.random.default_rng(0).standard_normal(400)
    losses[300] = 4.0
    assert drive(sound_run(400), losses)[0]["loss_spike"].nonzero()[0].tolist() == [300]
    updates = np.full(400, 0.1)
    updates[300] = 0.25
    assert drive(sound_run(400), updates=updates)[0]["update_norm"].nonzero()[0].tolist() == [300]
    shares = np.tile([0.5, 0.5], (400, 1))
    shares[300] = [0.04, 0.96]
    assert drive(sound_run(400), shares=shares)[0]["module"].nonzero()[0].tolist() == [300]
    norms = sound_run(800)
    norms[400:] += 5.0
    assert drive(norms)[0]["clip_rate"][599]
    norms = sound_run(400)
    norms[300:303] *= 3
    assert drive(norms)[0]["high"].nonzero()[0].tolist() == [302]


def test_a_detector_can_be_off():
    norms = sound_run(400)
    norms[300] = 50.0
    flags, _, _ = drive(norms, section=HealthSection(actions={"spike": "off", "severe": "off"}))
    assert not flags["spike"].any()
    assert not flags["severe"].any()


@pytest.mark.parametrize("at", [10, 40, 64, 100, 300])
def test_what_is_saved_and_restored_decides_alike(at):
    """Inside the baseline window and after it."""
    norms = sound_run(500)
    norms[[50, 200, 400]] *= 40
    whole, skips, _ = drive(norms)
    losses = 3.0 + 0.05 * np.random.default_rng(9).standard_normal(500)
    first, first_skips, state = drive(norms[:at], losses[:at])
    state = jax.tree.map(jnp.asarray, jax.device_get(state))
    second, second_skips, _ = drive(norms[at:], losses[at:], state=state)
    for name in DETECTORS:
        np.testing.assert_array_equal(whole[name], np.concatenate([first[name], second[name]]))
    np.testing.assert_array_equal(skips, np.concatenate([first_skips, second_skips]))


def test_adaptive_clip_is_zclips_rule():
    section = HealthSection(actions={"spike": "clip"})
    _, _, state = drive(sound_run(300), section=section)
    ring = np.asarray(state.norms[:RING], np.float64)
    mean, deviation = ring.mean(), ring.std()

    def factor(norm, clip_norm=1e9, section=section):
        return adaptive_factor(section, state, jnp.float32(norm), clip_norm, BASELINE)

    for z in (1.0, 4.0, 8.0):
        norm = np.exp(mean + z * deviation)
        expected = 1.0 if z < 3 else np.exp(mean + 9 / z * deviation) / norm
        np.testing.assert_allclose(factor(norm), expected, rtol=1e-3)
    # Behind a fixed clip that is tighter nothing is left to do.
    assert factor(np.exp(mean + 8 * deviation), 0.01) == 1.0
    assert factor(1e9, section=HealthSection(actions={"severe": "log"})) == 1.0


def test_what_is_flagged_severe_is_clipped_to_the_usual_size():
    """With rolling statistics and before them."""
    for steps in (20, 300):
        _, _, state = drive(sound_run(steps))
        clipped = adaptive_factor(HealthSection(), state, jnp.float32(200.0), 1e9, BASELINE) * 200.0
        assert 0.5 < clipped < 3.0
        assert adaptive_factor(HealthSection(), state, jnp.float32(1.2), 1e9, BASELINE) == 1.0


def test_steps_without_labels_leave_no_trace():
    """Zero norms, first or later, one or many: afterwards the run is as sound as it was."""
    for zeros in ([0], [300], range(300, 310)):
        norms = sound_run(600)
        norms[list(zeros)] = 0.0
        losses = 3.0 + 0.05 * np.random.default_rng(9).standard_normal(600)
        losses[list(zeros)] = 0.0
        updates = np.full(600, 0.1)
        flags, _, state = drive(norms, losses, updates)
        assert flags["vanishing"].nonzero()[0].tolist() == [next(iter(zeros))]
        for name in ("severe", "loss_spike", "drift", "update_norm"):
            assert not flags[name].any(), name
        assert state.norms.min() > -5


def test_one_bad_step_does_not_end_a_row():
    norms = sound_run(1500)
    norms[500:] *= np.exp(np.arange(1000) * 0.006)
    clean = drive(norms)[0]["drift"].nonzero()[0]
    norms[clean[0] - 50] = np.nan
    assert drive(norms)[0]["drift"].nonzero()[0].tolist() == [clean[0] + 1]


def test_quantiles():
    norms = sound_run(300)
    _, _, state = drive(norms, section=HealthSection(actions=dict.fromkeys(DETECTORS[1:], "off")))
    expected = np.quantile(norms[-RING:], [0.5, 0.95, 0.99], method="inverted_cdf")
    np.testing.assert_allclose(recent_quantiles(state), expected, rtol=1e-5)
    assert (recent_quantiles(HealthState.start(2)) == 0).all()
