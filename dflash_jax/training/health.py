"""The gradient-norm monitor: statistics and detectors on the device, decided inside the compiled update.

One small pytree of scalars and rings is part of the train state and of its checkpoint, so a decision depends on the
run alone, never on when the host looked. Norms are judged on a log scale: they are log-normal, and a threshold in raw
units raises four times as many false alarms. What is flagged as an outlier stays out of the statistics; when everything
is flagged for `REBASELINE` steps, the level has changed, and the statistics begin anew.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.parallel import Leaf
from dflash_jax.sections import DETECTORS, HealthSection

RING = 128
"""Steps that the rolling statistics look back."""
RING_FULL = 64
"""Entries from which on they are used."""
CLIP_WINDOW = 200
REBASELINE = 50
HIGH_STEPS = 3
FAST, SLOW = 0.9, 0.99


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HealthState:
    """All that the monitor remembers. float32 or int32 scalars unless a shape is given."""

    baseline: Leaf
    """`[baseline_steps]` float32: log-norms of the baseline window, in order; filled up to `baseline_count`."""
    baseline_count: Leaf
    norms: Leaf
    """`[RING]` float32: log-norms of the newest good steps."""
    losses: Leaf
    """`[RING]` float32: losses of the newest good steps."""
    count: Leaf
    """Good steps that went into the rings."""
    clips: Leaf
    """`[CLIP_WINDOW]` bool: whether each of the newest steps was clipped."""
    fast: Leaf
    """Exponential mean of the log-norm, 0.9."""
    slow: Leaf
    """The same, 0.99."""
    update_mean: Leaf
    """Exponential mean of the update norm, 0.99."""
    drifting: Leaf
    """Steps in a row with fast over slow above the threshold."""
    vanishing: Leaf
    """Steps in a row with a vanishing norm or update."""
    high: Leaf
    """Steps in a row with a norm above the baseline's 99th percentile."""
    flagged: Leaf
    """Outliers in a row."""
    steps: Leaf
    """Updates seen."""
    skipped: Leaf
    """Updates skipped."""
    skipped_in_row: Leaf
    nonfinite: Leaf
    """Updates with a value that is not finite."""
    severe: Leaf
    """Updates flagged severe or worse: over `steps`, the spike score."""
    last_severe: Leaf
    """Step of the last of them, or -1."""

    @classmethod
    def start(cls, baseline_steps: int) -> "HealthState":
        zero, nothing = jnp.int32(0), jnp.float32(0.0)
        return cls(
            baseline=jnp.zeros(baseline_steps),
            baseline_count=zero,
            norms=jnp.zeros(RING),
            losses=jnp.zeros(RING),
            count=zero,
            clips=jnp.zeros(CLIP_WINDOW, bool),
            fast=nothing,
            slow=nothing,
            update_mean=nothing,
            drifting=zero,
            vanishing=zero,
            high=zero,
            flagged=zero,
            steps=zero,
            skipped=zero,
            skipped_in_row=zero,
            nonfinite=zero,
            severe=zero,
            last_severe=jnp.int32(-1),
        )


@dataclass(frozen=True)
class Reading:
    """What one update shows the monitor."""

    norm: Float[Array, ""]
    """Global gradient norm before clipping."""
    loss: Float[Array, ""]
    update_norm: Float[Array, ""]
    """Norm of what the optimizer would add to the weights."""
    module_shares: Float[Array, "modules"]
    """Share of each module in the squared norm."""
    clipped: Bool[Array, ""]
    learning: Bool[Array, ""]
    """Whether the warm-up of the learning rate is over; before that no baseline is taken."""


@dataclass(frozen=True)
class Verdict:
    """What the monitor says of an update."""

    flags: Bool[Array, "detectors"]
    """In the order of `DETECTORS`."""
    skip: Bool[Array, ""]
    z: Float[Array, ""]
    """Standard deviations of the log-norm above its rolling mean; 0 before there is one."""


