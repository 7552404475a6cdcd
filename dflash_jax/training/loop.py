"""train(config): the one place where everything meets. Read it from top to bottom."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from dflash_jax.config import Config
from dflash_jax.data.conversations import Conversation, read_prompts
from dflash_jax.decoding.evaluate import Evaluator, Report
from dflash_jax.decoding.prompts import encode_prompts
from dflash_jax.errors import Interrupted, UserError
from dflash_jax.models import weights
from dflash_jax.models.drafter import TrainedDrafter
from dflash_jax.models.huggingface import embedded_path
from dflash_jax.parallel import compiled_only
from dflash_jax.telemetry.sinks import ConsoleSink, JsonlSink, TensorBoardSink, WandbSink, truncate_rows
from dflash_jax.telemetry.stages import DRAFTER, StageClock
from dflash_jax.telemetry.stream import MetricStream, Row, Sink
from dflash_jax.training.best import Best
from dflash_jax.training.checkpoint import Checkpoints, Position, load_drafter_checkpoint
from dflash_jax.training.compiled import count_compiles
from dflash_jax.training.evaluation import evaluation_method
from dflash_jax.training.export import export_drafter
from dflash_jax.training.heldout import HeldOut
from dflash_jax.training.pipeline import Pipeline
from dflash_jax.training.rollback import Rollback, passed_over, read_rollbacks, roll_back
from dflash_jax.training.rows import RowMaker
from dflash_jax.training.rules import sizes
from dflash_jax.training.run_folder import RunFolder
from dflash_jax.training.setup import build, describe_models, lay_out, resolved
from dflash_jax.training.signals import stop_on_signals
from dflash_jax.training.step import abstract_state, module_names
from dflash_jax.training.utilisation import Utilisation
from dflash_jax.training.watch import HealthWatch, severe_steps


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
    compiles: list[str]
    """Functions that the steps compiled after warm-up: none. Evaluations and checkpoints, which compile their own at
    first use, are left out."""


def train(config: Config, resume: bool = False) -> Summary:
    """Run a recipe to its end, from the start or from its newest checkpoint.

    Where the monitor rolls back, the run goes on as a resumed one would.

    Raises:
        UserError: the recipe, its data or its devices do not fit; or the monitor halts.
        Interrupted: SIGINT or SIGTERM came; the state was saved first.
    """
    while isinstance(outcome := _train(config, resume), Rollback):
        resume = True
    return outcome


def _train(config: Config, resume: bool) -> Summary | Rollback:
    """Up to the end, or to where the monitor rolls back."""
    # ---- Devices, shapes, and every rule that needs no weights ---------------------------------------------------
    models = describe_models(config)
    meshes = models.meshes
    prompts = read_evaluation_prompts(config)

    # ---- Run folder and data -------------------------------------------------------------------------------------
    folder = RunFolder(config.run.folder)
    resumed = folder.open(resume)
    checkpoints = Checkpoints(folder.checkpoints, config.training.keep_checkpoints)
    rollbacks = read_rollbacks(folder)
    course = lay_out(config, models, folder, checkpoints.latest_position() if resumed else None, passed_over(rollbacks))
    position, steps, accumulation = course.position, course.steps, config.training.accumulation
    folder.write_config(config, resolved(config, models, course))
    limit = config.evaluation.max_new_tokens
    encoded = encode_prompts(prompts, course.tokenizer, models.target, limit, str(config.evaluation.prompts))

    # ---- Executables, weights, state -----------------------------------------------------------------------------
    engine = build(config, models, course)
    step, compiled, target = engine.step, engine.compiled, engine.target
    if resumed:
        state = checkpoints.restore(position.step, abstract_state(step, engine.settings))
        truncate_rows(folder.metrics, position.step)
    else:
        state = engine.first_state(config)
    evaluator = None
    if prompts:
        names = [prompt.id for prompt in prompts]
        evaluator = Evaluator(
            target,
            step.graph,
            models.drafter,
            encoded,
            names,
            limit,
            config.evaluation.batch_size,
            meshes.target,
            method=evaluation_method(config.evaluation),
            examine=HeldOut(target, step.graph, engine.settings, meshes.target),
        )
    on_target = weights.shardings(step.specs, meshes.target)

    # ---- The loop ------------------------------------------------------------------------------------------------
    folder.event("resumed" if resumed else "started", step=position.step, steps=steps, **sizes(meshes))
    with ExitStack() as closing, recorded_failure(folder, lambda: position.step):
        closing.callback(checkpoints.close)
        stages = StageClock(meshes.target.size, meshes.drafter.size, meshes.colocated, meshes.granularity)
        closing.callback(stages.close)
        sinks, alert = make_sinks(config, folder, position, steps, resumed)
        modules = module_names(step.specs)
        watch = HealthWatch(
            config.health, modules, folder.event, alert, rollbacks=len(rollbacks), severe=severe_steps(folder.events())
        )
        rows = RowMaker(engine.settings.edges, modules, config.health)

        def observe(step: int, values: Row, known: Row) -> list[Callable[[], None]]:
            rows.note(step, values)
            return watch.observe(step, values, known) if config.health.enabled else []

        stream = MetricStream(
            sinks,
            config.telemetry.log_every,
            window=stages.take,
            derive=Utilisation.of(engine.settings, meshes),
            render=rows,
            observe=observe,
        )
        closing.callback(stream.close)
        pipeline = engine.pipeline(config, course, stages)
        compiles = closing.enter_context(count_compiles())
        clock = Stopwatch(position.seconds, stream, stages, pipeline, compiles)

        def current_position() -> Position:
            return replace(position, reading=pipeline.position, seconds=clock.seconds)

        best = closing.enter_context(Best(folder, position.step)) if config.evaluation.keep_best else None

        def evaluate() -> Report:
            with clock.paused():
                report = evaluator.report(jax.device_put(state.params, on_target))
                stream.write(evaluation_row(position.step, report))
                if best:
                    stream.flush()  # the row that says what the checkpoint reached comes first
                    best.offer(report.acceptance_length, state, current_position())
            return report

        def save() -> None:
            with clock.paused():
                checkpoints.save(state, current_position())

        stop = closing.enter_context(stop_on_signals())
        before = evaluate() if evaluator and not resumed else None
        if config.health.rolls_back and not resumed:
            save()  # the first good checkpoint
        clock.restart()
        batch_ids: list[int] = []
        while position.step < steps:
            with compiled_only():
                state, batch = pipeline.accumulate(state)
                position = position.after_batch(batch)
                batch_ids.append(batch.batch_id)
                if position.batches % accumulation:
                    continue
                state, metrics = compiled.update(state)
            stages.dispatched(DRAFTER, metrics["loss"])
            position = position.after_step()
            stream.push(position.step, metrics, {**position.window.as_row(), "batch_ids": batch_ids})
            batch_ids = []
            if is_due(position.step, config.telemetry.log_every):
                position = position.with_new_window()
            if position.step == steps:
                break
            if evaluator and is_due(position.step, config.evaluation.every):
                evaluate()
            if stop.name or is_due(position.step, config.training.checkpoint_every):
                save()
            if watch.halt or watch.back:
                break
            if stop.name:
                raise Interrupted(f"{stop.name} at step {position.step}, state saved; go on with --resume")
        stream.flush()
        if watch.halt:
            save()
            raise UserError(f"halted after step {position.step}, state saved: {watch.halt}")
        if back := watch.suspects():
            return roll_back(back, watch.severe, config.health.good_after, checkpoints, folder, alert)
        after = evaluate() if evaluator else None
        save()
        stream.flush()

    # ---- The end -------------------------------------------------------------------------------------------------
    export = rounding = None
    if config.export.at_end:
        export = folder.export
        trained = TrainedDrafter(models.drafter, step.graph, state.params)
        if config.evaluation.keep_best:
            trained, _ = load_drafter_checkpoint(folder.best, meshes.drafter)
        rounding = export_drafter(trained, export, meshes.drafter, replace=True)
    folder.event("finished", step=position.step, training_seconds=clock.seconds, tokens=position.tokens)
    return Summary(folder.path, steps, position.tokens, clock.seconds, before, after, export, rounding, compiles)


class Stopwatch:
    """Training seconds: pauses are left out, the steps still in flight when one begins are not."""

    def __init__(
        self, seconds: float, stream: MetricStream, stages: StageClock, pipeline: Pipeline, compiles: list[str]
    ):
        self.seconds = seconds
        self._stream, self._stages, self._pipeline, self._compiles = stream, stages, pipeline, compiles
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Begin to count now."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for what is in flight, then leave the block out of all counts and out of the next step's seconds."""
        self._stream.flush()
        self._pipeline.settle()
        self._stages.pause()
        self.seconds += time.perf_counter() - self._since
        counted = len(self._compiles)
        yield
        del self._compiles[counted:]
        self.restart()
        self._stages.resume()
        self._stream.restart_clock()


