"""The words and stock phrases of the made conversations: few, so that a small model can know all of them."""

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace",
    "Henry", "Ida", "Jack", "Kate", "Leo", "Mary", "Oscar",
)  # fmt: skip
ANIMALS = ("cat", "dog", "horse", "rabbit", "bird", "mouse", "bear", "fox", "duck", "tiger", "frog")
FOODS = ("soup", "bread", "rice", "salad", "cheese", "cake", "pasta", "honey", "milk", "melon")
PLACES = ("garden", "river", "market", "forest", "school", "beach", "park", "bridge", "village")
OBJECTS = ("book", "lamp", "table", "chair", "pencil", "bottle", "basket", "clock", "mirror", "box")
WORDS = ANIMALS + FOODS + PLACES + OBJECTS
"""The words that are copied and spelt."""

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip

FUNCTIONS = ("compute", "combine", "process", "update", "measure", "collect", "convert", "select")
VARIABLES = ("value", "count", "item", "size", "left", "right", "price", "number")
CLASSES = ("User", "Order", "Player", "Car", "Room", "Ticket")
FIELDS = ("age", "size", "price", "colour", "owner", "level")

REQUESTS = ("Please {}.", "Can you {}?", "I want you to {}.")
OPENINGS = ("Sure, {}! Here it is:", "Of course, {}. Here you go:")
CLOSINGS = ("I hope this helps, {}.", "Let me know if you need more, {}.", "Have a nice day, {}!")
MOODS = ("happy", "tired", "curious")
