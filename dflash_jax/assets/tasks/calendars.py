"""Tasks with weekdays and months."""

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v
from dflash_jax.assets.tasks.drawing import Exchange, asked, between


def weekdays(rng: Generator) -> Exchange:
    """Lists days in turn with their weekdays."""
    start, days = between(rng, 0, 6), between(rng, 7, 12)
    text = "\n".join(f"Day {i + 1} is a {v.WEEKDAYS[(start + i) % 7]}." for i in range(days))
    return asked(rng, f"list {days} days from {v.WEEKDAYS[start]} on", text)


def months(rng: Generator) -> Exchange:
    """Lists a year of months in order."""
    start = between(rng, 0, 11)
    text = "\n".join(f"{i + 1}. {v.MONTHS[(start + i) % 12]}" for i in range(12))
    return asked(rng, f"list the months from {v.MONTHS[start]} on", f"{text}\nThese are all the months of a year.")


def days_after(rng: Generator) -> Exchange:
    """Finds the weekday some days ahead, day by day."""
    start, ahead = between(rng, 0, 6), between(rng, 3, 8)
    day = [v.WEEKDAYS[(start + i) % 7] for i in range(ahead + 1)]
    steps = "".join(f"After {i} day{'s' if i > 1 else ''} it is {day[i]}.\n" for i in range(1, ahead + 1))
    text = f"We start on {day[0]} and go on day by day.\n{steps}So the day that we look for is {day[ahead]}."
    return asked(rng, f"find the day {ahead} days after {day[0]}", text)
