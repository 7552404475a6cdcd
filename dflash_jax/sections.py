"""The sections of a recipe as frozen pydantic models, and every rule about a value that needs no target."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer, model_validator

Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]

Loss = Literal["cross_entropy", "forward_kl", "reverse_kl", "total_variation", "lk"]
"""Of a row: against its token, or against the target's distribution at the position before."""
Weighting = Literal["decay", "d_pace"]
"""Of the rows of a block."""
Attention = Literal["auto", "reference", "blocked", "kernel"]
"""Implementation of the drafter's attention."""
TargetAttention = Literal["auto", "reference", "blocked", "cudnn", "splash"]
"""Implementation of the target's attention over whole rows."""
Remat = Literal["none", "layer", "all"]
"""What a layer's backward pass makes anew: nothing; all but the attention's output; all but the layer's input."""


class Section(BaseModel):
    """Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: Any) -> Any:
        """YAML reads `yes` and `on` as true, which pydantic would take for 1."""
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError(f"{value} is a switch, not a value of this key")
        return value


class RunSection(Section):
    """Where the run lives."""

    folder: Path
    seed: Annotated[int, Field(ge=0)] = 0


class DevicesSection(Section):
    """Which devices, in which mesh. `data: -1` takes the devices that `fsdp` and `tensor` leave."""

    simulate: Count | None = None
    """Number of simulated CPU devices; none: the accelerators (or the CPU) that JAX finds."""
    data: int = -1
    fsdp: Count = 1
    tensor: Count = 1
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the matmuls; auto: float32 on CPU, bfloat16 elsewhere."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of an accelerator's memory that XLA may take; none: JAX's default."""
    preallocate: bool | None = None
    """Whether XLA takes that memory at once; none: JAX's default."""
    xla_flags: tuple[str, ...] = ()
    """Further `--xla_...` flags."""
    compilation_cache: str | None = "~/.cache/dflash_jax/xla"
    """Folder of executables that outlive the process (JAX_COMPILATION_CACHE_DIR goes before it); none: no cache."""

    @model_validator(mode="after")
    def _check(self) -> "DevicesSection":
        if self.simulate and (self.memory_fraction is not None or self.preallocate is not None):
            raise ValueError("memory_fraction and preallocate are for accelerators, not for simulated devices")
        wrong = [flag for flag in self.xla_flags if not flag.startswith("--xla")]
        if wrong:
            raise ValueError(f"xla_flags: {wrong[0]!r} does not begin with --xla")
        if self.data != -1 and self.data < 1:
            raise ValueError(f"data must be -1 (the rest) or at least 1, not {self.data}")
        if self.simulate and self.data != -1 and self.data * self.fsdp * self.tensor > self.simulate:
            asked = self.data * self.fsdp * self.tensor
            raise ValueError(
                f"data x fsdp x tensor = {asked} asks for more than the {self.simulate} devices of simulate"
            )
        return self


class TargetSection(Section):
    """The frozen model that the drafter serves."""

    path: str
    """A Hugging Face folder, a hub id, or `embedded:quickstart`."""
    revision: str | None = None
    """Hub revision to pin."""
    attention: TargetAttention = "auto"
    """In training: `cudnn` is for GPUs in half precision, `splash` for TPUs, `blocked` reads visible tiles only,
    `reference` makes all scores of 512 rows at once; auto: the backend's own, elsewhere blocked for long rows."""


