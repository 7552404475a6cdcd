"""Tasks with a free answer: menus, stories, notes."""

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v
from dflash_jax.assets.tasks.drawing import Exchange, between, choose, draw, spoken


def menu(rng: Generator) -> Exchange:
    """Makes a menu; side dishes and prices are free."""
    name, foods = choose(rng, v.NAMES), draw(rng, v.FOODS, between(rng, 3, 5))
    text = "\n".join(f"- {food} with {choose(rng, v.FOODS)}, {between(rng, 2, 19)} coins" for food in foods)
    question = choose(rng, ("Make a menu for {} with {}.", "{} wants to eat {}. Write the menu."))
    question = question.format(name, spoken(foods))
    return Exchange(
        question, choose(rng, (f"Menu for {name}:\n", f"Dear {name}, here is the menu:\n", "Menu:\n")) + text
    )


def story(rng: Generator) -> Exchange:
    """Tells a story from given words; its turns are free."""
    name, animal, place, thing = (
        choose(rng, v.NAMES),
        choose(rng, v.ANIMALS),
        choose(rng, v.PLACES),
        choose(rng, v.OBJECTS),
    )
    colour, other = choose(rng, v.COLOURS), choose(rng, v.NAMES)
    first = choose(
        rng,
        (
            f"One {choose(rng, v.WEATHERS)} day {name} went to the {place} with a {animal}.",
            f"{name} had a {colour} {animal} and they lived near the {place}.",
            f"Once upon a time there was a {choose(rng, v.MOODS)} {animal} in the {place}.",
        ),
    )
    second = choose(
        rng,
        (
            f"There the {animal} found a {colour} {thing} and gave it to {name}.",
            f"{name} was {choose(rng, v.MOODS)} because the {thing} was gone, but the {animal} knew where it was.",
            f"Under the {thing} they met {other}, who said: I am {choose(rng, v.MOODS)} today.",
        ),
    )
    question = choose(
        rng, ("Tell a short story about {}, a {}, a {} and a {}.", "Write a story with {}, a {}, a {} and a {}.")
    )
    return Exchange(question.format(name, animal, place, thing), f"{first} {second} {choose(rng, v.ENDINGS)}")


def letter(rng: Generator) -> Exchange:
    """Writes a note from given words; wording and closing are free."""
    sender, receiver = draw(rng, v.NAMES, 2)
    thing, place, day = choose(rng, v.OBJECTS), choose(rng, v.PLACES), choose(rng, v.WEEKDAYS)
    middle = choose(
        rng,
        (
            f"I hope you are well. Please bring the {thing} to the {place} on {day}.",
            f"The {thing} is still at the {place}. Can you bring it back on {day}?",
            f"We will meet at the {place} on {day}. Do not forget the {thing}.",
        ),
    )
    extra = choose(rng, ("It is {} here today.", "I feel {} at the moment.")).format(choose(rng, v.WEATHERS + v.MOODS))
    closing = choose(rng, ("Best wishes", "See you soon", "Thank you", "With love"))
    question = choose(
        rng,
        (
            "Write a note from {} to {} about the {}, the {} and {}.",
            "{} wants to write to {}: {}, {}, {}. Help with it.",
        ),
    )
    text = f"Dear {receiver},\n{middle} {extra}\n{closing},\n{sender}"
    return Exchange(question.format(sender, receiver, thing, place, day), text)
