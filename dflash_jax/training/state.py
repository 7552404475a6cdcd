"""What goes into a step and what it changes: features, the target's tables, the train state, the settings."""

import math
from dataclasses import dataclass, field

import jax
import optax

from dflash_jax.data.loader import Batch
from dflash_jax.models.architecture import DrafterArchitecture, TargetArchitecture
from dflash_jax.models.weights import Params
from dflash_jax.parallel import Leaf
from dflash_jax.sections import Attention, HealthSection, Loss, Remat, TargetAttention, Weighting
from dflash_jax.telemetry.drafting import DraftingSums
from dflash_jax.training.health import HealthState
from dflash_jax.training.noise import FeatureNoise


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """A batch and what the target said about it."""

    batch: Batch
    taps: tuple[Leaf, ...]
    """One `[batch, seq, hidden]` a tapped layer; behind them, where the loss asks for the target's distribution, its
    final hidden states."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tables:
    """The target's frozen input and output tables (one array twice where they are tied)."""

    embedding: Leaf
    """`[vocab, hidden]`."""
    projection: Leaf
    """`[vocab, hidden]`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes. Between optimizer steps `sums` is empty, and `gradient` without meaning."""

    step: Leaf
    """int32 scalar: updates done."""
    key: Leaf
    """Typed PRNG key of the anchors; constant."""
    params: Params
    optimizer: optax.OptState
    gradient: Params
    sums: DraftingSums
    health: HealthState
    """The monitor's memory."""
    applied: Leaf
    """int32 scalar: updates that were not skipped; the schedule counts these."""


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """What the pass over a batch of blocks needs to know besides arrays."""

    drafter: DrafterArchitecture
    gamma: float | None
    """Of the weights by decay."""
    compute_dtype: jax.typing.DTypeLike
    loss: Loss = "cross_entropy"
    weighting: Weighting = "decay"
    d_pace_alpha: float = 0.5
    attention: Attention = "auto"
    target_attention: TargetAttention = "auto"
    remat: Remat = "none"
    scan_layers: bool = False
    split_fc: bool = True
    tree_blocks: int = 0
    """Blocks of a batch whose draft trees are looked at, about; 0: none."""

    @property
    def asks_target(self) -> bool:
        """Whether the label is the target's distribution."""
        return self.loss != "cross_entropy"

    @property
    def states(self) -> int:
        """Arrays that the target hands over: a tap each, and its final hidden states if the loss asks for them."""
        return len(self.drafter.target_layer_ids) + self.asks_target


@dataclass(frozen=True, kw_only=True)
class StepSettings(DraftSettings):
    """What the step needs to know besides arrays. Draft trees are looked at in a step's first micro-batch."""

    target: TargetArchitecture
    optimizer: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    anchors: int
    edges: tuple[int, ...]
    """Bucket edges, ascending: the sums are kept by bucket."""
    noise: FeatureNoise | None = None
    tree_every: int = 1
    """Optimizer steps between looks at draft trees."""
    clip_norm: float = math.inf
    """Of the optimizer's global clip."""
    health: HealthSection = field(default_factory=HealthSection)
    baseline_steps: int = 64
    learning_from: int = 0
    """Updates before the monitor's baseline: the warm-up of the learning rate."""


def tables_of(params: Params) -> Tables:
    """The tables inside a target's parameters."""
    embedding = params["model"]["embed_tokens"]["weight"]
    return Tables(embedding, params["lm_head"]["weight"] if "lm_head" in params else embedding)
