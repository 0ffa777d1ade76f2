"""The kinds of tools in the training text: their declarations, requests and results."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from . import words
from .example import Tool

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of tool.

    `names` and `descriptions` vary its declaration; `fields` gives each argument its JSON type, its
    possible names and a maker of values. `asks` are requests in terms of the fields, and `joint` is
    one about several things. `result` makes the tool's result, and `tells` states it in a sentence.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    fields: dict[str, tuple[str, tuple[str, ...], Callable[[Random], Any]]]
    asks: tuple[str, ...]
    joint: str
    result: Callable[[Random], Arguments]
    tells: str


@dataclass(frozen=True)
class Declared:
    """A kind, with the names used in one conversation."""

    kind: Kind
    name: str
    keys: dict[str, str]
    schema: Tool

    def call(self, values: Arguments) -> dict[str, Any]:
        """Build a call in the form of an assistant message's `tool_calls`."""
        arguments = {key: values[field] for field, key in self.keys.items()}
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}


def _expression(rng: Random) -> str:
    sign = rng.choice("+-*/")
    first, second = rng.randint(2, 99999), rng.randint(2, 9999)
    if rng.random() < 0.2:
        return f"{first} {sign} {second} {rng.choice('+-*')} {rng.randint(2, 99)}"
    return f"{first} {sign} {second}"


_MONEY = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "AUD", "SEK", "NOK", "INR", "CNY", "BRL")
_TICKERS = ("AAPL", "MSFT", "NVDA", "TSLA", "AMZN", "INTC", "AMD", "IBM", "ORCL", "SAP", "SONY")
_SPOKEN = ("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Japanese", "Swedish")
_PHRASES = ("good morning", "thank you", "see you soon", "where is the station", "happy birthday",
            "I am hungry", "how much is it", "good luck", "see you tomorrow", "I love music",
            "the house is big", "have a nice day", "my name is Anna", "it is cold")  # fmt: skip
_SKY = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")

