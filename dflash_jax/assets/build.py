"""The making of the embedded quickstart folder: tokenizer, target, and prompts answered by that target.

The conversations that the target learns from, the training prompts and the held-out prompts come from different seeds,
and a question of the two prompt files is never shown to the target, not even by chance.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from dflash_jax.assets.answers import answer, mean_loss, right_by_task, write_answers
from dflash_jax.assets.conversations import exchanges
from dflash_jax.assets.pretraining import batches, encode, train
from dflash_jax.assets.tasks.drawing import Exchange
from dflash_jax.assets.tokenizer import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, save_tokenizer, train_tokenizer
from dflash_jax.models.architecture import parse_target
from dflash_jax.models.huggingface import load_target, save_target
from dflash_jax.parallel import mesh_of

SPLITS = ("target", "train", "heldout")
"""Each has a seed of its own."""

TRAIN_PROMPTS, HELDOUT_PROMPTS = 1600, 48
TOKENIZER_EXCHANGES = 6000

TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 768,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
    "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
}
"""The target's `config.json`: about 1.3 million weights, 2.6 MB in bfloat16."""


def split_seed(split: str, seed: int) -> int:
    """Seed of a split's conversations; no two pairs of split and seed share one."""
    return seed * len(SPLITS) + SPLITS.index(split)


def prompts(split: str, seed: int, number: int, taken: frozenset[str] = frozenset()) -> dict[str, Exchange]:
    """`number` exchanges of a split by id (task and running number), without repeated or `taken` questions."""
    found: dict[str, Exchange] = {}
    questions = set(taken)
    for index, (task, exchange) in enumerate(exchanges(split_seed(split, seed))):
        if len(found) == number:
            return found
        if exchange.question not in questions:
            questions.add(exchange.question)
            found[f"{task}-{index}"] = exchange


def prompt_sets(seed: int) -> tuple[dict[str, Exchange], dict[str, Exchange]]:
    """Training and held-out prompts; no question stands in both."""
    heldout = prompts("heldout", seed, HELDOUT_PROMPTS)
    return prompts("train", seed, TRAIN_PROMPTS, questions_of(heldout)), heldout


def questions_of(*sets: dict[str, Exchange]) -> frozenset[str]:
    """The questions of some prompt sets."""
    return frozenset(exchange.question for one in sets for exchange in one.values())


def target_exchanges(seed: int, reserved: frozenset[str]) -> Iterator[Exchange]:
    """Endless exchanges for the target's training, without the `reserved` questions."""
    made = exchanges(split_seed("target", seed))
    return (exchange for _, exchange in made if exchange.question not in reserved)


def make_tokenizer(folder: Path, seed: int) -> Tokenizer:
    """Train the tokenizer on the first conversations of the target's training, and write its files."""
    reserved = questions_of(*prompt_sets(seed))
    first = list(islice(target_exchanges(seed, reserved), TOKENIZER_EXCHANGES))
    tokenizer = train_tokenizer(
        text for exchange in first for text in (f"user\n{exchange.question}", f"assistant\n{exchange.answer}")
    )
    save_tokenizer(tokenizer, folder, TARGET_CONFIG["max_position_embeddings"])
    return tokenizer


def make_target(folder: Path, seed: int, steps: int, report: Callable[[int, float], None]) -> None:
    """Train the target and write its config and its weights in bfloat16, next to the tokenizer.

    Args:
        report: called with each step and its loss (nats a token).
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reserved = questions_of(*prompt_sets(seed))
    rows = (encode(tokenizer, exchange) for exchange in target_exchanges(seed, reserved))
    stream = batches(rows, np.random.default_rng(seed))
    _, params = train(parse_target(TARGET_CONFIG, "TARGET_CONFIG"), stream, steps, seed, report)
    save_target(folder, params, TARGET_CONFIG)
    generation = {key: TARGET_CONFIG[key] for key in ("eos_token_id", "pad_token_id")} | {"do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable for its owner only


@dataclass(frozen=True)
class Quality:
    """How good a target is on the questions that were kept from it."""

    loss: float
    """Nats a token, on the answers of the program; the free choices in them keep it above zero."""
    tasks: dict[str, tuple[int, int]]
    """Task -> (right answers, answers)."""
    rows: dict[str, int]
    """File -> rows written."""


def make_answers(folder: Path, seed: int) -> Quality:
    """Answer both prompt sets with the saved target; write `train.jsonl` and `heldout.jsonl` next to it."""
    mesh = mesh_of((1, 1, 1))
    tokenizer, target = Tokenizer.from_file(str(folder / "tokenizer.json")), load_target(folder, mesh, jnp.float32)
    sets = dict(zip(("train.jsonl", "heldout.jsonl"), prompt_sets(seed), strict=True))
    answered = {name: answer(target, tokenizer, exchanges, mesh) for name, exchanges in sets.items()}
    rows = {name: write_answers(folder / name, some) for name, some in answered.items()}
    return Quality(
        loss=mean_loss(target, tokenizer, [exchange for one in sets.values() for exchange in one.values()]),
        tasks=right_by_task([one for some in answered.values() for one in some]),
        rows=rows,
    )
