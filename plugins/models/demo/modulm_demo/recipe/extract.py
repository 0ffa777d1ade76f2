"""Filling a JSON object from a sentence: keys are given, values are copied."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from . import words
from .example import Example, assistant, fill, user

_EMPTY = {str: "", int: 0, float: 0}


@dataclass(frozen=True)
class Form:
    """Makers of the values, names that each key may have, and sentences that state them."""

    makers: dict[str, Any]
    keys: dict[str, tuple[str, ...]]
    sentences: tuple[str, ...]


FORMS = (
    Form(
        {"n": words.full_name, "a": lambda r: r.randint(3, 99), "c": words.city,
         "j": lambda r: r.choice(words.JOBS)},
        {"n": ("name", "person", "full_name"), "a": ("age", "years"), "c": ("city", "town", "home"),
         "j": ("job", "occupation", "profession")},
        (
            "{n} is {a} years old, works as a {j} and lives in {c}.",
            "{n}, {a}, is a {j} from {c}.",
            "My friend {n} lives in {c}, is {a} years old and is a {j}.",
            "In {c} there is a {j} called {n} who is {a}.",
            "Meet {n}: {j}, {a} years old, based in {c}.",
            "At the age of {a}, {n} moved to {c} to work as a {j}.",
            "I am {n}, a {a} year old {j} living in {c}.",
        ),
    ),
    Form(
        {"i": words.item, "q": lambda r: r.randint(2, 150), "p": words.price, "n": words.full_name},
        {"i": ("item", "product", "article"), "q": ("quantity", "qty", "count", "amount"),
         "p": ("price", "unit_price", "cost"), "n": ("customer", "buyer", "client", "name")},
        (
            "{n} ordered {q} {i} at {p} dollars each.",
            "Order from {n}: {q} {i}, {p} euros each.",
            "Please send {q} {i} to {n}; the price is {p} per piece.",
            "{n} wants to buy {q} {i} for {p} each.",
            "We sold {q} {i} for {p} dollars apiece to {n}.",
            "At a price of {p}, {n} bought {q} {i}.",
        ),
    ),
    Form(
        {"e": lambda r: r.choice(words.EVENTS), "d": words.date, "c": words.city,
         "t": words.clock},
        {"e": ("event", "title", "type"), "d": ("date", "day", "when"),
         "c": ("place", "city", "location"), "t": ("time", "start", "starts_at")},
        (
            "The {e} takes place in {c} on {d} at {t}.",
            "Join us for the {e} in {c}, {d}, {t}.",
            "On {d} there is a {e} in {c}. It starts at {t}.",
            "{c} hosts a {e} on {d} from {t}.",
            "Do not forget the {e}: {d} at {t} in {c}.",
            "We meet in {c} at {t} on {d} for the {e}.",
        ),
    ),
    Form(
        {"f": words.city, "c": words.city, "d": words.date, "n": words.full_name},
        {"f": ("from", "origin", "departure"), "c": ("to", "destination", "arrival"),
         "d": ("date", "day"), "n": ("passenger", "traveler", "name")},
        (
            "{n} flies from {f} to {c} on {d}.",
            "A ticket for {n} on {d}, from {f} to {c}.",
            "On {d}, {n} takes the train from {f} to {c}.",
            "{n} needs to go to {c} from {f} on {d}.",
            "Book {n} a trip to {c} on {d}, leaving from {f}.",
        ),
    ),
    Form(
        {"b": lambda r: f"The {words.coined(r, 1, 3).capitalize()} {words.coined(r).capitalize()}",
         "n": words.full_name, "y": lambda r: r.randint(1850, 2026),
         "p": lambda r: r.randint(60, 900)},
        {"b": ("title", "book"), "n": ("author", "writer"), "y": ("year", "published"),
         "p": ("pages", "page_count", "length")},
        (
            "{b} by {n} came out in {y} and has {p} pages.",
            "In {y}, {n} wrote {b}, a book of {p} pages.",
            "{n} is the author of {b} ({y}, {p} pages).",
            "The {p} page book {b} was published in {y} by {n}.",
        ),
    ),
)  # fmt: skip
_ASK = (
    "Fill this JSON object from the sentence.\n{shape}\n{text}",
    "{text}\n\nFill in this JSON: {shape}",
    "Extract {keys} as JSON: {text}",
    "{text}\nReturn a JSON object with the keys {keys}.",
    "Turn this into JSON with {keys}.\n{text}",
    "Text: {text}\nJSON format: {shape}",
    "Read the text and answer with JSON like {shape}.\nText: {text}",
    "Give me {keys} from this sentence as a JSON object: {text}",
)


def extract(rng: Random) -> Example:
    """Ask for some or all of the values of a sentence, in any order, under given keys."""
    form = rng.choice(FORMS)
    values = {field: make(rng) for field, make in form.makers.items()}
    text = fill(rng, form.sentences, **values)
    fields = rng.sample(sorted(form.makers), rng.randint(2, len(form.makers)))
    filled = {rng.choice(form.keys[field]): values[field] for field in fields}
    shape = {key: _EMPTY[type(value)] for key, value in filled.items()}
    names = list(filled)
    keys = rng.choice((", ".join(names), ", ".join(names[:-1]) + " and " + names[-1]))
    question = fill(rng, _ASK, text=text, shape=json.dumps(shape), keys=keys)
    turns = (user(question), assistant(json.dumps(filled, ensure_ascii=False)))
    return Example("json", turns)
