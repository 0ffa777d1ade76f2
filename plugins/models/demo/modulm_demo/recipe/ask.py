"""Asks the 300 ordinary questions of questions.jsonl: `python -m modulm_demo.recipe.ask`.

They are excluded from the generated text: `generator.training` drops conversations that ask one. An
answer is right if it matches its question's pattern or makes the expected call, honest if it admits
not to know something, and wrong otherwise. A word is broken if it occurs neither in the recipe nor
in the conversation.
"""

import argparse
import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

from .backends import Answer, http_backend, modulm_backend, transformers_backend
from .example import Message, Tool
from .questions import questions

_HERE = Path(__file__).parent
_CHECKPOINT = _HERE.parent / "checkpoint"
_NOT_KNOWN = re.compile(
    r"(do not|don't|cannot|can't|not able to|nobody|no one) (know|tell|look|see|predict|do that)"
    r"|nobody knows|you have not told|text does not say"
)
_SAID_SO = re.compile(r"\bi (do not|don't) know (that|it|the|today)")
_WORD = re.compile(r"[^\W\d_]{3,}")
_FIELDS = {
    "weather": ("get_weather", "Get the weather of a city.", {"city": "string"}),
    "search": ("web_search", "Search the web.", {"query": "string"}),
    "calc": ("calculator", "Evaluate an arithmetic expression.", {"expression": "string"}),
    "email": ("send_email", "Send an email.", {"to": "string", "subject": "string"}),
    "timer": ("set_timer", "Start a timer.", {"minutes": "integer"}),
    "time": ("get_time", "Get the local time of a city.", {"city": "string"}),
}


def _tool(name: str) -> Tool:
    called, description, fields = _FIELDS[name]
    properties = {field: {"type": kind} for field, kind in fields.items()}
    parameters = {"type": "object", "properties": properties, "required": list(fields)}
    function = {"name": called, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _after(steps: list[list[Any]]) -> list[Message]:
    """Calls that were made, and their results."""
    messages: list[Message] = []
    for name, arguments, result in steps:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": name, "content": json.dumps(result)})
    return messages


def converse(row: dict[str, Any], answer: Answer) -> Message:
    """Ask turn by turn, with the model's own answers in between; returns the last one."""
    tools = [_tool(name) for name in row.get("tools", ())]
    messages: list[Message] = []
    reply: Message = {}
    for turn in row["ask"]:
        if reply:
            messages.append({"role": "assistant", "content": reply["content"]})
        messages.append({"role": "user", "content": turn})
        last = turn is row["ask"][-1]
        reply = answer([*messages, *_after(row.get("after", []))] if last else messages, tools)
    return reply


def _calls_fit(row: dict[str, Any], calls: list[dict[str, Any]]) -> bool:
    if "calls" in row:
        name, count = row["calls"]
        return [call["name"] for call in calls] == [name] * count
    name, wanted = row["call"]
    if len(calls) != 1 or calls[0]["name"] != name or not isinstance(calls[0]["arguments"], dict):
        return False
    arguments = calls[0]["arguments"]
    return all(
        value[1:] in str(arguments.get(key))
        if str(value).startswith("~")
        else arguments.get(key) == value
        for key, value in wanted.items()
    )


def verdict(row: dict[str, Any], reply: Message) -> str:
    """`right`, `honest` or `wrong`."""
    calls, text = reply.get("tool_calls") or [], reply["content"].strip()
    if "call" in row or "calls" in row:
        return "right" if _calls_fit(row, calls) else "wrong"
    unsure = bool(_NOT_KNOWN.search(text.lower()))
    if row.get("unknown"):
        return "right" if unsure and not calls else "wrong"
    flags = 0 if row.get("case") else re.IGNORECASE
    fits = text and not calls and re.search(row["accept"], text, flags)
    if fits and not _SAID_SO.search(text.lower()):
        return "right"
    return "honest" if unsure else "wrong"


@cache
def _vocabulary() -> frozenset[str]:
    files = (*_HERE.glob("*.py"), *_HERE.glob("texts/*.txt"))
    return frozenset(
        word.casefold() for file in files for word in _WORD.findall(file.read_text("utf-8"))
    )


def broken(row: dict[str, Any], text: str) -> list[str]:
    """Words that the model made up, each listed once."""
    seen = {word.casefold() for word in _WORD.findall(json.dumps(row, ensure_ascii=False))}
    distinct = dict.fromkeys(_WORD.findall(text))
    return [word for word in distinct if word.casefold() not in _vocabulary() | seen]


def table(rows: list[dict[str, Any]], answers: list[Message]) -> str:
    """Format one line per category, and a total."""
    names = list(dict.fromkeys(row["category"] for row in rows))
    lines = ["| category | questions | right | honest | wrong |", "|---|---:|---:|---:|---:|"]
    for name in [*names, "all"]:
        some = [
            verdict(row, reply)
            for row, reply in zip(rows, answers, strict=True)
            if name in (row["category"], "all")
        ]
        cells = [name, len(some), *(some.count(kind) for kind in ("right", "honest", "wrong"))]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Read the options, ask, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the checkpoint; over HTTP the name demo")
    parser.add_argument("--backend", choices=("transformers", "modulm", "http"), default="modulm")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--show", choices=("wrong", "all"), help="print answers too")
    args = parser.parse_args()
    if args.backend == "http":
        answer = http_backend(args.model or "demo", args.url)
    else:
        make = modulm_backend if args.backend == "modulm" else transformers_backend
        answer = make(args.model or str(_CHECKPOINT))
    rows, answers, began = list(questions()), [], time.monotonic()
    for row in rows:
        answers.append(converse(row, answer))
        judged = verdict(row, answers[-1])
        if args.show == "all" or (args.show and judged != "right"):
            outcome = answers[-1].get("tool_calls") or answers[-1]["content"]
            print(f"{judged}: {' || '.join(row['ask'])!r} -> {outcome!r}", flush=True)
    print(table(rows, answers))
    broken_words = [
        w for row, a in zip(rows, answers, strict=True) for w in broken(row, a["content"])
    ]
    print(f"\nbroken words: {len(broken_words)} {broken_words[:20]}")
    print(f"{args.backend}, {time.monotonic() - began:.0f} seconds")


if __name__ == "__main__":
    main()
