"""train(config): the one place where everything meets. Read it from top to bottom."""

import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dflash_jax.config import Config, decay_gamma
from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.conversations import Conversation, read_prompts
from dflash_jax.data.loader import BatchSource, place, read_ahead
from dflash_jax.data.plan import batches_per_epoch
from dflash_jax.decoding.evaluate import Evaluator, Report
from dflash_jax.decoding.prompts import encode_prompts
from dflash_jax.errors import Interrupted, UserError
from dflash_jax.models.architecture import (
    DrafterArchitecture,
    TargetArchitecture,
    check_mesh,
    check_pair,
    render_drafter,
    resolve_drafter,
)
from dflash_jax.models.drafter import TrainedDrafter
from dflash_jax.models.huggingface import (
    embedded_path,
    load_drafter,
    load_target,
    read_drafter_architecture,
    read_stop_ids,
    read_target_architecture,
    resolve_folder,
)
from dflash_jax.parallel import batch_shards, compute_dtype, make_mesh
from dflash_jax.telemetry.sinks import ConsoleSink, JsonlSink, WandbSink, truncate_rows
from dflash_jax.telemetry.stream import MetricStream, Sink
from dflash_jax.training.checkpoint import Checkpoints, Position
from dflash_jax.training.compiled import Compiled, compile_step
from dflash_jax.training.export import export_drafter
from dflash_jax.training.optimizer import make_optimizer, make_schedule
from dflash_jax.training.run_folder import RunFolder, training_records
from dflash_jax.training.signals import stop_on_signals
from dflash_jax.training.step import StepSettings, abstract_state, init_state, make_step, tables_of


@dataclass(frozen=True)
class Summary:
    """What a finished run has to tell."""

    folder: Path
    steps: int
    tokens: int
    training_seconds: float
    before: Report | None
    """Evaluation at step 0; none without prompts and in a resumed run."""
    after: Report | None
    export: Path | None
    export_rounding: float | None
    """Relative difference of logits that bfloat16 makes."""


