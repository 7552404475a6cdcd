"""From a recipe to what its loop needs: shapes and rules, then data and the place in it, then executables and weights.

`training/loop.py` and `training/replay.py` both begin with these three, in this order.
"""

import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dflash_jax.config import Config, d_pace_alpha, decay_gamma
from dflash_jax.data.buckets import Buckets
from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.loader import BatchSource
from dflash_jax.data.plan import batches_of
from dflash_jax.models import weights
from dflash_jax.models.architecture import DrafterArchitecture, TargetArchitecture, check_mesh, render_drafter
from dflash_jax.models.huggingface import (
    load_drafter,
    load_target,
    read_stop_ids,
    read_target_architecture,
    resolve_folder,
)
from dflash_jax.models.target import FrozenTarget, Target
from dflash_jax.parallel import Meshes, compute_dtype, make_meshes
from dflash_jax.telemetry.stages import StageClock
from dflash_jax.training.checkpoint import Position
from dflash_jax.training.compiled import Compiled, CompiledStep, compile_step
from dflash_jax.training.noise import make_noise
from dflash_jax.training.optimizer import make_optimizer, make_schedule, warmup_steps
from dflash_jax.training.pipeline import Pipeline, check_memory_kind, check_pool_memory
from dflash_jax.training.rules import (
    baseline_steps,
    check_batch,
    check_layers,
    check_resumable,
    check_target_attention,
    check_unfinished,
    describe_drafter,
    lay_out_buckets,
    sizes,
    total_steps,
)
from dflash_jax.training.run_folder import RunFolder, training_records
from dflash_jax.training.state import StepSettings, Tables, TrainState, tables_of
from dflash_jax.training.step import Step, init_state, make_step


@dataclass(frozen=True)
class Models:
    """Both models as a recipe means them on these devices; no weight has been read."""

    meshes: Meshes
    dtype: jax.typing.DTypeLike
    target_folder: Path
    target: TargetArchitecture
    drafter: DrafterArchitecture
    gamma: float | None


@dataclass(frozen=True)
class Course:
    """The data of a run and how long it takes: which batches come, and where the run stands."""

    tokenizer: ChatTokenizer
    buckets: Buckets
    source: BatchSource
    steps: int
    position: Position


@dataclass(frozen=True)
class Engine:
    """Executables and frozen weights."""

    settings: StepSettings
    step: Step
    compiled: CompiledStep
    target: FrozenTarget
    tables: Tables

    def pipeline(self, config: Config, course: Course, clock: StageClock) -> Pipeline:
        """Target and drafter over the course's batches, from where it stands."""
        return Pipeline(
            course.source,
            course.position.reading,
            compiled=self.compiled,
            target=self.target.params,
            tables=self.tables,
            section=config.pipeline,
            reader_threads=config.data.reader_threads,
            seed=config.run.seed,
            clock=clock,
        )

    def first_state(self, config: Config) -> TrainState:
        """The state before step 0: random weights, or those that the recipe starts from."""
        start = config.drafter.init_from
        params = load_drafter(resolve_folder(start), self.step.meshes.drafter).params if start else None
        return init_state(self.step, self.settings, config.run.seed, params)


def describe_models(config: Config) -> Models:
    """Start the devices and check every rule that needs no weights.

    Raises:
        UserError: the recipe does not fit the target or the devices.
    """
    meshes = make_meshes(config.devices, config.pipeline)
    check_memory_kind(config.pipeline, meshes)
    folder = resolve_folder(config.target.path, config.target.revision)
    target = read_target_architecture(folder)
    drafter = describe_drafter(config, target, read_stop_ids(folder))
    check_mesh(target, drafter, meshes.target.shape)
    check_batch(config, drafter.block_size, meshes)
    check_layers(config, drafter)
    check_target_attention(config, target, compute_dtype(config.devices))
    gamma = decay_gamma(config.training, drafter.block_size)
    return Models(meshes, compute_dtype(config.devices), folder, target, drafter, gamma)


