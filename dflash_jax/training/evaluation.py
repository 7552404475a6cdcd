"""Evaluate a drafter from files: what `scripts/evaluate.py` calls."""

import math
from pathlib import Path
from typing import Any

from dflash_jax.cli import Progress
from dflash_jax.config import PAPER_DECAY_GAMMA, decay_gamma
from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.conversations import read_prompts
from dflash_jax.decoding.evaluate import Evaluator, Report
from dflash_jax.decoding.prompts import encode_prompts
from dflash_jax.models.architecture import check_mesh, check_pair
from dflash_jax.models.huggingface import embedded_path, load_target, read_target_architecture, resolve_folder
from dflash_jax.parallel import compute_dtype, make_mesh
from dflash_jax.sections import DevicesSection, MetricsSection, TrainingSection
from dflash_jax.training.checkpoint import Position
from dflash_jax.training.export import open_drafter
from dflash_jax.training.heldout import HeldOut
from dflash_jax.training.state import DraftSettings


def evaluate_files(
    target: str,
    drafter: str,
    prompts: str,
    *,
    max_new_tokens: int,
    batch_size: int,
    limit: int | None,
    template_arguments: dict[str, Any] | None,
    devices: DevicesSection,
    progress: Progress,
    tree_blocks: int = MetricsSection().blocks,
) -> Report:
    """The acceptance report of a drafter (run folder, checkpoint, exported or published folder) on a JSONL of prompts.

    Without `template_arguments`, a run's own are used: prompts look as they did in training.

    Raises:
        UserError: an input is missing or damaged, or the drafter is of another target.
    """
    mesh = make_mesh(devices)
    folder = resolve_folder(target)
    arch = read_target_architecture(folder)
    conversations = read_prompts(embedded_path(prompts), limit)
    path = Path(drafter)
    opened, position = open_drafter(path if path.exists() else resolve_folder(drafter), mesh)
    if template_arguments is None:
        template_arguments = position.config["data"]["template_arguments"] if position else {}
    check_pair(opened.arch, arch, drafter)
    check_mesh(arch, opened.arch, mesh.shape)
    tokenizer = ChatTokenizer(folder, template_arguments)
    encoded = encode_prompts(conversations, tokenizer, arch, max_new_tokens, prompts)
    names = [conversation.id for conversation in conversations]
    dtype = compute_dtype(devices)
    loaded = load_target(folder, mesh, dtype)
    settings = DraftSettings(
        drafter=opened.arch,
        gamma=_gamma(position, opened.arch.block_size),
        compute_dtype=dtype,
        tree_blocks=tree_blocks,
    )
    with progress(2 * len(names)) as advance:  # each prompt is decoded plainly and with the drafter
        evaluator = Evaluator(
            loaded,
            opened.graph,
            opened.arch,
            encoded,
            names,
            max_new_tokens,
            batch_size,
            mesh,
            advance,
            examine=HeldOut(loaded, opened.graph, settings, mesh),
        )
        return evaluator.report(opened.params)


def _gamma(position: Position | None, block_size: int) -> float:
    """The run's; of a drafter without a run the paper's; where that has none, every offset weighs the same."""
    if position is None:
        return PAPER_DECAY_GAMMA.get(block_size, math.inf)
    return decay_gamma(TrainingSection.model_validate(position.config["training"]), block_size)