def observe(
    section: HealthSection, state: HealthState, reading: Reading, step: Int[Array, ""]
) -> tuple[HealthState, Verdict]:
    """Judge one update by the statistics of those before it, then let it into them unless it is an outlier."""
    finite = jnp.isfinite(reading.norm) & jnp.isfinite(reading.loss) & jnp.isfinite(reading.update_norm)
    log_norm = jnp.log(jnp.maximum(reading.norm, 1e-30))
    entries = jnp.minimum(state.count, RING)
    rolling = entries >= RING_FULL
    mean, deviation = _moments(state.norms, entries)
    loss_mean, loss_deviation = _moments(state.losses, entries)
    z = jnp.where(rolling & finite, (log_norm - mean) / deviation, 0.0)
    raw_mean, raw_deviation = _moments(jnp.exp(state.norms), entries)
    size = state.baseline.shape[0]
    baseline_full = state.baseline_count >= size
    # Until the baseline is full only non-finite values and a hundredfold norm count.
    hundredfold = (state.count > 0) & (log_norm > state.slow + jnp.log(100.0))
    severe = (
        jnp.where(
            baseline_full,
            rolling & ((reading.norm > raw_mean + section.severe_deviations * raw_deviation) & (z > section.spike_z))
            | (state.count > 0) & (log_norm > state.slow + jnp.log(section.severe_ratio)),
            hundredfold,
        )
        & finite
    )
    loss_spike = rolling & baseline_full & (reading.loss > loss_mean + section.severe_deviations * loss_deviation)
    loss_spike &= finite
    median = jnp.median(state.baseline)
    nothing = jnp.minimum(reading.norm, reading.update_norm) < section.vanishing_floor
    small = finite & (nothing | baseline_full & (log_norm < median + jnp.log(section.vanishing_ratio)))
    vanishing = jnp.where(small, state.vanishing + 1, 0)
    # One step in a hundred of a sound run is above the 99th percentile; several in a row are not.
    above = baseline_full & finite & (log_norm > jnp.quantile(state.baseline, 0.99))
    high = jnp.where(above, state.high + 1, 0)
    drift_now = baseline_full & finite & (state.fast - state.slow > jnp.log(section.drift_ratio))
    drifting = jnp.where(drift_now, state.drifting + 1, 0)
    clips = jnp.roll(state.clips, 1).at[0].set(reading.clipped)
    flags = {
        "nonfinite": ~finite,
        "high": high == HIGH_STEPS,
        "spike": baseline_full & (z > section.spike_z),
        "severe": severe,
        "drift": drifting == section.drift_steps,
        # The floor counts at once: a norm of zero is nothing that comes and goes.
        "vanishing": (vanishing == section.vanishing_steps) | nothing & (vanishing == 1),
        "clip_rate": (state.steps % CLIP_WINDOW == CLIP_WINDOW - 1) & (clips.mean() > section.clip_rate),
        "update_norm": baseline_full & finite & (reading.update_norm > section.update_ratio * state.update_mean),
        "loss_spike": loss_spike,
        "module": baseline_full & finite & (reading.module_shares.max() > section.module_share),
    }
    flags = jnp.stack([flags[name] & (section.action(name) != "off") for name in DETECTORS])
    skips = jnp.array([section.action(name) in ("skip", "halt") for name in DETECTORS])
    skip = (flags & skips).any()
    outlier = ~finite | severe | loss_spike
    state = _remember(section, state, reading, log_norm, outlier, skip, step)
    state = replace(state, clips=clips, drifting=drifting, vanishing=vanishing, high=high)
    return state, Verdict(flags, skip, z)


