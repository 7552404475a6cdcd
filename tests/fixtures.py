"""Folders on disk that several tests read: a tokenizer with a chat template, a whole tiny target."""

import json

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dflash_jax.models import weights
from dflash_jax.models.huggingface import save_drafter
from dflash_jax.models.target import Target
from tests.helpers import make_drafter, tiny_drafter, tiny_target

VOCABULARY = 300
"""Three special tokens, 256 bytes and some merges; the tiny target has `ROWS` embedding rows."""
ROWS = 320
END, TURN_START, TURN_END = 0, 1, 2

CHATML = (
    "{%- if system is defined %}{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_TEXTS = [
    "user\nWhat is the capital of France?",
    "assistant\nThe capital of France is Paris.",
    "user\nWhat is the sum of one and two?",
    "assistant\nThe sum of one and two is three.",
] * 4


def save_tokenizer(folder, template=CHATML):
    """A byte-level BPE tokenizer with a few merges, as a Hugging Face folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def target_config(arch, **changes):
    """The `config.json` that Hugging Face would write for a tiny target."""
    config = {
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_theta": arch.rope.theta,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "max_position_embeddings": arch.max_position_embeddings,
        "eos_token_id": TURN_END,
    }
    return config | changes


def random_tensors(module, seed=0):
    """Random float32 values for every weight of a module, by published name."""
    rng = np.random.default_rng(seed)
    specs = weights.by_name(weights.split(module)[1])
    return {name: rng.standard_normal(specs[name].shape).astype(np.float32) for name in sorted(specs)}


def save_tiny_target(folder, arch, tensors=None, **config):
    """A single-file checkpoint folder written with safetensors itself; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(random_tensors(Target(arch)) if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(target_config(arch, **config)))
    return folder


def save_chat_target(folder):
    """A tiny target with its tokenizer: all that a script needs."""
    return save_tokenizer(save_tiny_target(folder, tiny_target(vocab_size=ROWS)))


def save_tiny_drafter(folder, target=None, **changes):
    """An exported drafter of the tiny target."""
    target = target or tiny_target(vocab_size=ROWS)
    save_drafter(folder, make_drafter(tiny_drafter(target, **changes)))
    return folder


def write_jsonl(path, *rows):
    """One line a row; texts are written as they are. Returns the path."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def conversation(*contents, **fields):
    """Turns of user and assistant in alternation, as a row."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {**fields, "messages": messages}
