"""The tokenizer of the embedded target: byte-level BPE with the pre-tokenizer and the chat form of Qwen."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)

VOCABULARY_SIZE = 750
"""Tokens with the special ones. The embedding has a few rows more."""

# Qwen's: words with the space before them, single digits, runs of punctuation, line ends.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of `VOCABULARY_SIZE` tokens, learnt from the texts; the special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write the Hugging Face files; `context` is the longest sequence of the model, in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "additional_special_tokens": [TURN_START],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def chat_prompt(question: str) -> str:
    """What `CHAT_TEMPLATE` makes of one user turn, up to where the answer begins."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"
