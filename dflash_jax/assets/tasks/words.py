"""Tasks with words: copying, numbering, sorting, reversing, spelling, patterns."""

import string

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v
from dflash_jax.assets.tasks.drawing import Exchange, between, choose, draw, framed, opened, spoken


def copy_words(rng: Generator) -> Exchange:
    """Copies words on several lines, joined by a given sign."""
    words = draw(rng, v.WORDS, between(rng, 3, 6))
    times = between(rng, 3, 5 if len(words) < 5 else 4)
    name, sep = choose(rng, (("commas", ", "), ("dashes", " - "), ("plus signs", " + "), ("spaces", " ")))
    text = "\n".join([sep.join(words)] * times)
    question = choose(
        rng,
        (
            f"Repeat {times} times with {name}: {' '.join(words)}",
            f"Write these words {times} times, one line each, with {name} between them: {' '.join(words)}",
        ),
    )
    return Exchange(question, opened(rng, text), (text,))


def number_words(rng: Generator) -> Exchange:
    """Copies words into a list that is numbered from a given start."""
    words = draw(rng, v.WORDS, between(rng, 5, 9))
    first = between(rng, 1, 20)
    mark = choose(rng, (".", ")", ":"))
    text = "\n".join(f"{i}{mark} {word}" for i, word in enumerate(words, start=first))
    question = choose(rng, ("Number these from {}{} on: {}.", "Make a list that starts at {}{} with: {}."))
    question = question.format(first, mark, ", ".join(words))
    return Exchange(question, framed(rng, text), (text,))


def sort_words(rng: Generator) -> Exchange:
    """Sorts words by the alphabet."""
    words = draw(rng, v.WORDS, between(rng, 6, 9))
    ordered = sorted(words)
    question = choose(
        rng, ("Sort by the alphabet: {}.", "Put these words in alphabetical order: {}.", "From A to Z: {}.")
    )
    ending = choose(
        rng, (f" It begins with {ordered[0]} and ends with {ordered[-1]}.", f" The last word is {ordered[-1]}.", "")
    )
    answer = opened(rng, ", ".join(ordered) + "." + ending)
    return Exchange(question.format(", ".join(words)), answer, (", ".join(ordered),))


def reverse(rng: Generator) -> Exchange:
    """Turns a list of words or numbers around."""
    if between(rng, 0, 1):
        items = draw(rng, v.WORDS, between(rng, 6, 10))
    else:
        items = [str(between(rng, 0, 99)) for _ in range(between(rng, 8, 12))]
    text = ", ".join(reversed(items))
    question = choose(
        rng, ("Reverse this list: {}.", "Write it backwards, item by item: {}.", "Read from the end: {}.")
    )
    return Exchange(question.format(", ".join(items)), framed(rng, text + "."), (text,))


def spell(rng: Generator) -> Exchange:
    """Spells words and counts their letters."""
    words = draw(rng, v.WORDS, between(rng, 3, 4))
    sep = choose(rng, ("-", " "))
    text = "\n".join(f"{word}: {sep.join(word)}, {len(word)} letters" for word in words)
    question = choose(rng, ("Spell {} with {}.", "How do you write {}? Put {} between the letters."))
    question = question.format(spoken(words), "dashes" if sep == "-" else "spaces")
    return Exchange(question, framed(rng, text), (text,))


def pattern(rng: Generator) -> Exchange:
    """Goes on with a repeated pattern."""
    cycle = draw(rng, choose(rng, (v.COLOURS, v.ANIMALS, string.ascii_uppercase, string.digits)), between(rng, 2, 4))
    shown, length = len(cycle) * 2, between(rng, 12, 20)
    text = ", ".join(cycle[(shown + i) % len(cycle)] for i in range(length))
    question = choose(rng, ("Continue with {} more: {}", "What comes next? Give {} items: {}")).format(
        length, ", ".join(cycle * 2)
    )
    return Exchange(question, framed(rng, text + "."), (", ".join(cycle * 3),))