def lay_out(
    config: Config, models: Models, folder: RunFolder, position: Position | None, passed_over: frozenset[int]
) -> Course:
    """Records, buckets and batches of a run.

    Args:
        position: where it goes on; none: it begins.
        passed_over: batches that it must not train on.

    Raises:
        UserError: data that cannot be used, or that are not those the run began with.
    """
    resumed = position is not None
    if resumed:
        check_resumable(config, position, str(models.dtype), models.meshes)
    tokenizer = ChatTokenizer(models.target_folder, config.data.template_arguments)
    records = training_records(config, folder, tokenizer, models.target, resumed or folder.metrics.exists())
    buckets = (
        position.buckets
        if resumed
        else lay_out_buckets(config, records.lengths, models.drafter.block_size, models.meshes)
    )
    steps = total_steps(config, sum(batches_of(records.lengths, buckets).values()))
    if resumed:
        check_unfinished(position, steps, records.manifest.digest)
    else:
        position = Position.start(
            drafter=render_drafter(models.drafter),
            config=config.model_dump(mode="json"),
            wandb_id=uuid.uuid4().hex,
            buckets=buckets,
            baseline_steps=baseline_steps(config.health, steps),
            records=records.manifest.digest,
            compute_dtype=str(models.dtype),
        )
    batches = steps * config.training.accumulation
    source = BatchSource(records, buckets, config.data.order, config.run.seed, batches, passed_over)
    return Course(tokenizer, buckets, source, steps, position)


def resolved(config: Config, models: Models, course: Course) -> dict[str, Any]:
    """The recipe with every value that was left to the target, the data or the devices."""
    tree = config.model_dump(mode="json")
    tree["devices"] |= {"compute_dtype": str(models.dtype), **sizes(models.meshes)}
    tree["training"] |= {"steps": course.steps, "loss_decay_gamma": models.gamma}
    tree["buckets"] = [{"edge": bucket.edge, "rows": bucket.rows} for bucket in course.buckets]
    tree["drafter"] = render_drafter(models.drafter)
    return tree


def build(config: Config, models: Models, course: Course) -> Engine:
    """Compile every function for every bucket, check that the devices can hold it all, and load the target.

    Raises:
        UserError: too little memory, or a damaged checkpoint of the target.
    """
    schedule = make_schedule(config.optimizer, course.steps)
    settings = StepSettings(
        drafter=models.drafter,
        target=models.target,
        target_attention=config.target.attention,
        optimizer=make_optimizer(config.optimizer, schedule),
        schedule=schedule,
        anchors=config.training.anchors,
        gamma=models.gamma,
        compute_dtype=models.dtype,
        loss=config.training.loss,
        weighting=config.training.position_weights,
        d_pace_alpha=d_pace_alpha(config.training),
        attention=config.training.attention,
        remat=config.training.remat,
        scan_layers=config.training.scan_layers,
        edges=tuple(bucket.edge for bucket in course.buckets),
        tree_every=config.metrics.every,
        tree_blocks=config.metrics.blocks,
        clip_norm=config.optimizer.clip_norm,
        health=config.health,
        baseline_steps=course.position.baseline_steps,
        learning_from=warmup_steps(config.optimizer, course.steps),
        split_fc=config.pipeline.split_fc,
        noise=make_noise(config.noise, course.steps),
    )
    meshes = models.meshes
    step = make_step(settings, meshes)
    compiled = compile_step(step, settings, course.buckets, _announce)
    target_specs = weights.split(Target(models.target))[1]
    abstract_target = weights.abstract(target_specs, meshes.target, models.dtype)
    check_pool_memory(config.pipeline, settings, course.buckets, compiled, abstract_target)
    target = load_target(models.target_folder, meshes.target, models.dtype)
    tables = jax.device_put(tables_of(target.params), step.tables_shardings)
    return Engine(settings, step, compiled, target, tables)


def _announce(compiled: Compiled) -> None:
    """A progress line for each executable."""
    shape = "" if compiled.edge is None else f" at {compiled.edge} tokens"
    memory = f"{compiled.temporary_bytes / 2**20:.0f} MiB temporaries"
    print(f"compiled {compiled.name}{shape} in {compiled.seconds:.1f} s, {memory} a device", file=sys.stderr)