@contextmanager
def recorded_failure(folder: RunFolder, step: Callable[[], int]) -> Iterator[None]:
    """Around the loop: what ends it early goes into `events.jsonl`, and on its way."""
    try:
        yield
    except Interrupted as reason:
        folder.event("interrupted", step=step(), reason=str(reason))
        raise
    except BaseException as error:
        folder.event("failed", step=step(), error=f"{type(error).__name__}: {error}")
        raise


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


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
        **{f"heldout/{name}": value for name, value in report.drafting.items()},
    }


def make_sinks(
    config: Config, folder: RunFolder, position: Position, steps: int, resumed: bool
) -> tuple[list[Sink], Callable[[str, str], None]]:
    """The sinks of a run, and what takes alerts. Weights & Biases is a convenience: without it the run goes on."""
    console = ConsoleSink(position.step, steps)
    sinks: list[Sink] = [JsonlSink(folder.metrics), console]
    alerts = [console.alert]
    if config.telemetry.wandb != "disabled":
        mode, project = config.telemetry.wandb, config.telemetry.wandb_project
        values = config.model_dump(mode="json")
        try:
            wandb = WandbSink(mode, project, folder.path, values, position.wandb_id, resumed)
        except Exception as error:  # no login, no network: its many exceptions have no common base
            folder.event("warning", text=f"Weights & Biases does not start: {error}")
            print(f"warning: Weights & Biases does not start, the run goes on without it: {error}", file=sys.stderr)
        else:
            sinks.append(wandb)
            alerts.append(wandb.alert)
    if config.telemetry.tensorboard:
        sinks.append(TensorBoardSink(folder.path / "tensorboard", position.step))

    def alert(title: str, text: str) -> None:
        for send in alerts:
            try:
                send(title, text)
            except Exception as error:  # an alert that cannot be sent must not end the training
                print(f"warning: the alert {title!r} was not sent: {error}", file=sys.stderr)

    return sinks, alert
