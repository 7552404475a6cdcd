"""Evaluate a drafter from files: what `scripts/evaluate.py` calls."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dflash_jax.cli import Progress
from dflash_jax.config import PAPER_DECAY_GAMMA, d_pace_alpha
from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.conversations import read_prompts
from dflash_jax.decoding.budget import measure_budgets
from dflash_jax.decoding.evaluate import Evaluator, Report
from dflash_jax.decoding.methods import speculative_decoder
from dflash_jax.decoding.prompts import batch_prompts, encode_prompts
from dflash_jax.decoding.sampling import Sampling
from dflash_jax.decoding.speculative import CHAIN, Method
from dflash_jax.models import weights
from dflash_jax.models.architecture import DrafterArchitecture, check_mesh, check_pair
from dflash_jax.models.drafter import Drafter, TrainedDrafter
from dflash_jax.models.huggingface import embedded_path, load_target, read_target_architecture, resolve_folder
from dflash_jax.models.target import FrozenTarget
from dflash_jax.parallel import compute_dtype, make_mesh
from dflash_jax.sections import DevicesSection, EvaluationSection, MetricsSection, TrainingSection
from dflash_jax.training.checkpoint import Position
from dflash_jax.training.export import open_drafter
from dflash_jax.training.heldout import HeldOut
from dflash_jax.training.state import DraftSettings


@dataclass(frozen=True)
class EvaluationSettings:
    """How to decode and what to measure."""

    method: Method = CHAIN
    measured_budget: bool = False
    """Choose the tree's budget by measured costs; the method's own is only where it starts."""
    block_size: int | None = None
    """Draft in blocks of another size than the drafter was trained for."""
    max_new_tokens: int = 128
    batch_size: int = 8
    limit: int | None = None
    seed: int = 0
    split_seconds: bool = False
    template_arguments: dict[str, Any] | None = None
    """None: a run's own, so that prompts look as they did in training."""
    tree_blocks: int = MetricsSection().blocks
    """Blocks a batch, about, whose draft trees are looked at in the training layout."""


def evaluation_method(section: EvaluationSection) -> Method:
    """The method of the evaluations of a run."""
    return Method(section.method, Sampling(section.temperature), budget=section.budget)


@dataclass(frozen=True)
class Subjects:
    """What is evaluated: both models in place, and the prompts by file."""

    mesh: Mesh
    target: FrozenTarget
    drafter: TrainedDrafter
    names: dict[str, list[str | int]]
    encoded: dict[str, list[list[int]]]
    layout: DraftSettings
    """The run's objective, for the same answers in the training layout."""
    warnings: tuple[str, ...]

    def evaluator(self, file: str, settings: EvaluationSettings, advance: Callable[[int], None]) -> Evaluator:
        """Of one file of prompts."""
        layout = replace(self.layout, tree_blocks=settings.tree_blocks)
        return Evaluator(
            self.target,
            self.drafter.graph,
            self.drafter.arch,
            self.encoded[file],
            self.names[file],
            settings.max_new_tokens,
            settings.batch_size,
            self.mesh,
            method=settings.method,
            seed=settings.seed,
            split_seconds=settings.split_seconds,
            advance=advance,
            examine=HeldOut(self.target, self.drafter.graph, layout, self.mesh),
        )


def open_subjects(
    target: str, drafter: str, prompts: Sequence[str], settings: EvaluationSettings, devices: DevicesSection
) -> Subjects:
    """Load a target and a drafter (run folder, checkpoint, exported or published folder) and encode the prompts.

    Raises:
        UserError: an input is missing or damaged, or the drafter is of another target.
    """
    mesh = make_mesh(devices)
    folder = resolve_folder(target)
    arch = read_target_architecture(folder)
    files = {name: read_prompts(embedded_path(name), settings.limit) for name in prompts}
    path = Path(drafter)
    opened, position = open_drafter(path if path.exists() else resolve_folder(drafter), mesh)
    check_pair(opened.arch, arch, drafter)
    check_mesh(arch, opened.arch, mesh.shape)
    warnings = []
    if settings.block_size is not None:
        if settings.block_size > opened.arch.block_size:
            warnings.append(f"block size {settings.block_size} is larger than trained ({opened.arch.block_size})")
        opened = _with_block_size(opened, settings.block_size)
    arguments = settings.template_arguments
    if arguments is None:
        arguments = position.config["data"]["template_arguments"] if position else {}
    tokenizer = ChatTokenizer(folder, arguments)
    if position is not None and tokenizer.fingerprint not in position.records.split("/"):
        warnings.append("tokenizer, chat template or its arguments differ from those of the training data")
    limit = settings.max_new_tokens
    encoded = {name: encode_prompts(found, tokenizer, arch, limit, name) for name, found in files.items()}
    dtype = compute_dtype(devices)
    return Subjects(
        mesh=mesh,
        target=load_target(folder, mesh, dtype),
        drafter=opened,
        names={name: [conversation.id for conversation in found] for name, found in files.items()},
        encoded=encoded,
        layout=_layout(position, opened.arch, dtype),
        warnings=tuple(warnings),
    )


def evaluate_files(
    target: str,
    drafter: str,
    prompts: Sequence[str],
    settings: EvaluationSettings,
    devices: DevicesSection,
    progress: Progress,
) -> dict[str, Report]:
    """The acceptance report of a drafter by file of prompts.

    Raises:
        UserError: as `open_subjects`.
    """
    subjects = open_subjects(target, drafter, prompts, settings, devices)
    if settings.measured_budget:
        settings = replace(settings, method=_measured(subjects, settings))
    reports = {}
    with progress(2 * sum(map(len, subjects.encoded.values()))) as advance:  # decoded plainly and speculatively
        for file in prompts:
            report = subjects.evaluator(file, settings, advance).report(subjects.drafter.params)
            reports[file] = report.with_warnings(*subjects.warnings)
    return reports


def _with_block_size(drafter: TrainedDrafter, block_size: int) -> TrainedDrafter:
    arch = replace(drafter.arch, block_size=block_size)
    return TrainedDrafter(arch, weights.split(Drafter(arch))[0], drafter.params)


def _measured(subjects: Subjects, settings: EvaluationSettings) -> Method:
    """With the budget that promises most tokens a second on these devices."""
    target, drafter, method = subjects.target, subjects.drafter, settings.method
    prompts = next(iter(subjects.encoded.values()))
    batch = next(iter(batch_prompts(prompts, settings.batch_size, subjects.mesh)))
    decode = speculative_decoder(target, drafter.graph, drafter.arch, settings.max_new_tokens, method)
    params = target.params, drafter.params
    found = measure_budgets(decode, params, batch, subjects.mesh, method.force_spine)
    best = max(found, key=lambda candidate: candidate.tokens_per_second)
    return replace(method, budget=best.budget)


def _layout(position: Position | None, arch: DrafterArchitecture, dtype: jax.typing.DTypeLike) -> DraftSettings:
    """With the objective of the drafter's run.

    Without a run: cross-entropy by the paper's decay; where that has none for the block size, all offsets weigh the
    same.
    """
    training = TrainingSection.model_validate(position.config["training"]) if position else TrainingSection(steps=0)
    return DraftSettings(
        drafter=arch,
        gamma=training.loss_decay_gamma or PAPER_DECAY_GAMMA.get(arch.block_size, math.inf),
        compute_dtype=dtype,
        loss=training.loss,
        weighting=training.position_weights,
        d_pace_alpha=d_pace_alpha(training),
        target_attention="reference",
    )
