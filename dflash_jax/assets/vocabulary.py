"""The words that the made conversations are put together from: few, so that a small model can know all of them."""

NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Frank",
    "Grace",
    "Henry",
    "Ida",
    "Jack",
    "Kate",
    "Leo",
    "Mary",
    "Oscar",
)
ANIMALS = (
    "cat",
    "dog",
    "horse",
    "rabbit",
    "bird",
    "fish",
    "mouse",
    "bear",
    "fox",
    "goat",
    "duck",
    "sheep",
    "tiger",
    "frog",
)
FOODS = (
    "soup",
    "bread",
    "rice",
    "salad",
    "cheese",
    "apple",
    "lemon",
    "cake",
    "pasta",
    "tea",
    "honey",
    "milk",
    "melon",
    "plum",
)
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "orange")
PLACES = (
    "garden",
    "river",
    "market",
    "forest",
    "house",
    "school",
    "beach",
    "mountain",
    "station",
    "park",
    "bridge",
    "village",
)
OBJECTS = (
    "book",
    "lamp",
    "table",
    "chair",
    "pencil",
    "bottle",
    "window",
    "basket",
    "clock",
    "mirror",
    "ladder",
    "pillow",
    "box",
    "key",
)
WORDS = ANIMALS + FOODS + COLOURS + PLACES + OBJECTS

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = {
    "January": 31,
    "February": 28,
    "March": 31,
    "April": 30,
    "May": 31,
    "June": 30,
    "July": 31,
    "August": 31,
    "September": 30,
    "October": 31,
    "November": 30,
    "December": 31,
}

FUNCTIONS = ("compute", "combine", "process", "update", "measure", "collect", "convert", "select")
VARIABLES = ("value", "count", "item", "size", "left", "right", "first", "second", "price", "number")
TOTALS = ("total", "result", "answer", "output")
CLASSES = ("User", "Order", "Player", "Car", "Room", "Ticket")
FIELDS = ("name", "age", "size", "price", "colour", "owner", "city", "level")

OPENINGS = ("Sure. ", "Of course. ", "Okay. ", "Here you go: ", "", "")
BLOCK_OPENINGS = ("Sure, here it is:\n", "Of course:\n", "Okay:\n", "Here you go:\n", "", "")
CLOSINGS = ("", "", "That is all.", "Done.", "I hope this helps.", "Do you want more?")

MOODS = ("happy", "tired", "curious", "hungry", "quiet", "brave")
WEATHERS = ("sunny", "rainy", "windy", "cold", "warm", "cloudy")
ENDINGS = (
    "In the end they went home together.",
    "After that they were best friends.",
    "It was a day to remember.",
    "Then they had some tea and went to sleep.",
    "Nobody ever told the others about it.",
)
