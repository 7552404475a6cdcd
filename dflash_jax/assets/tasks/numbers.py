"""Tasks with numbers: counting, sorting, adding, times tables."""

from numpy.random import Generator

from dflash_jax.assets.tasks.drawing import Exchange, between, choose, draw, framed, opened


def count(rng: Generator) -> Exchange:
    """Counts up or down in equal steps."""
    step, terms, down = between(rng, 1, 9), between(rng, 9, 15), between(rng, 0, 2) == 0
    start = between(rng, 0, 40) + (step * terms if down else 0)
    numbers = [start + (-step if down else step) * i for i in range(terms)]
    text = ", ".join(map(str, numbers))
    question = choose(
        rng,
        (
            f"Count {'down ' if down else ''}from {start} to {numbers[-1]} by {step}.",
            f"Start at {start} and go {'down' if down else 'up'} in steps of {step} until {numbers[-1]}.",
            f"List the numbers from {start} to {numbers[-1]}, step {step}.",
        ),
    )
    return Exchange(question, framed(rng, text + "."), (text,))


def sort_numbers(rng: Generator) -> Exchange:
    """Sorts numbers of two digits."""
    numbers = draw(rng, range(10, 100), between(rng, 5, 8))
    down = between(rng, 0, 2) == 0
    text = ", ".join(map(str, sorted(numbers, reverse=down)))
    order = choose(
        rng, ("from large to small", "in falling order") if down else ("from small to large", "in rising order")
    )
    verb = choose(rng, ("Sort", "Order", "Arrange"))
    question = f"{verb} these numbers {order}: {', '.join(map(str, numbers))}."
    body = choose(rng, ("Sorted: {}.", "The order is {}.", "{}.")).format(text)
    return Exchange(question, framed(rng, f"{body} The first is {text.split(', ')[0]}."), (text,))


def add_columns(rng: Generator) -> Exchange:
    """Adds two numbers column by column, with carries."""
    a, b = between(rng, 100, 899), between(rng, 100, 899)
    lines, carry = [], 0
    for place, scale in (("Ones", 1), ("Tens", 10), ("Hundreds", 100)):
        x, y = a // scale % 10, b // scale % 10
        total = x + y + carry
        terms = f"{x} + {y} + {carry}" if carry else f"{x} + {y}"
        carry = total // 10
        lines.append(f"{place}: {terms} = {total}, write {total % 10}" + (f", carry {carry}." if carry else "."))
    question = choose(rng, (f"Add {a} and {b} step by step.", f"What is {a} + {b}? Show the steps."))
    last = choose(rng, ("The sum is {}.", "So {a} + {b} = {}.", "Answer: {}.")).format(a + b, a=a, b=b)
    return Exchange(question, opened(rng, "\n".join([*lines, last])), (f"{a + b}.",))


def add_up(rng: Generator) -> Exchange:
    """Adds a list of digits, one line a step."""
    numbers = [between(rng, 1, 9) for _ in range(between(rng, 5, 8))]
    lines, total = [], numbers[0]
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    question = choose(rng, ("Add up {}.", "Find the sum of {}.", "Sum these one by one: {}.")).format(
        ", ".join(map(str, numbers))
    )
    last = choose(rng, (f"The total is {total}.", f"Together: {total}.", f"The answer is {total}."))
    return Exchange(question, opened(rng, "\n".join([*lines, last])), (f"{total}.",))


def times_table(rng: Generator) -> Exchange:
    """Writes a stretch of a times table."""
    factor, first = between(rng, 2, 12), between(rng, 1, 6)
    last = first + between(rng, 5, 8)
    sign = choose(rng, ("x", "*"))
    text = "\n".join(f"{i} {sign} {factor} = {i * factor}" for i in range(first, last + 1))
    question = choose(
        rng,
        (
            f"Write the {factor} times table from {first} to {last} with {sign}.",
            f"Show me the table of {factor}, from {first} {sign} {factor} to {last} {sign} {factor}.",
        ),
    )
    return Exchange(question, framed(rng, text), (text,))
