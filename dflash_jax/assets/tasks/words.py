"""Tasks with words: copying and spelling."""

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v
from dflash_jax.assets.tasks.drawing import Exchange, asked, between, choose


def copy_word(rng: Generator) -> Exchange:
    """Copies a word in numbered lines."""
    word, times = choose(rng, v.WORDS), between(rng, 8, 16)
    return asked(rng, f"write {word} {times} times", "\n".join(f"{i}. {word}" for i in range(1, times + 1)))


def spell(rng: Generator) -> Exchange:
    """Spells a word letter by letter."""
    word = choose(rng, v.WORDS)
    letters = "".join(f"The {ordinal} letter is {letter}.\n" for ordinal, letter in zip(v.ORDINALS, word, strict=False))
    return asked(rng, f"spell {word}", f"{letters}That is how you spell the word {word}.")
