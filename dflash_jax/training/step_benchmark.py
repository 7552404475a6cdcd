"""Seconds and memory of a drafter step, beside what the machine can do and what another implementation takes."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_jax.data.buckets import Bucket
from dflash_jax.data.loader import Batch
from dflash_jax.errors import UserError
from dflash_jax.models import weights
from dflash_jax.models.architecture import FULL, DrafterArchitecture, Rope, TargetArchitecture
from dflash_jax.models.target import Target
from dflash_jax.parallel import Meshes, compiler_options, compute_dtype, make_mesh
from dflash_jax.sections import DevicesSection, OptimizerSection, Remat
from dflash_jax.training.anchors import draw_anchors, eligible_anchors
from dflash_jax.training.flops import StepFlops, step_flops
from dflash_jax.training.optimizer import make_optimizer
from dflash_jax.training.state import Features, StepSettings, Tables, TrainState, tables_of
from dflash_jax.training.step import Step, abstract_features, abstract_state, init_state, make_step


@dataclass(frozen=True)
class Preset:
    """A step of one sequence a batch shard, all of its tokens supervised."""

    seq: int
    anchors: int
    block: int
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    taps: int
    remat: Remat = "none"


PRESETS = {
    "small": Preset(512, 64, 8, 4096, 256, 768, 8, 4, 32, 3, 3),
    "mid": Preset(1024, 128, 16, 8192, 512, 1536, 8, 4, 64, 5, 5),
    "qwen3-8b": Preset(3072, 512, 16, 151936, 4096, 12288, 32, 8, 128, 5, 5, remat="layer"),
}


@dataclass(frozen=True)
class Subject:
    """A step ready to run."""

    step: Step
    settings: StepSettings
    bucket: Bucket

    @classmethod
    def of(cls, preset: Preset, section: DevicesSection, **changes: Any) -> "Subject":
        """`changes`: of the settings."""
        mesh = make_mesh(section)
        shared: dict[str, Any] = {
            "vocab_size": preset.vocab,
            "hidden_size": preset.hidden,
            "intermediate_size": preset.intermediate,
            "num_heads": preset.heads,
            "num_kv_heads": preset.kv_heads,
            "head_dim": preset.head_dim,
            "rms_norm_eps": 1e-6,
            "rope": Rope(1e6),
            "tie_word_embeddings": False,
            "max_position_embeddings": 2 * preset.seq,
        }
        target = TargetArchitecture(
            family="qwen3",
            num_layers=preset.taps,
            qk_norm=True,
            qkv_bias=False,
            output_bias=False,
            **shared,
        )
        drafter = DrafterArchitecture(
            num_layers=preset.layers,
            block_size=preset.block,
            mask_token_id=preset.vocab - 1,
            target_layer_ids=tuple(range(preset.taps)),
            target_hidden_size=preset.hidden,
            num_target_layers=preset.taps,
            layer_types=(FULL,) * preset.layers,
            **shared,
        )
        schedule = optax.constant_schedule(6e-4)
        settings = StepSettings(
            drafter=drafter,
            target=target,
            optimizer=make_optimizer(OptimizerSection(), schedule),
            schedule=schedule,
            anchors=preset.anchors,
            gamma=7.0,
            compute_dtype=compute_dtype(section),
            edges=(preset.seq,),
            clip_norm=OptimizerSection().clip_norm,
            **{"remat": preset.remat} | changes,
        )
        step = make_step(settings, Meshes(mesh, mesh))
        return cls(step, settings, Bucket(preset.seq, Meshes(mesh, mesh).shards))

    def compile(self) -> tuple[Any, Any]:
        """`accumulate` and `update`, from shapes alone."""
        state, mesh = abstract_state(self.step, self.settings), self.step.meshes.drafter
        features = abstract_features(self.step, self.settings, self.bucket)
        accumulate = self.step.accumulate.lower(state, self._abstract_tables(), features).compile(
            compiler_options(mesh)
        )
        return accumulate, self.step.update.lower(state).compile(compiler_options(mesh))

    def draw(self) -> tuple[TrainState, Tables, Features]:
        """Random weights, tables and features."""
        rng = np.random.default_rng(0)

        def normal(abstract: jax.ShapeDtypeStruct, scale: float) -> jax.Array:
            values = rng.standard_normal(abstract.shape, np.float32) * scale
            return jax.device_put(values.astype(abstract.dtype), abstract.sharding)

        abstract = abstract_features(self.step, self.settings, self.bucket)
        shape = abstract.batch.tokens.shape
        batch = Batch(
            tokens=rng.integers(0, self.settings.target.vocab_size - 1, shape, np.int32),
            loss_mask=np.ones(shape, bool),
            lengths=np.full(shape[0], shape[1], np.int32),
            row_ids=np.arange(shape[0], dtype=np.int32),
            epoch=np.int32(0),
        )
        placed = jax.device_put(batch, jax.tree.map(lambda leaf: leaf.sharding, abstract.batch))
        taps = tuple(normal(tap, 1.0) for tap in abstract.taps)
        tables = jax.tree.map(lambda table: normal(table, 0.02), self._abstract_tables())
        return init_state(self.step, self.settings, 0, None), tables, Features(placed, taps)

    def flops(self, state: TrainState, batch: Batch) -> StepFlops:
        """Of this batch, whose anchors are drawn as the step draws them."""
        block = self.settings.drafter.block_size
        eligible = eligible_anchors(batch.loss_mask, batch.lengths, block)
        anchors, keep = draw_anchors(state.key, batch.epoch, batch.row_ids, eligible, self.settings.anchors)
        inside = anchors[:, :, None] + jnp.arange(1, block)[None, None, :] < batch.lengths[:, None, None]
        return step_flops(
            self.settings.drafter,
            self.settings.target.vocab_size,
            tokens=batch.tokens.size,
            blocks=anchors.size,
            visible=int(anchors.sum()),
            labels=int((inside & keep[:, :, None]).sum()),
        )

    def _abstract_tables(self) -> Tables:
        _, specs = weights.split(Target(self.settings.target))
        return tables_of(weights.abstract(specs, self.step.meshes.drafter, self.settings.compute_dtype))


def step_benchmark(
    name: str,
    section: DevicesSection,
    steps: int,
    rounds: int,
    against: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
    **changes: Any,
) -> dict[str, Any]:
    """Time `accumulate` and `update` of a preset together.

    Args:
        against: a command that runs the same preset with `--steps N` elsewhere and prints one JSON object with
            `step_seconds_median` and `step_seconds_min`; it runs in turn with ours, `rounds` times.
        changes: of the preset's settings, as `remat` and `scan_layers`.

    Returns:
        `preset`, `remat`, `scan_layers`; `step_seconds_median`, `step_seconds_min`; `compile_seconds` and
        `temporary_bytes` of the two executables; `flops` of a step by the formula; `peak_flops`, a second, of the
        machine's own matmul in this run, and `peak_share`. With `against`: `against_seconds_median` and `_min`, and
        `ratio`, ours over theirs, the median of pairs.

    Raises:
        UserError: the command fails, or prints something else.
    """
    subject = Subject.of(PRESETS[name], section, **changes)
    began = time.perf_counter()
    accumulate, update = subject.compile()
    compile_seconds = time.perf_counter() - began
    say(f"compiled in {compile_seconds:.1f} s")
    state, tables, features = subject.draw()
    flops = subject.flops(state, features.batch).total
    ours: list[float] = []
    theirs: list[dict[str, float]] = []
    pairs = []

    def run(state: TrainState, count: int) -> tuple[TrainState, list[float]]:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            state, _ = accumulate(state, tables, features)
            state, metrics = update(state)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - start)
        return state, seconds

    state, _ = run(state, 2)
    for number in range(rounds):
        if against and number % 2:
            theirs.append(_other(against, name, steps))
        state, seconds = run(state, steps)
        ours += seconds
        if against and not number % 2:
            theirs.append(_other(against, name, steps))
        text = f"round {number + 1}/{rounds}: {median(seconds):.4f} s a step"
        if against:
            pairs.append(median(seconds) / theirs[-1]["step_seconds_median"])
            text += f", theirs {theirs[-1]['step_seconds_median']:.4f} s, ratio {pairs[-1]:.3f}"
        say(text)
    # Simulated devices share one processor.
    devices = 1 if jax.default_backend() == "cpu" else subject.step.meshes.drafter.size
    peak = matmul_peak(subject.settings.compute_dtype) * devices
    report = {
        "preset": name,
        "remat": subject.settings.remat,
        "scan_layers": subject.settings.scan_layers,
        "step_seconds_median": round(median(ours), 4),
        "step_seconds_min": round(min(ours), 4),
        "compile_seconds": round(compile_seconds, 1),
        "flops": flops,
        "peak_flops": round(peak),
        "peak_share": round(flops / median(ours) / peak, 4),
        "temporary_bytes": {
            function: executable.memory_analysis().temp_size_in_bytes
            for function, executable in (("accumulate", accumulate), ("update", update))
        },
    }
    if against:
        report |= {
            "against_seconds_median": round(median(found["step_seconds_median"] for found in theirs), 4),
            "against_seconds_min": min(found["step_seconds_min"] for found in theirs),
            "ratio": round(median(pairs), 4),
        }
    return report


def matmul_peak(dtype: jax.typing.DTypeLike) -> float:
    """Floating-point operations a second of a large square matmul on one device, the best of several."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready(multiply(x, x))
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds[1:])


def _other(command: Sequence[str], preset: str, steps: int) -> dict[str, float]:
    whole = [*command, "--preset", preset, "--steps", str(steps)]
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}  # ours, see cli.py
    try:
        done = subprocess.run(whole, capture_output=True, text=True, check=True, env=environment)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return {key: float(found[key]) for key in ("step_seconds_median", "step_seconds_min")}
    except OSError as error:
        raise UserError(f"--against: {whole[0]} does not start: {error}") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["nothing"]
        raise UserError(f"--against: {' '.join(whole)} ends with {error.returncode}: {said[-1]}") from error
    except (json.JSONDecodeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"--against: {' '.join(whole)} prints no JSON object with the seconds of a step") from error
