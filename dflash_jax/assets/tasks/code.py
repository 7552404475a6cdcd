"""Tasks with small templates of code and JSON."""

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v
from dflash_jax.assets.tasks.drawing import Exchange, between, choose, draw, opened, spoken


def function(rng: Generator) -> Exchange:
    """Writes a function of two arguments; the name of the result is free."""
    name, (a, b), total = choose(rng, v.FUNCTIONS), draw(rng, v.VARIABLES, 2), choose(rng, v.TOTALS)
    verb, sign = choose(rng, (("adds", "+"), ("multiplies", "*"), ("subtracts", "-"), ("divides", "/")))
    code = f"def {name}({a}, {b}):\n    {total} = {a} {sign} {b}\n    return {total}"
    question = choose(
        rng, (f"Write a function {name} that {verb} {a} and {b}.", f"Python: {name} {verb} {a} and {b}. Show the code.")
    )
    x, y = between(rng, 2, 9), between(rng, 2, 9)
    call = choose(rng, ("", f"\n\nprint({name}({x}, {y}))", f"\n\nCall it with {name}({x}, {y})."))
    return Exchange(question, opened(rng, code + call), (f"def {name}({a}, {b}):", f"= {a} {sign} {b}\n    return"))


def filter_loop(rng: Generator) -> Exchange:
    """Writes a function that sums the items on one side of a limit."""
    name, item, total, limit = (
        choose(rng, v.FUNCTIONS),
        choose(rng, v.VARIABLES),
        choose(rng, v.TOTALS),
        between(rng, 1, 99),
    )
    word, sign = choose(rng, (("above", ">"), ("below", "<"), ("equal to", "==")))
    code = (
        f"def {name}(items):\n    {total} = 0\n    for {item} in items:\n        if {item} {sign} {limit}:\n"
        f"            {total} += {item}\n    return {total}"
    )
    question = choose(
        rng,
        (
            f"Write a function {name} that sums each {item} {word} {limit} into {total}.",
            f"Python: {name} adds every {item} {word} {limit} to {total}. Show the code.",
        ),
    )
    return Exchange(question, opened(rng, code), (code,))


def print_loop(rng: Generator) -> Exchange:
    """Writes a loop and what it prints."""
    index, factor, length = choose(rng, ("i", "j", "k", "n")), between(rng, 2, 9), between(rng, 5, 9)
    code = f"for {index} in range({length}):\n    print({index} * {factor})"
    printed = ", ".join(str(factor * i) for i in range(length))
    question = choose(
        rng,
        (
            "Write a loop over {} that prints {} multiples of {}.",
            "Loop with {}: print {} multiples of {}, and the output.",
        ),
    )
    ending = choose(rng, ("It prints", "Output:", "The output is"))
    return Exchange(
        question.format(index, length, factor), opened(rng, f"{code}\n\n{ending} {printed}."), (code, printed)
    )


def class_template(rng: Generator) -> Exchange:
    """Writes a class with its fields."""
    name, fields = choose(rng, v.CLASSES), draw(rng, v.FIELDS, between(rng, 2, 4))
    code = f"class {name}:\n    def __init__(self, {', '.join(fields)}):\n" + "\n".join(
        f"        self.{f} = {f}" for f in fields
    )
    question = choose(rng, ("Write a class {} with {}.", "Python: a class {} that holds {}."))
    return Exchange(question.format(name, spoken(fields)), opened(rng, code), (code,))


def record(rng: Generator) -> Exchange:
    """Turns sentences into JSON lines."""
    people = list(
        zip(draw(rng, v.NAMES, 3), [between(rng, 10, 80) for _ in range(3)], draw(rng, v.PLACES, 3), strict=True)
    )
    people = people[: between(rng, 2, 3)]
    text = "\n".join(f'{{"name": "{n}", "age": {a}, "place": "{p}"}}' for n, a, p in people)
    facts = choose(rng, ("{} is {} and lives at the {}.", "{}, age {}, from the {}."))
    question = choose(rng, ("As JSON lines: ", "Make records: ")) + " ".join(facts.format(*person) for person in people)
    return Exchange(question, opened(rng, text), (text,))
