"""The gradient-norm monitor: statistics and detectors on the device, decided inside the compiled update.

One small pytree of scalars and rings is part of the train state and of its checkpoint, so a decision depends on the
run alone, never on when the host looked. Norms are judged on a log scale: they are log-normal, and a threshold in raw
units raises four times as many false alarms. What is flagged as an outlier stays out of the statistics; when everything
is flagged for `REBASELINE` steps, the level has changed, and the statistics begin anew.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.parallel import Leaf
from dflash_jax.sections import DETECTORS, SKIPPING, HealthSection

RING = 128
"""Steps that the rolling statistics look back."""
RING_FULL = 64
"""Entries from which on they are used."""
CLIP_WINDOW = 200
REBASELINE = 50
HIGH_STEPS = 3
LONGEST_BASELINE = 1000
FAST, SLOW = 0.9, 0.99
TREND_BINS, TREND_BIN = 20, 50
"""A trend is looked for in so many means of so many steps each: single steps are too correlated to be counted."""
TREND_T = 4.0
NOTABLE_SHARE = 0.1
"""Modules with a smaller share of the squared norm may jump as they like."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HealthState:
    """All that the monitor remembers. float32 or int32 scalars unless a shape is given."""

    baseline: Leaf
    """`[LONGEST_BASELINE]` float32: log-norms of the baseline window, in order; filled up to `baseline_count`."""
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
    trend: Leaf
    """`[TREND_BINS]` float32: means of the log-norm in the present window, as far as it is filled."""
    trend_count: Leaf
    """Steps in it."""
    shares: Leaf
    """`[modules]` float32: exponential means of the modules' shares in the squared norm, 0.99."""
    drifting: Leaf
    """Steps in a row with fast over slow above the threshold."""
    vanishing: Leaf
    """Steps in a row with a vanishing norm or update."""
    nothing: Leaf
    """bool: whether the last step had no norm or no update at all."""
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

    @classmethod
    def start(cls, modules: int) -> "HealthState":
        """Nothing seen yet of a gradient of so many modules."""
        zero, nothing = jnp.int32(0), jnp.float32(0.0)
        return cls(
            baseline=jnp.zeros(LONGEST_BASELINE),
            baseline_count=zero,
            norms=jnp.zeros(RING),
            losses=jnp.zeros(RING),
            count=zero,
            clips=jnp.zeros(CLIP_WINDOW, bool),
            fast=nothing,
            slow=nothing,
            update_mean=nothing,
            trend=jnp.zeros(TREND_BINS),
            trend_count=zero,
            shares=jnp.zeros(modules),
            drifting=zero,
            vanishing=zero,
            nothing=jnp.bool_(False),
            high=zero,
            flagged=zero,
            steps=zero,
            skipped=zero,
            skipped_in_row=zero,
            nonfinite=zero,
            severe=zero,
        )


@dataclass(frozen=True)
class Reading:
    """What one update shows the monitor."""

    norm: Float[Array, ""]
    """Global gradient norm before clipping."""
    loss: Float[Array, ""]
    module_shares: Float[Array, "modules"]
    """Share of each module in the squared norm."""
    clipped: Bool[Array, ""]
    empty: Bool[Array, ""]
    """Whether the step had no label at all: nothing can be learnt from it about the run."""
    learning: Bool[Array, ""]
    """Whether the warm-up of the learning rate is over; before that no baseline is taken."""
    update_norm: Float[Array, ""] = field(default_factory=lambda: jnp.float32(jnp.nan))
    """Norm of what the optimizer adds to the weights; not a number as long as there is no update. Of a gradient that is
    skipped, what the moments alone would add."""


@dataclass(frozen=True)
class Verdict:
    """What the monitor says of an update."""

    flags: Bool[Array, "detectors"]
    """In the order of `DETECTORS`."""
    skip: Bool[Array, ""]
    z: Float[Array, ""]
    """Standard deviations of the log-norm above its rolling mean; 0 before there is one."""
    module: Int[Array, ""]
    """The module that has too much of the gradient, if any has: an index into `module_shares`."""


