"""Conversations with tools: one call, several calls, answers from results, and no call at all."""

from dataclasses import replace
from random import Random

from .arithmetic import arithmetic
from .example import Example, assistant, fill, user
from .extract import extract
from .facts import fact
from .numbers import numbers
from .passages import reading
from .reference import definition, everyday, joke, world
from .talk import small_talk
from .toolbox import KINDS, Arguments, Declared, as_text, declare, make_values
from .writing import poem

_MAIN = ("weather", "calculator", "search")
_PARALLEL = ("weather", "calculator", "search", "time", "stock")
_WITHOUT = (fact, small_talk, extract, arithmetic, world, everyday, definition, joke, poem, numbers,
            reading)  # fmt: skip
_SPOKEN_SIGNS = {" * ": (" times ", " x "), " + ": (" plus ",), " - ": (" minus ",)}


def toolset(rng: Random, wanted: list[str], most: int = 4) -> dict[str, Declared]:
    """Declare the requested kinds among distractors, in random order, under distinct names."""
    kinds = list(wanted)
    others = [kind for kind in KINDS if kind not in wanted]
    kinds += rng.sample(others, rng.randint(0, most - len(wanted)))
    rng.shuffle(kinds)
    return {kind: declare(rng, KINDS[kind]) for kind in kinds}


def _schemas(declared: dict[str, Declared]) -> tuple:
    return tuple(tool.schema for tool in declared.values())


def _calling(calls: list[dict], thought: str) -> dict:
    return {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": calls}


def _thought(rng: Random, names: list[str]) -> str:
    if len(names) == 1:
        return f"I can use {names[0]} for this."
    return f"I need {len(names)} calls: {', '.join(names)}."


def _ask(rng: Random, kind: str, values: Arguments) -> str:
    """Phrase a request; expressions are sometimes in words."""
    values_shown = dict(values)
    if kind == "calculator" and rng.random() < 0.3:
        for sign, spoken in _SPOKEN_SIGNS.items():
            values_shown["e"] = values_shown["e"].replace(sign, rng.choice(spoken))
    return fill(rng, KINDS[kind].asks, **values_shown)


def _pick(rng: Random) -> str:
    return rng.choice(_MAIN) if rng.random() < 0.65 else rng.choice(list(KINDS))


def tool_call(rng: Random) -> Example:
    """A request that one tool answers."""
    kind = _pick(rng)
    declared = toolset(rng, [kind])
    values = make_values(rng, KINDS[kind])
    question = _ask(rng, kind, values)
    thinking = rng.random() < 0.6
    thought = _thought(rng, [declared[kind].name]) if thinking else ""
    turns = (user(question), _calling([declared[kind].call(values)], thought))
    return Example("tool call", turns, _schemas(declared), thinking)


def _same_tool(rng: Random) -> tuple[str, list[tuple[str, Arguments]]]:
    """Ask one tool about two or three things."""
    kind = rng.choice(_PARALLEL)
    field = next(iter(KINDS[kind].fields))
    several = [make_values(rng, KINDS[kind]) for _ in range(rng.choice((2, 2, 3)))]
    listed = [str(values[field]) for values in several]
    joined = ", ".join(listed[:-1]) + f" and {listed[-1]}"
    question = KINDS[kind].joint.format(joined)
    return question, [(kind, values) for values in several]


def _two_tools(rng: Random) -> tuple[str, list[tuple[str, Arguments]]]:
    """Ask two different tools in one message."""
    kinds = rng.sample(list(KINDS), 2)
    pairs = [(kind, make_values(rng, KINDS[kind])) for kind in kinds]
    requests = [_ask(rng, kind, values) for kind, values in pairs]
    link = rng.choice((" ", " And ", " Also: "))
    return requests[0] + link + requests[1], pairs


def parallel_calls(rng: Random) -> Example:
    """A request that needs several calls."""
    question, pairs = _same_tool(rng) if rng.random() < 0.6 else _two_tools(rng)
    declared = toolset(rng, sorted({kind for kind, _ in pairs}))
    calls = [declared[kind].call(values) for kind, values in pairs]
    thinking = rng.random() < 0.6
    thought = _thought(rng, [call["function"]["name"] for call in calls]) if thinking else ""
    turns = (user(question), _calling(calls, thought))
    return Example("parallel calls", turns, _schemas(declared), thinking)


def tool_result(rng: Random) -> Example:
    """A call, its result, and the answer from it."""
    count = rng.choice((1, 1, 1, 2))
    kind = _pick(rng) if count == 1 else rng.choice(_PARALLEL)
    declared = toolset(rng, [kind], most=3)
    several = [make_values(rng, KINDS[kind]) for _ in range(count)]
    results = [KINDS[kind].result(rng) for _ in several]
    question = _ask(rng, kind, several[0])
    if count > 1:
        field = next(iter(KINDS[kind].fields))
        question = KINDS[kind].joint.format(" and ".join(str(v[field]) for v in several))
    thinking = rng.random() < 0.6
    names = [declared[kind].name] * count
    call = _calling([declared[kind].call(v) for v in several], _thought(rng, names) * thinking)
    returned = ({"role": "tool", "name": names[0], "content": as_text(r)} for r in results)
    replies = [KINDS[kind].tells.format(**v, **r) for v, r in zip(several, results, strict=True)]
    expect = tuple(str(value) for result in results for value in result.values())
    turns = (user(question), call, *returned, assistant(" ".join(replies)))
    return Example("tool result", turns, _schemas(declared), thinking, expect)


_THEN = ("{a} Then: {b}", "First: {a} Then: {b}", "{a} After that: {b}", "{a} And then: {b}",
         "{a} When you have that: {b}", "Do this first: {a} And this second: {b}")  # fmt: skip


def tools_in_a_row(rng: Random) -> Example:
    """Two requests; the second call follows the first one's result."""
    kinds = rng.sample(list(KINDS), 2) if rng.random() < 0.8 else [_pick(rng)] * 2
    declared = toolset(rng, sorted(set(kinds)), most=3)
    values = [make_values(rng, KINDS[kind]) for kind in kinds]
    requests = [_ask(rng, kind, each) for kind, each in zip(kinds, values, strict=True)]
    question = rng.choice(_THEN).format(a=requests[0], b=requests[1])
    thinking, turns, replies, expect = rng.random() < 0.6, [user(question)], [], []
    for kind, each in zip(kinds, values, strict=True):
        result = KINDS[kind].result(rng)
        thought = _thought(rng, [declared[kind].name]) * thinking
        turns.append(_calling([declared[kind].call(each)], thought))
        turns.append({"role": "tool", "name": declared[kind].name, "content": as_text(result)})
        replies.append(KINDS[kind].tells.format(**each, **result))
        expect += [str(value) for value in result.values()]
    if rng.random() < 0.25:
        return Example("tools in a row", tuple(turns[:-1]), _schemas(declared), thinking)
    turns.append(assistant(" ".join(replies)))
    return Example("tools in a row", tuple(turns), _schemas(declared), thinking, tuple(expect))


def no_call(rng: Random) -> Example:
    """A question that needs none of the available tools."""
    make = rng.choices(_WITHOUT, (4, 3, 2, 1, 3, 3, 1, 1, 1, 1, 1))[0]
    answered = make(rng)
    kinds = [kind for kind in KINDS if kind != "translate"]
    if make in (arithmetic, numbers):
        kinds.remove("calculator")
    tools = tuple(declare(rng, KINDS[k]).schema for k in rng.sample(kinds, rng.choice((1, 2, 3))))
    return replace(answered, category="no call", tools=tools)