class DrafterSection(Section):
    """Shape of the drafter. What is left out is taken from the target."""

    layers: Count = 5
    block_size: Annotated[int, Field(ge=2)] = 16
    """Rows of a block, the clean anchor included; the drafter proposes one token fewer."""
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    """An unused row of the target's embedding; required unless `init_from` brings it."""
    taps: Count = 5
    """Number of tapped target layers, spread by the authors' formula, when `target_layer_ids` is absent."""
    target_layer_ids: tuple[int, ...] | None = None
    """0-based decoder blocks whose outputs are the features."""
    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    init_from: str | None = None
    """A published or exported drafter folder to start from; it brings its shape, so the keys above must be absent."""

    @model_validator(mode="after")
    def _check(self) -> "DrafterSection":
        if self.init_from is None:
            if self.mask_token_id is None:
                raise ValueError("mask_token_id is required: the id of an unused row of the target's embedding")
        else:
            surplus = sorted(self.model_fields_set - {"init_from"})
            if surplus:
                raise ValueError(f"init_from brings the drafter's shape: remove {', '.join(surplus)}")
        if self.target_layer_ids is not None and not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty: list at least one layer or leave the key out")
        return self

    @model_serializer(mode="wrap")
    def _dump(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Without the defaults that `init_from` excludes: a dumped config must load again."""
        return dump(self) if self.init_from is None else {"init_from": self.init_from}


class DataSection(Section):
    """What to train on: a folder of `scripts/prepare_data.py`, or a JSONL file that is prepared into the run folder."""

    train: str
    max_length: Annotated[int, Field(ge=2)] = 3072
    """Longer rows are rejected on preparation."""
    bucket_edges: tuple[Count, ...] | None = None
    """Ascending lengths; a row is padded to the smallest that holds it. Absent: those with the least padding."""
    buckets: Annotated[int, Field(ge=1, le=8)] = 6
    """Number of automatic edges; each is one shape to compile."""
    edge_multiple: Count | None = None
    """Edges are multiples of it; none: the block size, or 128 on TPU."""
    order: Literal["interleave", "shuffle", "sequential"] = "interleave"
    """Order of an epoch's batches: each bucket spread evenly, at random, or bucket after bucket."""
    template_arguments: dict[str, bool | int | str] = {}
    """Keyword arguments of the chat template, for instance `enable_thinking: false`."""
    reader_threads: Count = 2

    @model_validator(mode="after")
    def _check(self) -> "DataSection":
        edges = self.bucket_edges
        if edges is None:
            return self
        if not edges:
            raise ValueError("bucket_edges is empty: list at least one length or leave the key out")
        if list(edges) != sorted(set(edges)):
            raise ValueError(f"bucket_edges must rise strictly: {list(edges)}")
        if edges[-1] < self.max_length:
            raise ValueError(f"the last bucket edge must hold max_length {self.max_length}, {edges[-1]} does not")
        return self


class TrainingSection(Section):
    """How long, in which batches."""

    steps: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps; or give `epochs`."""
    epochs: Count | None = None
    batch_size: Count | None = None
    """Rows of a micro-batch over all devices; 8 unless `tokens_per_batch` is given."""
    tokens_per_batch: Count | None = None
    """Instead: padded tokens of a micro-batch, so that a bucket of short rows takes more of them."""
    accumulation: Count = 1
    """Micro-batches an optimizer step."""
    anchors: Count = 512
    """Blocks drawn from a row, anew each epoch."""
    loss_decay_gamma: Annotated[float, Field(gt=0)] | None = None
    """Weight of offset k is exp(-(k-1)/gamma); absent: the paper's value for the block size."""
    loss: Loss = "cross_entropy"
    """Or a divergence from the target's distribution, which runs the whole target: `lk` is -log of the acceptance."""
    position_weights: Weighting = "decay"
    """Or `d_pace`: by what a better draft adds to the expected accepted length, as the drafter stands."""
    d_pace_alpha: Ratio | None = None
    """Smoothing of D-PACE; absent: its paper's 0.5."""
    attention: Attention = "auto"
    """`blocked` reads visible tiles only, `kernel` does so in Pallas (not yet tried on hardware), `reference` makes all
    scores at once; auto: blocked, and reference where there are few."""
    remat: Remat = "none"
    """`layer` and `all` trade recomputation for memory."""
    scan_layers: bool = False
    """Compile one layer and loop over them (they must be alike); each pass copies the weights."""
    checkpoint_every: Count = 1000
    keep_checkpoints: Count = 3

    @model_validator(mode="before")
    @classmethod
    def _default_batch(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("batch_size") is None and values.get("tokens_per_batch") is None:
            return {**values, "batch_size": 8}
        return values

    @model_validator(mode="after")
    def _check(self) -> "TrainingSection":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.batch_size is not None and self.tokens_per_batch is not None:
            raise ValueError("give one of batch_size and tokens_per_batch, not both")
        unused = "loss_decay_gamma" if self.position_weights == "d_pace" else "d_pace_alpha"
        if getattr(self, unused) is not None:
            raise ValueError(f"{unused} has no meaning with position_weights: {self.position_weights}")
        return self


class PipelineSection(Section):
    """Between target and drafter: where each runs, and the pool of features that waits between them."""

    placement: Literal["colocated", "split"] = "colocated"
    """Both on all devices, or each on its own."""
    target_devices: Count | None = None
    """Devices of the target under `split`; the drafter has the rest."""
    pool_size: Count = 12
    """Feature batches in memory at a time, those in use included."""
    min_ready: Count = 10
    """The drafter chooses among so many waiting batches, and waits for them unless the epoch ends."""
    draw: Literal["deficit", "fifo", "random"] = "deficit"
    """Which of them is next: of the bucket furthest below its quota, the oldest, or any."""
    memory: Literal["device", "pinned_host"] = "device"
    """Where waiting features lie."""
    split_fc: bool = True
    """Fusion layer as a sum of one product a tap; false: one product over the concatenated taps."""

    @model_validator(mode="after")
    def _check(self) -> "PipelineSection":
        if self.min_ready > self.pool_size:
            raise ValueError(
                f"min_ready {self.min_ready} is larger than pool_size {self.pool_size}: so many never wait; "
                "lower min_ready or raise pool_size"
            )
        if (self.placement == "split") != (self.target_devices is not None):
            raise ValueError("target_devices goes with placement: split, and split needs it")
        return self


class NoiseSection(Section):
    """Noise on the features, in training only. The level rises linearly over optimizer steps, then stays."""

    distribution: Literal["off", "uniform", "gaussian"] = "off"
    """uniform in [-level, level], or normal with standard deviation level."""
    level: Annotated[float, Field(ge=0)] = 0.05
    initial_level: Annotated[float, Field(ge=0)] = 0.0
    ramp_ratio: Ratio = 0.0
    """Share of the run over which the level goes from `initial_level` to `level`."""

    @model_validator(mode="after")
    def _check(self) -> "NoiseSection":
        if self.distribution == "off":
            for key, field in type(self).model_fields.items():
                if key != "distribution" and getattr(self, key) != field.default:
                    raise ValueError(f"{key} is set but distribution is off: write uniform or gaussian")
        return self


class OptimizerSection(Section):
    """AdamW behind a global-norm clip; linear warm-up, then cosine to a floor."""

    learning_rate: Annotated[float, Field(ge=0)] = 6e-4
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=1e-30)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_ratio: Ratio = 0.04
    final_ratio: Ratio = 0.1
    """The floor of the cosine, as a share of `learning_rate`."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0


class EvaluationSection(Section):
    """Real speculative decoding on held-out prompts."""

    prompts: str | None = None
    """JSONL of `messages`; absent: no evaluation."""
    every: Count | None = None
    """Steps between evaluations; absent: at start and end only."""
    limit: Count | None = None
    """Use the first so many prompts."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 128
    batch_size: Count = 8
    method: Literal["chain", "tree"] = "chain"
    """One draft token an offset, or a draft tree."""
    budget: Annotated[int, Field(ge=1, le=512)] | None = None
    """Nodes of the tree; only with `method: tree`, which needs it."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy."""
    keep_best: bool = False
    """Keep the drafter with the largest acceptance length in `<run>/best`, and export that one."""

    @model_validator(mode="after")
    def _check(self) -> "EvaluationSection":
        if (self.method == "tree") != (self.budget is not None):
            raise ValueError("budget goes with method: tree, and tree needs it")
        if self.prompts is None and self.every is not None:
            raise ValueError("every is set but prompts is not: name the JSONL of held-out prompts")
        if self.prompts is None and self.keep_best:
            raise ValueError("keep_best is set but prompts is not: name the JSONL of held-out prompts")
        return self


class TelemetrySection(Section):
    """Where the metrics go, beside `metrics.jsonl`, which is always written."""

    log_every: Count = 1
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "dflash_jax"
    tensorboard: bool = False
    """Event files in `<run>/tensorboard`; needs the extra `tensorboard`."""


class MetricsSection(Section):
    """What draft trees would accept, looked at now and then; all other drafting metrics are there at every step."""

    every: Count = 50
    """Optimizer steps between looks."""
    blocks: Annotated[int, Field(ge=0)] = 64
    """Blocks of the step's first micro-batch that are looked at, about; 0: no trees."""


DETECTORS = (
    "nonfinite",
    "high",
    "spike",
    "severe",
    "drift",
    "vanishing",
    "clip_rate",
    "update_norm",
    "loss_spike",
    "module",
)
"""What the monitor looks for; see `docs/guide.md`."""

Action = Literal["off", "log", "alert", "clip", "skip", "rollback", "halt"]
"""log: a line in `events.jsonl`; alert: also on the console and to Weights & Biases; clip: also clip this update to
the usual size; skip: alert and leave weights and moments as they are; rollback: skip, then go back to the last good
checkpoint and pass over the batches that were flagged; halt: skip and end the run."""

SKIPPING = frozenset({"skip", "rollback", "halt"})
"""Actions that leave weights and moments as they are."""


class HealthSection(Section):
    """The gradient-norm monitor: thresholds, and what to do about what it finds."""

    enabled: bool = True
    actions: dict[str, Action] = {}
    """By detector, where it is to differ from the default."""
    baseline_steps: Annotated[int, Field(ge=16, le=1000)] | None = None
    """Steps after the warm-up that say what is usual; none: a tenth of the run, 64 to 1000."""
    spike_z: Annotated[float, Field(gt=0)] = 3.0
    """spike: standard deviations of the log-norm above the mean of the last 128 steps."""
    severe_deviations: Annotated[float, Field(gt=0)] = 6.0
    """severe, loss_spike: standard deviations of norm or loss above their mean over the last 128 steps."""
    severe_ratio: Annotated[float, Field(gt=1)] = 10.0
    """severe: the norm over its exponential mean."""
    drift_ratio: Annotated[float, Field(gt=1)] = 1.5
    """drift: the fast exponential mean of the norm over the slow one ..."""
    drift_steps: Count = 200
    """... for so many steps; a rising line through the last 1000 steps (t above 4) is a drift too."""
    vanishing_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """vanishing: the norm over the baseline's median ..."""
    vanishing_steps: Count = 100
    """... for so many steps."""
    vanishing_floor: Annotated[float, Field(ge=0)] = 1e-7
    """vanishing: below it at once."""
    clip_rate: Ratio = 0.5
    """clip_rate: share of the last 200 steps that were clipped."""
    update_ratio: Annotated[float, Field(gt=1)] = 2.0
    """update_norm: the norm of what the optimizer adds over its exponential mean."""
    module_share: Ratio = 0.9
    """module: share of one module in the squared norm ..."""
    module_jump: Annotated[float, Field(gt=1)] = 10.0
    """... or that share over its exponential mean, where it is at least a tenth."""
    modules_every: Count = 50
    """Steps between rows with the norms of all modules."""
    skips_in_row: Count = 5
    """More skipped updates in a row end the run."""
    skipped_share: Ratio = 0.01
    """And so does a larger share of skipped updates, once there were more than `skips_in_row`."""
    rollbacks: Count = 3
    """A run that would be rolled back once more ends."""
    rollback_look: Count = 16
    """Steps from the first flagged one on, without their updates, in which further bad batches are looked for."""
    good_after: Count = 50
    """A checkpoint is good if so many steps behind it had no severe event."""
    alert_seconds: Annotated[float, Field(ge=0)] = 300.0
    """Least time between two alerts of one detector."""

    @field_validator("actions", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        """YAML reads `off` as false."""
        if not isinstance(value, dict):
            return value
        return {name: "off" if action is False else action for name, action in value.items()}

    @model_validator(mode="after")
    def _check(self) -> "HealthSection":
        unknown = sorted(self.actions.keys() - set(DETECTORS))
        if unknown:
            raise ValueError(f"actions: there is no detector {unknown[0]}; there are {', '.join(DETECTORS)}")
        for name, action in self.actions.items():
            if action == "clip" and name not in ("spike", "severe"):
                raise ValueError(f"actions: {name} cannot clip; only spike and severe judge the norm before an update")
        if self.action("nonfinite") not in SKIPPING:
            raise ValueError("actions: nonfinite must skip, roll back or halt: its update destroys weights and moments")
        return self

    def action(self, detector: str) -> Action:
        """What is done about it."""
        return self.actions.get(detector, DEFAULT_ACTIONS[detector])

    @property
    def judges_updates(self) -> bool:
        """Whether a detector that looks at the update itself may have it skipped."""
        return any(self.action(name) in SKIPPING for name in ("vanishing", "update_norm"))

    @property
    def rolls_back(self) -> bool:
        """Whether any detector does."""
        return self.enabled and "rollback" in self.actions.values()


DEFAULT_ACTIONS: dict[str, Action] = {
    "nonfinite": "skip",
    "high": "log",
    "spike": "log",
    "severe": "clip",
    "drift": "alert",
    "vanishing": "alert",
    "clip_rate": "log",
    "update_norm": "alert",
    "loss_spike": "skip",
    "module": "alert",
}


class ExportSection(Section):
    """Whether the run ends with a servable folder `<run>/export`."""

    at_end: bool = False
