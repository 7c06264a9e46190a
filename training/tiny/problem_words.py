"""Words that worked problems are made of, and the small grammar that varies their sentences."""

from __future__ import annotations

import re
from random import Random

NAMES = (
    "Aaron Abby Adam Aisha Alan Alice Amara Amir Andre Angela Anita Anna Ben Bella Boris Brian Carla Carlos Cathy Chen "
    "Chloe Clara Colin Dan Daria David Dina Diego Elena Eli Ella Erik Eva Farid Fiona Frank Gina Grace Greg Hana Harry "
    "Helen Hugo Ian Ines Iris Isaac Ivan Jack Jamal Jana Jenny Jill Joel Jonas Judy Karim Kate Kenji Kira Lara Leo Liam "
    "Lily Lina Lucas Luis Maria Marco Mark Martha Max Maya Mei Mia Miguel Mina Nadia Nick Nina Nora Oliver Omar Oscar "
    "Paul Petra Priya Rachel Raj Ravi Rita Robin Rosa Ruth Sam Sara Sasha Simon Sven Tara Tina Theo Tomas Uma Vera "
    "Victor Wendy Will Yara Yusuf Zoe"
).split()
SMALL_THINGS = (
    "apples|marbles|stickers|pencils|shells|cards|books|coins|stamps|beads|crayons|buttons|candies|cookies|oranges|"
    "pears|plums|peaches|lemons|eggs|toys|balloons|flowers|roses|tulips|seeds|plants|stones|feathers|badges|puzzles|"
    "comics|magazines|notebooks|markers|erasers|ribbons|keys|blocks|dolls|kites|postcards|photos|tickets|cupcakes|"
    "muffins|bagels|donuts|sandwiches|pies|tomatoes|potatoes|carrots|onions|cherries|walnuts|mushrooms|bulbs|tiles|"
    "bricks|screws|nails|batteries|cups|plates|spoons|bowls|bottles|jars|candles|envelopes|posters|balls|rings"
).split("|")
GOODS = (
    "shirt|hat|scarf|jacket|pair of socks|pair of shoes|backpack|lamp|chair|mug|plate|notebook|pen|ruler|stapler|book|"
    "game|puzzle|ball|racket|helmet|umbrella|blanket|pillow|towel|candle|vase|basket|brush|hammer|bucket|shovel|"
    "flashlight|battery pack|phone case|headset|keyboard|cable|poster|frame|cake|pizza|burger|salad|sandwich|juice box|"
    "bag of flour|carton of milk|loaf of bread|jar of honey|box of cereal|bag of rice|bunch of grapes|bar of soap"
).split("|")
PLACES = (
    "shop|school|farm|library|bakery|factory|museum|garden|market|theater|hotel|zoo|park|office|warehouse|camp|stadium|"
    "gym|cafe|clinic|harbor|orchard|village|club|studio|kitchen|garage|post office|bookstore|toy store"
).split("|")
WORKERS = (
    "baker|painter|carpenter|gardener|farmer|tailor|potter|mechanic|printer|weaver|cook|writer|welder|plumber|builder|"
    "typist|florist|jeweler|photographer|programmer"
).split("|")
PEOPLE = "students|workers|visitors|guests|children|players|members|passengers|teachers|campers|dancers|runners".split(
    "|"
)
VEHICLES = "car|bus|train|truck|boat|bicycle|scooter|van|tram|motorbike".split("|")
CURRENCIES = ("$", "$", "$", "€", "£")

_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


def vary(rng: Random, text: str) -> str:
    """One of the sentences that `text` stands for: `[a|b|c]` is one of the three, and brackets may be nested."""
    while match := _ALTERNATIVES.search(text):
        chosen = rng.choice(match.group(1).split("|"))
        text = text[: match.start()] + chosen + text[match.end() :]
    return text


def plural(goods: str) -> str:
    """`shirt` -> `shirts`, `pair of socks` -> `pairs of socks`."""
    first, _, rest = goods.partition(" of ")
    if first == "loaf":
        first = "loaves"
    else:
        first += "es" if first.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{first} of {rest}" if rest else first


def number(value: float) -> str:
    """Without a trailing `.0`, at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
