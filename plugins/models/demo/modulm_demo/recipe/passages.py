"""Reading comprehension: a passage with a question about it, or its summary in a sentence.

A passage consists of sentences that each state one fact; a question asks for one of them. If no
sentence states it, the answer says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from . import words
from .example import Example, assistant, fill, user
from .reference import sentence, with_article

_HOURS = ("seven", "eight", "nine", "ten")
_ENDS = ("four", "five", "six", "seven", "eight")
_PLACES = ("office", "library", "museum", "shop", "bank", "bakery", "school", "pool", "restaurant",
           "post office", "canteen", "clinic", "market", "gym", "theater", "castle",
           "zoo")  # fmt: skip
_FLOORS = ("ground", "first", "second", "third", "fourth", "fifth")
_FOODS = ("soup", "fish", "pizza", "pancakes", "salad", "pasta", "cake", "curry", "rice")
_SENT = ("parcels", "letters", "books", "orders", "invoices", "tickets")
_COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey")
_PETS = ("dog", "cat", "horse", "parrot", "rabbit", "hamster", "goat")


@dataclass(frozen=True)
class Fact:
    """A sentence with fields, questions about it with answers, and a short form for summaries."""

    makers: dict[str, Callable[[Random], object]]
    states: tuple[str, ...]
    asks: tuple[tuple[str, str], ...]
    short: str


def _pick(*values: str) -> Callable[[Random], str]:
    return lambda rng: rng.choice(values)


FACTS = (
    Fact({"p": _pick(*_PLACES), "d": _pick(*words.DAYS), "a": _pick(*_HOURS), "b": _pick(*_ENDS)},
         ("The {p} is closed on {d}s and open from {a} to {b} on other days.",
          "The {p} opens at {a} and closes at {b}, and it is closed on {d}s.",
          "Our {p} is open from {a} to {b}, but not on {d}s."),
         (("When is the {p} open?", "The {p} is open from {a} to {b}, but not on {d}s."),
          ("When can I visit the {p}?", "You can visit the {p} from {a} to {b}, but not on {d}s."),
          ("When can I go to the {p}?", "You can go to the {p} from {a} to {b}, but not on {d}s."),
          ("On which day is the {p} closed?", "The {p} is closed on {d}s."),
          ("When is the {p} closed?", "The {p} is closed on {d}s."),
          ("When does the {p} open?", "The {p} opens at {a}."),
          ("When does the {p} close?", "The {p} closes at {b}."),
          ("What are the opening hours of the {p}?",
           "The {p} is open from {a} to {b}, but not on {d}s."),
          ("Is the {p} open on {d}?", "No, the {p} is closed on {d}s.")),
         "the {p} is open from {a} to {b}, but not on {d}s"),
    Fact({"s": _pick(*_SENT), "n": _pick("two", "three", "four", "five", "six", "seven")},
         ("{s} are sent within {n} days.", "We send {s} within {n} days.",
          "It takes {n} days until {s} are sent."),
         (("When are {s} sent?", "{s} are sent within {n} days."),
          ("How long does it take until {s} are sent?", "It takes up to {n} days."),
          ("How fast are {s} sent?", "{s} are sent within {n} days.")),
         "{s} are sent within {n} days"),
    Fact({"p": _pick(*_PLACES), "f": _pick(*_FLOORS)},
         ("The {p} is on the {f} floor.", "You find the {p} on the {f} floor."),
         (("Where is the {p}?", "The {p} is on the {f} floor."),
          ("On which floor is the {p}?", "The {p} is on the {f} floor."),
          ("Where can I find the {p}?", "The {p} is on the {f} floor.")),
         "the {p} is on the {f} floor"),
    Fact({"p": _pick("canteen", "restaurant", "kitchen", "cafe"), "f": _pick(*_FOODS),
          "d": _pick(*words.DAYS)},
         ("The {p} serves {f} on {d}s.", "On {d}s there is {f} in the {p}."),
         (("What does the {p} serve on {d}s?", "The {p} serves {f} on {d}s."),
          ("When is there {f}?", "There is {f} on {d}s."),
          ("What is for lunch on {d}?", "There is {f} on {d}s."),
          ("What can I eat on {d}?", "There is {f} on {d}s.")),
         "there is {f} on {d}s"),
    Fact({"n": words.given_name, "j": _pick(*words.JOBS), "c": words.city},
         ("{n} is a {j} and lives in {c}.", "{n} works as a {j} in {c}.",
          "{n}, a {j}, lives in {c}."),
         (("What is the job of {n}?", "{n} is a {j}."), ("What does {n} do?", "{n} is a {j}."),
          ("Where does {n} live?", "{n} lives in {c}."), ("Who lives in {c}?", "{n} lives in {c}."),
          ("Who is a {j}?", "{n} is a {j}."), ("What is {n}?", "{n} is a {j}."),
          ("Who is {n}?", "{n} is a {j} who lives in {c}.")),
         "{n} is a {j} in {c}"),
    Fact({"n": words.given_name, "k": _pick(*_COLORS), "i": _pick("car", "bicycle", "house", "hat",
          "coat", "boat", "bag", "phone")},
         ("{n} has a {k} {i}.", "{n} bought a {k} {i}.", "The {i} of {n} is {k}."),
         (("What color is the {i} of {n}?", "The {i} of {n} is {k}."),
          ("What does {n} have?", "{n} has a {k} {i}."),
          ("Who has a {k} {i}?", "{n} has a {k} {i}."),
          ("Which color does {n}'s {i} have?", "The {i} of {n} is {k}."),
          ("What color is {n}'s {i}?", "The {i} of {n} is {k}.")),
         "{n} has a {k} {i}"),
    Fact({"n": words.given_name, "p": _pick(*_PETS), "m": words.given_name},
         ("{n} has a {p} called {m}.", "The {p} of {n} is called {m}."),
         (("What is the name of the {p}?", "The {p} is called {m}."),
          ("Which pet does {n} have?", "{n} has a {p}."),
          ("What kind of animal is {m}?", "{m} is a {p}."),
          ("What is the {p} called?", "The {p} is called {m}."),
          ("Who has a {p}?", "{n} has a {p}."), ("Who is {m}?", "{m} is the {p} of {n}.")),
         "{n} has a {p} called {m}"),
    Fact({"e": _pick(*words.EVENTS), "d": words.date, "c": words.city, "t": words.clock},
         ("The {e} takes place in {c} on {d} at {t}.", "On {d} at {t} the {e} begins in {c}.",
          "The {e} in {c} starts on {d} at {t}."),
         (("When is the {e}?", "The {e} is on {d} at {t}."),
          ("Where is the {e}?", "The {e} is in {c}."),
          ("What time does the {e} start?", "The {e} starts at {t}."),
          ("On which day is the {e}?", "The {e} is on {d}."),
          ("Where does the {e} take place?", "The {e} is in {c}.")),
         "the {e} is in {c} on {d}"),
    Fact({"i": _pick(*words.ITEMS), "p": words.price, "s": _pick("shop", "market", "store")},
         ("The {i} cost {p} euros in the {s}.", "In the {s}, {i} cost {p} euros."),
         (("How much do the {i} cost?", "The {i} cost {p} euros."),
          ("What is the price of the {i}?", "The {i} cost {p} euros."),
          ("Where can I buy {i}?", "You can buy {i} in the {s}.")),
         "{i} cost {p} euros"),
    Fact({"n": words.given_name, "c": words.city, "d": _pick(*words.DAYS),
          "v": _pick("train", "bus", "car", "plane", "bicycle")},
         ("{n} goes to {c} by {v} on {d}.", "On {d}, {n} travels to {c} by {v}."),
         (("Where does {n} go?", "{n} goes to {c}."),
          ("How does {n} travel?", "{n} travels by {v}."),
          ("When does {n} go to {c}?", "{n} goes to {c} on {d}."),
          ("Who goes to {c}?", "{n} goes to {c}."), ("Where is {n} going?", "{n} goes to {c}.")),
         "{n} goes to {c} on {d}"),
    Fact({"n": words.given_name, "a": lambda r: r.randint(3, 95), "h": _pick(
          "chess", "football", "tennis", "music", "cooking", "painting", "reading", "swimming")},
         ("{n} is {a} years old and likes {h}.", "{n} likes {h} and is {a} years old."),
         (("How old is {n}?", "{n} is {a} years old."), ("What does {n} like?", "{n} likes {h}."),
          ("Who likes {h}?", "{n} likes {h}."), ("What is the hobby of {n}?", "{n} likes {h}."),
          ("What is {n}'s age?", "{n} is {a} years old.")),
         "{n} is {a} and likes {h}"),
    Fact({"w": lambda r: words.coined(r, 2, 3).capitalize(), "c": words.city,
          "y": lambda r: r.randint(1700, 2024), "b": _pick("tower", "bridge", "church", "company",
          "school", "museum", "garden")},
         ("The {w} {b} in {c} was built in {y}.", "The {w} {b} was built in {c} in {y}."),
         (("When was the {w} {b} built?", "It was built in {y}."),
          ("Where is the {w} {b}?", "The {w} {b} is in {c}."),
          ("In which year was it built?", "It was built in {y}."),
          ("How old is the {b}?", "It was built in {y}."),
          ("What was built in {y}?", "The {w} {b} was built in {y}.")),
         "the {w} {b} in {c} was built in {y}"),
    Fact({"n": words.given_name, "l": _pick("keys", "phone", "bag", "umbrella", "glasses", "wallet",
          "book"), "w": _pick("under the table", "in the kitchen", "on the bed", "in the car",
          "behind the door", "on the shelf", "in the garden", "at school")},
         ("{n} left the {l} {w}.", "The {l} of {n} lies {w}.", "{n} put the {l} {w}."),
         (("Where is the {l}?", "The {l} is {w}."),
          ("What did {n} leave {w}?", "{n} left the {l} {w}."),
          ("Where can {n} find the {l}?", "The {l} is {w}."),
          ("What is {w}?", "The {l} of {n} is {w}.")),
         "the {l} of {n} is {w}"),
    Fact({"x": lambda r: words.coined(r, 2, 3).capitalize(), "k": _pick("a river", "a small town",
          "an island", "a mountain", "a company", "a game", "a robot", "a plant", "a lake"),
          "o": _pick("the north", "the south", "Spain", "Norway", "Canada", "Japan", "the east")},
         ("{x} is {k} in {o}.", "{x} is the name of {k} in {o}."),
         (("What is {x}?", "{x} is {k} in {o}."), ("Where is {x}?", "{x} is in {o}.")),
         "{x} is {k} in {o}"),
)  # fmt: skip
_ASKED = (
    "{p}\n\n{q}", "{p}\n\n{q}", "{p} {q}", "{p}\n{q}", "Text: {p}\nQuestion: {q}",
    "Read this: {p}\n{q}", "Answer from the text.\n\n{p}\n\n{q}", "Context: {p}\n\nQuestion: {q}",
    "{q}\n\n{p}", "Use this passage to answer.\n{p}\n\n{q}", "Here is what I know: {p} {q}",
    "\"{p}\"\n\n{q}", "According to this text, answer the question.\n{p}\n{q}",
    "Passage: {p}\n\n{q}", "Given this: {p}\n{q}",
)  # fmt: skip
_SUMMARY = (
    "Summarize this text: {p}", "Summarize: {p}", "Give me a short summary.\n\n{p}",
    "{p}\n\nSummarize this in one sentence.", "Sum this up in one sentence: {p}",
    "What is this text about? {p}", "Summarize the following text.\n{p}", "TL;DR: {p}",
    "{p}\n\nTell me the most important thing in short.", "Make this shorter: {p}",
    "Can you summarize this? {p}", "Shorten this text: {p}", "Write a brief summary of this: {p}",
)  # fmt: skip
_ABSENT = "The text does not say that."


def _instantiate(rng: Random, fact: Fact) -> tuple[Fact, dict[str, object]]:
    return fact, {field: make(rng) for field, make in fact.makers.items()}


def _fill_in(text: str, values: dict[str, object]) -> str:
    return sentence(with_article(text.format(**values)))


def reading(rng: Random) -> Example:
    """Ask about one of one to four sentences."""
    chosen = [
        _instantiate(rng, fact)
        for fact in rng.sample(FACTS, rng.choices((1, 2, 3, 4, 5), (5, 5, 4, 2, 1))[0])
    ]
    passage = " ".join(_fill_in(rng.choice(fact.states), values) for fact, values in chosen)
    ask, answer = rng.choice(chosen[0][0].asks)
    at = rng.randrange(len(chosen))
    ask, answer = rng.choice(chosen[at][0].asks)
    question, reply = _fill_in(ask, chosen[at][1]), _fill_in(answer, chosen[at][1])
    if rng.random() < 0.1:
        other = rng.choice([fact for fact in FACTS if fact not in [f for f, _ in chosen]])
        question, reply = _fill_in(rng.choice(other.asks)[0], _instantiate(rng, other)[1]), _ABSENT
    turns = (user(rng.choice(_ASKED).format(p=passage, q=question)), assistant(reply))
    return Example("reading", turns, expect=(reply,))


_FILLING = ("That is good to know.", "It was a sunny day.", "Many people were there.",
            "Everybody was pleased.", "The weather was nice.", "This has been so for years.",
            "More will be said later.", "It is quite well known.")  # fmt: skip


def summary(rng: Random) -> Example:
    """Ask for a passage's main facts, without its filler."""
    count = rng.choices((1, 2), (3, 2))[0]
    chosen = [_instantiate(rng, fact) for fact in rng.sample(FACTS, count)]
    sentences = [_fill_in(rng.choice(fact.states), values) for fact, values in chosen]
    filling = rng.sample(_FILLING, rng.choice((1, 2, 2)))
    for text in filling:
        sentences.insert(rng.randint(1, len(sentences)), text)
    short = " and ".join(with_article(fact.short.format(**values)) for fact, values in chosen)
    turns = (
        user(rng.choice(_SUMMARY).format(p=" ".join(sentences))),
        assistant(f"{sentence(short)}."),
    )
    return Example("summaries", turns, expect=(sentence(short),))


def letters_from_note(rng: Random) -> Example:
    """Ask later for a fact told in the first turns."""
    fact, values = _instantiate(rng, rng.choice(FACTS))
    ask, answer = rng.choice(fact.asks)
    reply = fill(rng, ("Ok, I will remember that.", "Good to know.", "Thank you, I noted that."))
    lead = rng.choice(("Remember this: {}", "{}", "Please note: {}", "For your information: {}"))
    turns = (user(lead.format(_fill_in(rng.choice(fact.states), values))), assistant(reply),
             user(_fill_in(ask, values)), assistant(_fill_in(answer, values)))  # fmt: skip
    return Example("follow-up", turns, expect=(_fill_in(answer, values),))