def adaptive_factor(
    section: HealthSection, state: HealthState, norm: Float[Array, ""], clip_norm: float
) -> Float[Array, ""]:
    """By what the clipped gradient is scaled where a detector of the norm has the action `clip`; 1 elsewhere.

    The rule of ZClip (arXiv 2504.02507) on the log scale: beyond z* deviations, the more a norm exceeds them the closer
    to the mean it is brought, exp(mean + z*^2 / z * deviation).
    """
    thresholds = {"spike": section.spike_z, "severe": section.severe_deviations}
    asked = [threshold for name, threshold in thresholds.items() if section.action(name) == "clip"]
    if not section.enabled or not asked:
        return jnp.float32(1.0)
    entries = jnp.minimum(state.count, RING)
    mean, deviation = _moments(state.norms, entries)
    z = (jnp.log(jnp.maximum(norm, 1e-30)) - mean) / deviation
    brought_to = jnp.exp(mean + deviation * min(asked) ** 2 / jnp.maximum(z, min(asked)))
    clipped = jnp.maximum(jnp.minimum(norm, clip_norm), 1e-30)
    return jnp.where((entries >= RING_FULL) & (z > min(asked)), jnp.minimum(1.0, brought_to / clipped), 1.0)


def recent_quantiles(state: HealthState) -> Float[Array, "3"]:
    """p50, p95, p99 of the norm over the newest good steps; 0 before there are any."""
    entries = jnp.minimum(state.count, RING)
    ordered = jnp.sort(jnp.where(jnp.arange(RING) < entries, state.norms, jnp.inf))
    places = jnp.clip(jnp.ceil(jnp.array([0.5, 0.95, 0.99]) * entries).astype(jnp.int32) - 1, 0, RING - 1)
    return jnp.where(entries > 0, jnp.exp(ordered[places]), 0.0)


def _remember(
    section: HealthSection,
    state: HealthState,
    reading: Reading,
    log_norm: Array,
    outlier: Array,
    skip: Array,
    step: Array,
) -> HealthState:
    """The statistics with this update in them, the counters in any case."""
    fresh = HealthState.start(state.baseline.shape[0])
    anew = outlier & (state.flagged + 1 >= REBASELINE) & jnp.isfinite(log_norm)
    state = replace(
        state,
        steps=state.steps + 1,
        skipped=state.skipped + skip,
        skipped_in_row=jnp.where(skip, state.skipped_in_row + 1, 0),
        nonfinite=state.nonfinite + ~(jnp.isfinite(reading.norm) & jnp.isfinite(reading.loss)),
        severe=state.severe + outlier,
        last_severe=jnp.where(outlier, step, state.last_severe),
        flagged=jnp.where(outlier & ~anew, state.flagged + 1, 0),
    )
    first = state.count == 0

    def mean(old: Array, new: Array, decay: float) -> Array:
        return jnp.where(first, new, decay * old + (1 - decay) * new)

    slot = state.count % RING
    into_baseline = reading.learning & (state.baseline_count < state.baseline.shape[0])
    place = jnp.minimum(state.baseline_count, state.baseline.shape[0] - 1)
    taken_in = replace(
        state,
        norms=state.norms.at[slot].set(log_norm),
        losses=state.losses.at[slot].set(reading.loss),
        count=state.count + 1,
        fast=mean(state.fast, log_norm, FAST),
        slow=mean(state.slow, log_norm, SLOW),
        update_mean=mean(state.update_mean, reading.update_norm, SLOW),
        baseline=jnp.where(into_baseline, state.baseline.at[place].set(log_norm), state.baseline),
        baseline_count=state.baseline_count + into_baseline,
    )
    kept = jax.tree.map(lambda new, old: jnp.where(outlier, old, new), taken_in, state)
    restarted = replace(
        state,
        baseline=fresh.baseline,
        baseline_count=fresh.baseline_count,
        norms=fresh.norms,
        losses=fresh.losses,
        count=fresh.count,
    )
    return jax.tree.map(lambda new, old: jnp.where(anew, new, old), restarted, kept)


def _moments(ring: Float[Array, "ring"], entries: Int[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean and standard deviation of the first `entries` values; the deviation is never quite zero."""
    used = jnp.arange(ring.shape[0]) < entries
    count = jnp.maximum(entries, 1)
    mean = jnp.where(used, ring, 0.0).sum() / count
    variance = jnp.where(used, (ring - mean) ** 2, 0.0).sum() / count
    return mean, jnp.sqrt(variance) + 1e-6