def observe(
    section: HealthSection, state: HealthState, reading: Reading, baseline_steps: int
) -> tuple[HealthState, Verdict]:
    """Judge one update by the statistics of those before it, then let it into them unless it is an outlier."""
    # Of a gradient with a finite norm AdamW makes a finite update: its squares are finite, and eps is above zero.
    finite = jnp.isfinite(reading.norm) & jnp.isfinite(reading.loss)
    seen = finite & ~reading.empty
    baseline = state.baseline[:baseline_steps]
    baseline_full = state.baseline_count >= baseline_steps
    norm = judge_norm(section, state, reading.norm, baseline_steps)
    severe, spike = norm.severe & seen, norm.spike & seen
    loss_mean, loss_deviation = _moments(state.losses, jnp.minimum(state.count, RING))
    loss_spike = norm.rolling & baseline_full & seen
    loss_spike &= reading.loss > loss_mean + section.severe_deviations * loss_deviation

    def in_a_row(count: Array, holds: Array) -> Array:
        """A step with values that are not numbers neither goes on with a row nor ends it."""
        return jnp.where(finite, jnp.where(holds, count + 1, 0), count)

    nothing = finite & (jnp.minimum(reading.norm, reading.update_norm) < section.vanishing_floor)
    small = nothing | baseline_full & (norm.log < jnp.median(baseline) + jnp.log(section.vanishing_ratio))
    vanishing = in_a_row(state.vanishing, small)
    # One step in a hundred of a sound run is above the 99th percentile; several in a row are not.
    high = in_a_row(state.high, baseline_full & (norm.log > jnp.quantile(baseline, 0.99)))
    drifting = in_a_row(state.drifting, baseline_full & (state.fast - state.slow > jnp.log(section.drift_ratio)))
    trend, trend_count, rising = _trend(state, norm.log, seen & reading.learning & ~(severe | loss_spike))
    shares = reading.module_shares
    jump = jnp.where(shares > NOTABLE_SHARE, shares / (section.module_jump * jnp.maximum(state.shares, 1e-12)), 0.0)
    owns_all, jumps = shares.max() > section.module_share, jump.max() > 1.0
    clips = jnp.roll(state.clips, 1).at[0].set(reading.clipped)
    flags = {
        "nonfinite": ~finite,
        "high": finite & (high == HIGH_STEPS),
        "spike": spike,
        "severe": severe,
        # A rise that the means show already is not told twice.
        "drift": finite & (drifting == section.drift_steps) | rising & (drifting == 0),
        # The floor counts at once: a norm of zero is nothing that comes and goes.
        "vanishing": finite & (vanishing == section.vanishing_steps) | nothing & ~state.nothing,
        "clip_rate": (state.steps % CLIP_WINDOW == CLIP_WINDOW - 1) & (clips.mean() > section.clip_rate),
        "update_norm": baseline_full & seen & (reading.update_norm > section.update_ratio * state.update_mean),
        "loss_spike": loss_spike,
        "module": baseline_full & seen & (owns_all | jumps),
    }
    # Of the flags that ask for it alone: where none of them looks at the update, the skip does not wait for it.
    skip = jnp.stack([jnp.bool_(False), *(flags[name] for name in DETECTORS if section.action(name) in SKIPPING)]).any()
    flags = jnp.stack([flags[name] & (section.action(name) != "off") for name in DETECTORS])
    outlier = ~finite | severe | loss_spike
    ignored = outlier | nothing | reading.empty
    state = replace(
        state,
        clips=clips,
        trend=trend,
        trend_count=trend_count,
        drifting=drifting,
        vanishing=vanishing,
        high=high,
        nothing=nothing,
        steps=state.steps + 1,
        skipped=state.skipped + skip,
        skipped_in_row=jnp.where(skip, state.skipped_in_row + 1, 0),
        nonfinite=state.nonfinite + ~finite,
        severe=state.severe + outlier,
    )
    module = jnp.where(owns_all, shares.argmax(), jump.argmax())
    state = _remember(state, reading, norm.log, outlier & finite, ignored, baseline_steps)
    return state, Verdict(flags, skip, norm.z, module)


def foresee(section: HealthSection, state: HealthState, reading: Reading, baseline_steps: int) -> Bool[Array, ""]:
    """Whether this update is to be skipped, as far as it can be known before there is one."""
    if not section.enabled:
        return jnp.bool_(False)
    return observe(section, state, reading, baseline_steps)[1].skip


@dataclass(frozen=True)
class NormJudgement:
    """A norm next to the statistics of those before it."""

    log: Float[Array, ""]
    rolling: Bool[Array, ""]
    """Whether the rolling statistics are in use."""
    z: Float[Array, ""]
    spike: Bool[Array, ""]
    severe: Bool[Array, ""]
    usual: Float[Array, ""]
    """What ZClip (arXiv 2504.02507) brings it to: beyond z* deviations of the log-norm, the farther out the closer to
    the mean, exp(mean + z*^2 / z * deviation); before there are rolling statistics the exponential mean."""


def judge_norm(
    section: HealthSection, state: HealthState, norm: Float[Array, ""], baseline_steps: int
) -> NormJudgement:
    """The detectors that look at the norm alone; the adaptive clip asks before there is an update."""
    log = jnp.log(jnp.maximum(norm, 1e-30))
    entries = jnp.minimum(state.count, RING)
    rolling = entries >= RING_FULL
    baseline_full = state.baseline_count >= baseline_steps
    mean, deviation = _moments(state.norms, entries)
    raw_mean, raw_deviation = _moments(jnp.exp(state.norms), entries)
    z = jnp.where(rolling & jnp.isfinite(norm), (log - mean) / deviation, 0.0)
    known = (state.count > 0) & jnp.isfinite(norm)
    far_out = rolling & (norm > raw_mean + section.severe_deviations * raw_deviation) & (z > section.spike_z)
    far_out |= log > state.slow + jnp.log(section.severe_ratio)
    # Until the baseline is full only a hundredfold norm counts.
    severe = known & jnp.where(baseline_full, far_out, log > state.slow + jnp.log(100.0))
    zclip = jnp.exp(mean + deviation * section.spike_z**2 / jnp.maximum(z, section.spike_z))
    usual = jnp.where(rolling & (z > section.spike_z), zclip, jnp.exp(state.slow))
    return NormJudgement(log, rolling, z, known & baseline_full & (z > section.spike_z), severe, usual)


