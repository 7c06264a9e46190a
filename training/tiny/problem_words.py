"""Words that worked problems are made of: the lists in `words/`, one word or phrase a line."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("words")


def read_words(name: str) -> tuple[str, ...]:
    """The lines of `words/NAME.txt`, in their order: a corpus depends on it."""
    return tuple((_FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines())


NAMES = read_words("names")
SMALL_THINGS = read_words("small_things")
GOODS = read_words("goods")
PLACES = read_words("places")
WORKERS = read_words("workers")
PEOPLE = read_words("people")
VEHICLES = read_words("vehicles")
CURRENCIES = ("$", "$", "$", "€", "£")
# Words of the form of a problem, not of its content.
FORM_WORDS = frozenset(read_words("form"))
