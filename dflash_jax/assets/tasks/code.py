"""Tasks with small templates of code."""

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v
from dflash_jax.assets.tasks.drawing import Exchange, asked, between, choose, draw


def function(rng: Generator) -> Exchange:
    """Writes a function of two arguments."""
    name, (a, b) = choose(rng, v.FUNCTIONS), draw(rng, v.VARIABLES, 2)
    text = (
        f"def {name}({a}, {b}):\n"
        f'    print("We add the two arguments.")\n'
        f"    total = {a} + {b}\n"
        f'    print("The total is", total)\n'
        f"    return total\n\n"
        f'if __name__ == "__main__":\n'
        f"    {name}(1, 2)"
    )
    return asked(rng, f"write a function {name} of {a} and {b}", text)


def loop(rng: Generator) -> Exchange:
    """Writes a function that adds up the items above a limit."""
    name, limit = choose(rng, v.FUNCTIONS), between(rng, 1, 9)
    text = (
        f"def {name}(items):\n"
        f"    total = 0\n"
        f"    for item in items:\n"
        f"        if item > {limit}:\n"
        f"            total = total + item\n"
        f"        else:\n"
        f'            print("This item is too small.")\n'
        f"    return total"
    )
    return asked(rng, f"write a loop {name} over items above {limit}", text)


def class_template(rng: Generator) -> Exchange:
    """Writes a class of one field."""
    name, field = choose(rng, v.CLASSES), choose(rng, v.FIELDS)
    text = (
        f"class {name}:\n"
        f"    def __init__(self, {field}):\n"
        f"        self.{field} = {field}\n\n"
        f"    def get(self):\n"
        f"        return self.{field}\n\n"
        f"    def set(self, {field}):\n"
        f"        self.{field} = {field}"
    )
    return asked(rng, f"write a class {name} with {field}", text)
