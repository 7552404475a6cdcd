"""The tasks of the made conversations: each makes a question and a good answer from a random generator."""

from collections.abc import Callable

from numpy.random import Generator

from dflash_jax.assets.tasks import calendars, code, numbers, prose, words
from dflash_jax.assets.tasks.drawing import Exchange

TASKS: dict[str, Callable[[Generator], Exchange]] = {
    task.__name__: task
    for task in (
        numbers.count,
        numbers.sort_numbers,
        numbers.add_columns,
        numbers.add_up,
        numbers.times_table,
        words.copy_words,
        words.number_words,
        words.sort_words,
        words.reverse,
        words.spell,
        words.pattern,
        calendars.days_after,
        calendars.weekdays,
        calendars.plan_week,
        code.function,
        code.filter_loop,
        code.print_loop,
        code.class_template,
        code.record,
        prose.menu,
        prose.story,
        prose.letter,
    )
}
"""Name -> task."""
