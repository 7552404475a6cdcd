"""Tasks with numbers: counting, times tables, simple sums, sorting."""

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v
from dflash_jax.assets.tasks.drawing import Exchange, asked, between, choose, draw


def count_up(rng: Generator) -> Exchange:
    """Counts up by 1, 2, 5 or 10."""
    numbers = _evenly_spaced(rng)
    request = f"count up from {numbers[0]} to {numbers[-1]} by {numbers[1] - numbers[0]}"
    return asked(rng, request, ", ".join(map(str, numbers)))


def count_down(rng: Generator) -> Exchange:
    """Counts down by 1, 2, 5 or 10."""
    numbers = _evenly_spaced(rng)[::-1]
    request = f"count down from {numbers[0]} to {numbers[-1]} by {numbers[0] - numbers[1]}"
    return asked(rng, request, ", ".join(map(str, numbers)))


def _evenly_spaced(rng: Generator) -> list[int]:
    """From a multiple of the step on; the larger the step, the fewer digits its numbers have on top of it."""
    step, terms = choose(rng, (1, 2, 5, 10)), between(rng, 15, 20)
    start = step * between(rng, 0, 60 // step)
    return list(range(start, start + step * terms, step))


def times_table(rng: Generator) -> Exchange:
    """Writes a times table in order."""
    factor, last = between(rng, 2, 10), between(rng, 7, 10)
    text = "\n".join(f"{i} x {factor} = {i * factor}" for i in range(1, last + 1))
    return asked(rng, f"write the times table of {factor} up to {last}", text)


def add_two(rng: Generator) -> Exchange:
    """Adds two numbers of one digit in a worked example."""
    a, b, thing = between(rng, 1, 9), between(rng, 1, 9), choose(rng, v.OBJECTS)
    text = (
        f"We start with {a} from the first {thing}.\n"
        f"Then we get {b} more from the second {thing}.\n"
        f"To find out how many there are, we add the two numbers: {a} + {b} = {a + b}.\n"
        f"So the answer is {a + b}."
    )
    return asked(rng, f"add {a} from one {thing} and {b} from another {thing}", text)


def add_three(rng: Generator) -> Exchange:
    """Adds three numbers of one digit, step by step."""
    a, b, c = (between(rng, 1, 9) for _ in range(3))
    text = (
        "We add the numbers one by one.\n"
        f"The first step is {a} + {b} = {a + b}.\n"
        f"The second step is {a + b} + {c} = {a + b + c}.\n"
        f"There are no more numbers, so the sum is {a + b + c}."
    )
    return asked(rng, f"find the sum {a} + {b} + {c}", text)


def sort_numbers(rng: Generator) -> Exchange:
    """Sorts three or four numbers of one digit."""
    numbers = draw(rng, range(1, 10), between(rng, 3, 4))
    ordered = sorted(numbers)
    text = (
        f"The smallest of the numbers is {ordered[0]}.\n"
        + "".join(f"The next one after that is {number}.\n" for number in ordered[1:-1])
        + f"The largest of the numbers is {ordered[-1]}.\nSo the order is {', '.join(map(str, ordered))}."
    )
    return asked(rng, f"sort the numbers {', '.join(map(str, numbers))}", text)
