"""The tasks of the made conversations: each makes a question and a good answer from a random generator."""

from collections.abc import Callable

from numpy.random import Generator

from dflash_jax.assets.tasks import calendars, code, numbers, prose, words
from dflash_jax.assets.tasks.drawing import Exchange

TASKS: dict[str, Callable[[Generator], Exchange]] = {
    task.__name__: task
    for task in (
        numbers.count_up,
        numbers.count_down,
        numbers.times_table,
        numbers.add_two,
        numbers.add_three,
        numbers.sort_numbers,
        words.copy_word,
        words.spell,
        calendars.weekdays,
        calendars.months,
        calendars.days_after,
        code.function,
        code.loop,
        code.class_template,
        prose.letter,
        prose.recipe,
        prose.story,
    )
}
"""Name -> task."""