def adaptive_factor(
    section: HealthSection, state: HealthState, norm: Float[Array, ""], clip_norm: float, baseline_steps: int
) -> Float[Array, ""]:
    """By what the clipped gradient is scaled where a detector of the norm has the action `clip`; 1 elsewhere."""
    asked = [name for name in ("spike", "severe") if section.action(name) == "clip"]
    if not section.enabled or not asked:
        return jnp.float32(1.0)
    judged = judge_norm(section, state, norm, baseline_steps)
    flagged = jnp.stack([getattr(judged, name) for name in asked]).any()
    clipped = jnp.maximum(jnp.minimum(norm, clip_norm), 1e-30)
    return jnp.where(flagged, jnp.minimum(1.0, judged.usual / clipped), 1.0)


def recent_quantiles(state: HealthState) -> Float[Array, "3"]:
    """p50, p95, p99 of the norm over the newest good steps; 0 before there are any."""
    entries = jnp.minimum(state.count, RING)
    ordered = jnp.sort(jnp.where(jnp.arange(RING) < entries, state.norms, jnp.inf))
    places = jnp.clip(jnp.ceil(jnp.array([0.5, 0.95, 0.99]) * entries).astype(jnp.int32) - 1, 0, RING - 1)
    return jnp.where(entries > 0, jnp.exp(ordered[places]), 0.0)


def _remember(
    state: HealthState, reading: Reading, log_norm: Array, outlier: Array, ignored: Array, baseline_steps: int
) -> HealthState:
    """The statistics with this update in them, unless it is to be ignored; outliers in a row begin them anew."""
    fresh = HealthState.start(len(state.shares))
    anew = outlier & (state.flagged + 1 >= REBASELINE)
    taken_in_a_row = jnp.where(ignored & ~outlier, state.flagged, 0)  # what is no number, or nothing, says nothing
    state = replace(state, flagged=jnp.where(outlier & ~anew, state.flagged + 1, taken_in_a_row))

    def mean(old: Array, new: Array, decay: float) -> Array:
        """Exponential; plain as long as there are few values."""
        rate = jnp.maximum(1 - decay, 1 / (state.count + 1))
        return old + rate * (new - old)

    slot = state.count % RING
    into_baseline = reading.learning & (state.baseline_count < baseline_steps)
    place = jnp.minimum(state.baseline_count, baseline_steps - 1)
    taken_in = replace(
        state,
        norms=state.norms.at[slot].set(log_norm),
        losses=state.losses.at[slot].set(reading.loss),
        count=state.count + 1,
        fast=mean(state.fast, log_norm, FAST),
        slow=mean(state.slow, log_norm, SLOW),
        update_mean=mean(state.update_mean, reading.update_norm, SLOW),
        shares=mean(state.shares, reading.module_shares, SLOW),
        baseline=jnp.where(into_baseline, state.baseline.at[place].set(log_norm), state.baseline),
        baseline_count=state.baseline_count + into_baseline,
    )
    kept = jax.tree.map(lambda new, old: jnp.where(ignored, old, new), taken_in, state)
    restarted = replace(
        state,
        baseline=fresh.baseline,
        baseline_count=fresh.baseline_count,
        norms=fresh.norms,
        losses=fresh.losses,
        count=fresh.count,
    )
    return jax.tree.map(lambda new, old: jnp.where(anew, new, old), restarted, kept)


def _trend(
    state: HealthState, log_norm: Float[Array, ""], taken: Bool[Array, ""]
) -> tuple[Float[Array, "bins"], Int[Array, ""], Bool[Array, ""]]:
    """The window of the trend with this step in it, if it is to be, and at its end whether the norm rises.

    The slope of a line through the bins' means, over its standard error (least squares).
    """
    added = state.trend.at[state.trend_count // TREND_BIN].add(log_norm / TREND_BIN)
    count = state.trend_count + taken
    full = taken & (count == TREND_BINS * TREND_BIN)
    places = jnp.arange(TREND_BINS) - (TREND_BINS - 1) / 2
    squares = (places**2).sum()
    slope = (places * added).sum() / squares
    error = jnp.sum((added - added.mean() - slope * places) ** 2) / (TREND_BINS - 2)
    rising = full & (slope > TREND_T * jnp.sqrt(error / squares) + 1e-6)
    return jnp.where(full, 0.0, jnp.where(taken, added, state.trend)), jnp.where(full, 0, count), rising


def _moments(ring: Float[Array, "ring"], entries: Int[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean and standard deviation of the first `entries` values; the deviation is never quite zero."""
    used = jnp.arange(ring.shape[0]) < entries
    count = jnp.maximum(entries, 1)
    mean = jnp.where(used, ring, 0.0).sum() / count
    variance = jnp.where(used, (ring - mean) ** 2, 0.0).sum() / count
    return mean, jnp.sqrt(variance) + 1e-6