KINDS = {
    "weather": Kind(
        ("get_weather", "weather", "get_current_weather", "weather_lookup", "fetch_weather",
         "check_weather", "getWeather", "get_forecast"),
        ("Get the weather of a city.", "Current weather for a place.", "Look up the weather."),
        {"c": ("string", ("city", "location", "place", "city_name"), words.city)},
        ("What is the weather in {c}?", "How is the weather in {c}?",
         "What's the weather like in {c}?", "Is it raining in {c}?", "Weather in {c}?",
         "How warm is it in {c} right now?",
         "Do I need an umbrella in {c} today?", "Tell me the weather for {c}.",
         "I am going to {c}. What will the weather be?", "Please check the weather in {c}.",
         "Is it cold in {c}?", "Can you look up the weather in {c}?"),
        "What is the weather in {}?",
        lambda r: {"temperature": r.randint(-15, 39), "sky": r.choice(_SKY)},
        "It is {temperature} degrees and {sky} in {c}.",
    ),
    "calculator": Kind(
        ("calculator", "calculate", "compute", "evaluate_expression", "math", "calc"),
        ("Evaluate an arithmetic expression.", "Calculate an expression.", "Do exact arithmetic."),
        {"e": ("string", ("expression", "formula", "input", "expr"), _expression)},
        ("What is {e}?", "Calculate {e}.", "Compute {e}", "How much is {e}?",
         "Use the calculator for {e}.", "Please work out {e}.", "I need the value of {e}.",
         "Can you calculate {e}?", "{e} = ?"),
        "Calculate {}.",
        lambda r: {"result": r.choice((r.randint(-999, 99999), round(r.uniform(0, 999), 2)))},
        "The result of {e} is {result}.",
    ),
    "search": Kind(
        ("web_search", "search", "search_web", "internet_search", "find_pages", "lookup"),
        ("Search the web.", "Find pages about a topic.", "Search the internet for a query."),
        {"q": ("string", ("query", "q", "search_query", "text"), words.topic)},
        ("Search for {q}.", "Search the web for {q}.", "Find information about {q}.",
         "Look up {q} on the web.", "What can you find about {q}?", "Find me pages about {q}.",
         "Please search {q}.", "I want to read about {q}. Search for it."),
        "Search for {}.",
        lambda r: {"title": f"{r.choice(('A guide', 'News', 'Notes', 'All you need'))}",
                   "site": f"{words.coined(r, 1, 2)}.{r.choice(('com', 'org', 'net'))}"},
        "I found \"{title}\" on {site} about {q}.",
    ),
    "time": Kind(
        ("get_time", "current_time", "time_in", "world_clock", "get_local_time"),
        ("Get the local time of a city.", "Current time in a place."),
        {"c": ("string", ("city", "location", "place", "timezone_city"), words.city)},
        ("What time is it in {c}?", "What's the time in {c}?", "Time in {c}?",
         "Tell me the local time in {c}.", "How late is it in {c}?",
         "Current time in {c}, please."),
        "What time is it in {}?",
        lambda r: {"time": words.clock(r)},
        "It is {time} in {c}.",
    ),
    "timer": Kind(
        ("set_timer", "start_timer", "timer", "create_timer"),
        ("Start a timer.", "Set a timer in minutes."),
        {"m": ("integer", ("minutes", "duration", "length"), lambda r: r.randint(1, 120))},
        ("Set a timer for {m} minutes.", "Start a {m} minute timer.", "Remind me in {m} minutes.",
         "Timer, {m} minutes please.", "Wake me in {m} minutes."),
        "Set a timer for {} minutes.",
        lambda r: {"status": "started"},
        "The timer of {m} minutes has {status}.",
    ),
    "convert": Kind(
        ("convert_currency", "exchange", "currency_converter", "convert_money"),
        ("Convert an amount of money.", "Exchange between currencies."),
        {"a": ("number", ("amount", "value", "sum"), lambda r: r.randint(1, 5000)),
         "f": ("string", ("from", "source", "from_currency"), lambda r: r.choice(_MONEY)),
         "t": ("string", ("to", "target", "to_currency"), lambda r: r.choice(_MONEY))},
        ("Convert {a} {f} to {t}.", "How much is {a} {f} in {t}?", "What are {a} {f} worth in {t}?",
         "Change {a} {f} into {t}.", "I have {a} {f}. How many {t} is that?"),
        "Convert {}.",
        lambda r: {"converted": round(r.uniform(1, 9000), 2)},
        "{a} {f} is {converted} {t}.",
    ),
    "stock": Kind(
        ("get_stock_price", "stock_price", "quote", "get_quote"),
        ("Get the price of a stock.", "Latest stock quote."),
        {"s": ("string", ("symbol", "ticker", "stock"),
               lambda r: r.choice(_TICKERS) if r.random() < 0.5
               else "".join(r.choices("ABCDEFGHIJKLMNOPRSTUVWXYZ", k=r.randint(3, 4))))},
        ("What is the stock price of {s}?", "How much is {s} stock?", "Price of {s}?",
         "Get a quote for {s}.", "Where does {s} trade right now?"),
        "What is the stock price of {}?",
        lambda r: {"price": words.price(r)},
        "The price of {s} is {price} dollars.",
    ),
    "email": Kind(
        ("send_email", "email", "send_mail", "send_message"),
        ("Send an email.", "Send a message to a person."),
        {"n": ("string", ("to", "recipient", "receiver"), words.given_name),
         "s": ("string", ("subject", "title", "topic"), lambda r: r.choice(words.TOPICS))},
        ("Send an email to {n} about {s}.", "Write {n} an email with the subject {s}.",
         "Email {n} about {s}.", "Send {n} a mail, subject: {s}."),
        "Send an email to {}.",
        lambda r: {"status": "sent"},
        "Your email about {s} was {status} to {n}.",
    ),
    "translate": Kind(
        ("translate", "translate_text", "translator"),
        ("Translate a text.", "Translate text into a language."),
        {"p": ("string", ("text", "phrase", "source_text"), lambda r: r.choice(_PHRASES)),
         "l": ("string", ("language", "target_language", "to"), lambda r: r.choice(_SPOKEN))},
        ("Translate \"{p}\" into {l}.", "How do you say \"{p}\" in {l}?",
         "What is \"{p}\" in {l}?", "Put \"{p}\" into {l}, please."),
        "Translate {}.",
        lambda r: {"translation": " ".join(words.coined(r) for _ in range(r.randint(1, 3)))},
        "In {l}, \"{p}\" is \"{translation}\".",
    ),
    "table": Kind(
        ("book_table", "reserve_table", "make_reservation"),
        ("Book a table in a restaurant.", "Reserve a table."),
        {"r": ("string", ("restaurant", "place", "name"),
               lambda r: words.coined(r, 2, 3).capitalize()),
         "n": ("integer", ("people", "guests", "party_size"), lambda r: r.randint(1, 12)),
         "t": ("string", ("time", "at", "when"), words.clock)},
        ("Book a table at {r} for {n} people at {t}.", "Reserve a table for {n} at {r}, {t}.",
         "I need a table for {n} guests at {t} in {r}.", "Get us a table at {r}: {n} people, {t}."),
        "Book a table at {}.",
        lambda r: {"status": "confirmed", "code": r.randint(1000, 9999)},
        "Your table at {r} for {n} at {t} is {status}. The code is {code}.",
    ),
}  # fmt: skip


def declare(rng: Random, kind: Kind) -> Declared:
    """Choose a kind's names for one conversation and build its definition."""
    keys = {field: rng.choice(names) for field, (_, names, _) in kind.fields.items()}
    detailed = rng.random() < 0.3
    properties = {}
    for field, key in keys.items():
        properties[key] = {"type": kind.fields[field][0]}
        if detailed:
            properties[key]["description"] = f"The {key.replace('_', ' ')}."
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = list(keys.values())
    name = rng.choice(kind.names)
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.9:
        function["description"] = rng.choice(kind.descriptions)
    function["parameters"] = parameters
    return Declared(kind, name, keys, {"type": "function", "function": function})


def make_values(rng: Random, kind: Kind) -> Arguments:
    """Make a value for each field."""
    return {field: make(rng) for field, (_, _, make) in kind.fields.items()}


def as_text(result: Arguments) -> str:
    """Format a tool's result as in a tool message."""
    return json.dumps(result, ensure_ascii=False)
