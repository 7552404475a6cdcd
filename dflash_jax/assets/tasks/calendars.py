"""Tasks with days and dates."""

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v
from dflash_jax.assets.tasks.drawing import Exchange, between, choose, framed, listed, opened


def days_after(rng: Generator) -> Exchange:
    """Finds a date some days ahead by listing the days between."""
    month, ahead = choose(rng, tuple(v.MONTHS)), between(rng, 4, 9)
    day = between(rng, 1, v.MONTHS[month])
    following = tuple(v.MONTHS)[(tuple(v.MONTHS).index(month) + 1) % 12]
    dates = [
        (month, day + i) if day + i <= v.MONTHS[month] else (following, day + i - v.MONTHS[month])
        for i in range(1, ahead + 1)
    ]
    names = [f"{m} {d}" for m, d in dates]
    question = choose(
        rng,
        (
            f"Which date is {ahead} days after {month} {day}?",
            f"Today is {month} {day}. What date is it in {ahead} days?",
        ),
    )
    last = choose(rng, ("So it is {}.", "The date is {}.", "Answer: {}.")).format(names[-1])
    return Exchange(question, opened(rng, f"{listed(rng, names)}\n{last}"), (f" {names[-1]}.",))


def weekdays(rng: Generator) -> Exchange:
    """Lists days in turn with their weekdays."""
    start, length, day = between(rng, 0, 6), between(rng, 5, 9), between(rng, 1, 20)
    text = "\n".join(f"{v.WEEKDAYS[(start + i) % 7]}, day {day + i}" for i in range(length))
    first = v.WEEKDAYS[start]
    question = choose(
        rng,
        (
            f"Day {day} is a {first}. List {length} days with their weekdays.",
            f"Make a calendar of {length} days. It starts with {first}, day {day}.",
        ),
    )
    return Exchange(question, framed(rng, text), (text,))


def plan_week(rng: Generator) -> Exchange:
    """Plans days; the activities are free."""
    name, days = choose(rng, v.NAMES), between(rng, 4, 6)
    start = between(rng, 0, 6)
    activities = [
        choose(rng, (f"go to the {choose(rng, v.PLACES)}", f"make {choose(rng, v.FOODS)}", "rest at home"))
        for _ in range(days)
    ]
    text = "\n".join(f"{v.WEEKDAYS[(start + i) % 7]}: {activity}" for i, activity in enumerate(activities))
    question = choose(rng, ("Plan {} days for {}, from {} on.", "I need a plan of {} days for {}. Start on {}."))
    return Exchange(question.format(days, name, v.WEEKDAYS[start]), opened(rng, f"Plan for {name}:\n{text}"))
