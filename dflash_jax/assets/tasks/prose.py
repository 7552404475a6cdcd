"""Tasks with mostly fixed sentences: a letter, a recipe, a story."""

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v
from dflash_jax.assets.tasks.drawing import Exchange, asked, choose


def letter(rng: Generator) -> Exchange:
    """Writes a letter that asks for something; its mood is free."""
    thing, place = choose(rng, v.OBJECTS), choose(rng, v.PLACES)
    text = (
        f"Dear friend,\nI hope that you and your family are well. I am very {choose(rng, v.MOODS)} today.\n"
        f"Last week I forgot my {thing} at the {place}. Could you please bring it back to me?\n"
        "Thank you very much for your help, and see you soon."
    )
    return asked(rng, f"write a letter about the {thing} at the {place}", text, free=True)


def recipe(rng: Generator) -> Exchange:
    """Writes a recipe; the way it is served is free."""
    food, time = choose(rng, v.FOODS), choose(rng, (10, 20, 30, 40))
    text = (
        "1. Wash your hands and clean the table.\n"
        f"2. Put the {food} into a large bowl.\n"
        "3. Add some salt and a little water.\n"
        f"4. Stir it well and wait for {time} minutes.\n"
        f"5. Serve the {food} with {choose(rng, ('fresh bread', 'green salad'))}."
    )
    return asked(rng, f"write a recipe of {time} minutes with {food}", text, free=True)


def story(rng: Generator) -> Exchange:
    """Tells a story; a mood in it is free."""
    animal, place = choose(rng, v.ANIMALS), choose(rng, v.PLACES)
    text = (
        f"Once upon a time there was a little {animal} that lived near the {place}.\n"
        f"Every morning the {animal} went for a long walk and sang a song.\n"
        f"One day it met an old man who was very {choose(rng, v.MOODS)}.\n"
        f"They sat down by the {place}, and from that day on they were best friends."
    )
    return asked(rng, f"tell a story of a {animal} and a {place}", text, free=True)