def train(config: Config, resume: bool = False) -> Summary:
    """Run a recipe to its end, from the start or from its newest checkpoint.

    Raises:
        UserError: the recipe, its data or its devices do not fit.
        Interrupted: SIGINT or SIGTERM came; the state was saved first.
    """
    # ---- Devices, shapes, and every rule that needs no weights ---------------------------------------------------
    mesh = make_mesh(config.devices)
    dtype = compute_dtype(config.devices)
    target_folder = resolve_folder(config.target.path, config.target.revision)
    target_arch = read_target_architecture(target_folder)
    drafter_arch = describe_drafter(config, target_arch, read_stop_ids(target_folder))
    check_mesh(target_arch, drafter_arch, mesh.shape)
    check_batch(config, mesh)
    gamma = decay_gamma(config.training, drafter_arch.block_size)
    prompts = read_evaluation_prompts(config)

    # ---- Run folder and data -------------------------------------------------------------------------------------
    folder = RunFolder(config.run.folder)
    resumed = folder.open(resume)
    checkpoints = Checkpoints(folder.checkpoints, config.training.keep_checkpoints)
    position = checkpoints.latest_position() if resumed else None
    if resumed:
        check_resumable(config, position, str(dtype))
    tokenizer = ChatTokenizer(target_folder, config.data.template_arguments)
    records = training_records(config, folder, tokenizer, target_arch, resumed)
    steps = total_steps(config, len(records.lengths))
    accumulation = config.training.accumulation
    source = BatchSource(records, config.data.edges, config.training.batch_size, config.run.seed, steps * accumulation)
    if resumed:
        check_unfinished(position, steps, records.manifest.digest)
    else:
        position = Position.start(
            drafter=render_drafter(drafter_arch),
            config=config.model_dump(mode="json"),
            wandb_id=uuid.uuid4().hex,
            records=records.manifest.digest,
            compute_dtype=str(dtype),
        )
    folder.write_config(config, resolved(config, drafter_arch, mesh, str(dtype), gamma, steps))
    limit = config.evaluation.max_new_tokens
    encoded = encode_prompts(prompts, tokenizer, target_arch, limit, str(config.evaluation.prompts))

    # ---- Weights, executables, state -----------------------------------------------------------------------------
    target = load_target(target_folder, mesh, dtype)
    tables = tables_of(target.params)
    schedule = make_schedule(config.optimizer, steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    settings = StepSettings(drafter_arch, target_arch, optimizer, schedule, config.training.anchors, gamma, dtype)
    step = make_step(settings, mesh)
    compiled = compile_step(step, settings, mesh, config.training.batch_size, config.data.edges, announce)
    if resumed:
        state = checkpoints.restore(position.step, abstract_state(step, settings, mesh))
        truncate_rows(folder.metrics, position.step)
    else:
        start = config.drafter.init_from
        params = load_drafter(resolve_folder(start), mesh).params if start else None
        state = init_state(step, settings, config.run.seed, mesh, params)
    evaluator = None
    if prompts:
        names = [prompt.id for prompt in prompts]
        evaluator = Evaluator(
            target, step.graph, drafter_arch, encoded, names, limit, config.evaluation.batch_size, mesh
        )

    # ---- The loop ------------------------------------------------------------------------------------------------
    folder.event("resumed" if resumed else "started", step=position.step, steps=steps, mesh=dict(mesh.shape))
    stream = MetricStream(make_sinks(config, folder, position, steps, resumed), config.telemetry.log_every)
    clock = Stopwatch(position.seconds)

    def evaluate() -> Report:
        with clock.paused(stream):
            report = evaluator.report(state.params)
            stream.write(evaluation_row(position.step, report))
        return report

    def save() -> None:
        with clock.paused(stream):
            checkpoints.save(state, replace(position, seconds=clock.seconds))

    try:
        with stop_on_signals() as stop:
            before = evaluate() if evaluator and not resumed else None
            clock.restart()
            for loaded in read_ahead(source, position.batches, config.data.reader_threads):
                with jax.transfer_guard("disallow"):
                    batch = place(loaded.arrays, step.batch_shardings)
                    features = compiled.features(target.params, batch)
                    state = compiled.accumulate(state, tables, features)
                    position = position.after_batch(loaded.tokens)
                    if position.batches % accumulation:
                        continue
                    state, metrics = compiled.update(state)
                position = position.after_step()
                stream.push(position.step, metrics)
                if position.step == steps:
                    break
                if evaluator and is_due(position.step, config.evaluation.every):
                    evaluate()
                if stop.name or is_due(position.step, config.training.checkpoint_every):
                    save()
                if stop.name:
                    raise Interrupted(f"{stop.name} at step {position.step}, state saved; go on with --resume")
            after = evaluate() if evaluator else None
            save()
            stream.flush()
    except Interrupted as reason:
        folder.event("interrupted", step=position.step, reason=str(reason))
        raise
    except BaseException as error:
        folder.event("failed", step=position.step, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        stream.close()
        checkpoints.close()

    # ---- The end -------------------------------------------------------------------------------------------------
    export = rounding = None
    if config.export.at_end:
        export = folder.export
        rounding = export_drafter(TrainedDrafter(drafter_arch, step.graph, state.params), export, mesh, replace=True)
    folder.event("finished", step=position.step, training_seconds=clock.seconds, tokens=position.tokens)
    return Summary(folder.path, steps, position.tokens, clock.seconds, before, after, export, rounding)


class Stopwatch:
    """Training seconds: pauses are left out, the steps still in flight when one begins are not."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Begin to count now."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self, stream: MetricStream) -> Iterator[None]:
        """Wait for the steps in flight, then leave the block out of the count and out of the next step's seconds."""
        stream.flush()
        self.seconds += time.perf_counter() - self._since
        yield
        self.restart()
        stream.restart_clock()


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def total_steps(config: Config, rows: int) -> int:
    """Optimizer steps of the run; epochs are rounded up to whole steps."""
    if config.training.steps is not None:
        return config.training.steps
    batches = config.training.epochs * batches_per_epoch(rows, config.training.batch_size)
    return -(-batches // config.training.accumulation)


def describe_drafter(config: Config, target: TargetArchitecture, stop_ids: tuple[int, ...]) -> DrafterArchitecture:
    """The drafter's shape: from the recipe, or from the folder that training starts from."""
    if config.drafter.init_from is None:
        if config.drafter.mask_token_id in stop_ids:
            raise UserError(f"drafter.mask_token_id {config.drafter.mask_token_id} ends answers; choose an unused row")
        return resolve_drafter(config.drafter, target)
    drafter = read_drafter_architecture(resolve_folder(config.drafter.init_from))
    check_pair(drafter, target, config.drafter.init_from)
    return drafter


def check_batch(config: Config, mesh: Mesh) -> None:
    """Raise `UserError` unless the rows of a batch divide over the mesh."""
    rows, shards = config.training.batch_size, batch_shards(mesh)
    if rows % shards:
        raise UserError(f"training.batch_size {rows} is no multiple of the mesh's data x fsdp = {shards}")


def check_resumable(config: Config, position: Position, dtype: str) -> None:
    """Raise `UserError` if a value that fixes the course of the run has changed since it began.

    Paths may change; what they lead to is compared by content in `check_unfinished`.
    """
    then, now = position.config, config.model_dump(mode="json")
    fixed = {
        "run": ["seed"],
        "training": ["batch_size", "accumulation", "anchors", "loss_decay_gamma"],
        "drafter": sorted(now["drafter"]),
        "data": ["max_length", "bucket_edges", "template_arguments"],
    }
    values = [(f"{name}.{key}", then[name].get(key), now[name][key]) for name, keys in fixed.items() for key in keys]
    values.append(("devices.compute_dtype", position.compute_dtype, dtype))
    for key, old, new in values:
        if old != new:
            raise UserError(f"{key} was {old!r} and is {new!r}; a resumed run must keep it")


def check_unfinished(position: Position, steps: int, records: str) -> None:
    """Raise `UserError` if the run is complete, or if its records are others than those it began with."""
    if position.step >= steps:
        raise UserError(f"the run is complete at step {position.step}; raise training.steps to go on")
    if position.records != records:
        raise UserError(
            "data.train: these are other records than those the run began with; a resumed run must keep them"
        )


def resolved(
    config: Config, drafter: DrafterArchitecture, mesh: Mesh, dtype: str, gamma: float, steps: int
) -> dict[str, Any]:
    """The recipe with every value that was left to the target, the data or the devices."""
    tree = config.model_dump(mode="json")
    tree["devices"] |= {**mesh.shape, "compute_dtype": dtype}
    tree["training"] |= {"steps": steps, "loss_decay_gamma": gamma}
    tree["drafter"] = render_drafter(drafter)
    return tree


def read_evaluation_prompts(config: Config) -> list[Conversation]:
    """The held-out prompts; empty without evaluation."""
    if config.evaluation.prompts is None:
        return []
    return read_prompts(embedded_path(config.evaluation.prompts), config.evaluation.limit)


def evaluation_row(step: int, report: Report) -> dict[str, Any]:
    """The row of an evaluation in `metrics.jsonl`."""
    return {
        "step": step,
        "eval/acceptance_length": report.acceptance_length,
        "eval/acceptance_length_pooled": report.acceptance_length_pooled,
        "eval/lossless": report.lossless,
        "eval/mismatches": len(report.mismatches),
        "eval/seconds_plain": report.seconds_plain,
        "eval/seconds_speculative": report.seconds_speculative,
    }


def make_sinks(config: Config, folder: RunFolder, position: Position, steps: int, resumed: bool) -> list[Sink]:
    """The sinks of a run. Weights & Biases is a convenience: without it the run goes on."""
    sinks: list[Sink] = [JsonlSink(folder.metrics), ConsoleSink(position.step, steps)]
    if config.telemetry.wandb != "disabled":
        mode, project = config.telemetry.wandb, config.telemetry.wandb_project
        values = config.model_dump(mode="json")
        try:
            sinks.append(WandbSink(mode, project, folder.path, values, position.wandb_id, resumed))
        except Exception as error:  # no login, no network: its many exceptions have no common base
            folder.event("warning", text=f"Weights & Biases does not start: {error}")
            print(f"warning: Weights & Biases does not start, the run goes on without it: {error}", file=sys.stderr)
    return sinks


def announce(compiled: Compiled) -> None:
    """A progress line for each executable."""
    shape = "" if compiled.edge is None else f" at {compiled.edge} tokens"
    memory = f"{compiled.temporary_bytes / 2**20:.0f} MiB temporaries"
    print(f"compiled {compiled.name}{shape} in {compiled.seconds:.1f} s, {memory} a device", file=sys.stderr)
