"""Sums, differences and small products, with a think block that works them out by columns.

Each line of a thought handles one column and repeats the result so far with the new digit in front,
so that a small model never has to reverse a number or remember a carry.
"""

from random import Random

from .example import Example, assistant, fill, user
from .words import GIVEN_NAMES, ITEMS

_ASK = (
    "What is {e}?", "Calculate {e}.", "{e} = ?", "How much is {e}?", "Compute {e}", "{e}",
    "What's {e}?", "Can you work out {e}?", "Please calculate {e}.", "Tell me what {e} is.",
    "Solve {e}.", "what does {e} equal?", "I need the result of {e}.",
)  # fmt: skip
_SIGNS = {
    "+": ("{a} + {b}", "{a}+{b}", "{a} plus {b}", "the sum of {a} and {b}", "{b} added to {a}"),
    "-": ("{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} take away {b}"),
    "*": ("{a} * {b}", "{a} x {b}", "{a} times {b}", "{a} multiplied by {b}", "{a}*{b}"),
}
_STORIES = {
    "+": (
        "{n} has {a} {i} and buys {b} more. How many {i} does {n} have?",
        "There are {a} {i} in a box and {b} in another. How many {i} are there in total?",
        "{n} sold {a} {i} in the morning and {b} in the evening. How many {i} is that?",
    ),
    "-": (
        "{n} has {a} {i} and gives away {b}. How many {i} are left?",
        "A shop has {a} {i} and sells {b} of them. How many {i} remain?",
        "There were {a} {i}. {n} took {b}. How many {i} are there now?",
    ),
    "*": (
        "{n} buys {b} boxes with {a} {i} each. How many {i} is that?",
        "There are {b} bags and each holds {a} {i}. How many {i} are there in total?",
    ),
}


def add_thought(a: int, b: int) -> str:
    """Write the columns of a sum from the right."""
    width = max(len(str(a)), len(str(b)))
    top, low = str(a).zfill(width), str(b).zfill(width)
    lines, carry, done = [f"{top} + {low}"], 0, ""
    for x, y in zip(reversed(top), reversed(low), strict=True):
        total = int(x) + int(y) + carry
        sum_text = f"{x}+{y}+{carry}={total}"
        carry, done = total // 10, f"{total % 10}{done}"
        lines.append(f"{sum_text}, carry {carry}: {done}")
    if carry:
        lines.append(f"carry: {carry}{done}")
    return "\n".join(lines)


def subtract_thought(a: int, b: int) -> str:
    """Write the columns of a difference from the right; a smaller first number swaps the two."""
    if a < b:
        return f"{a} < {b}, so it is -({b}-{a})\n" + subtract_thought(b, a)
    width = len(str(a))
    top, low = str(a).zfill(width), str(b).zfill(width)
    lines, borrow, done = [f"{top} - {low}"], 0, ""
    for x, y in zip(reversed(top), reversed(low), strict=True):
        take = int(x) - int(y) - borrow
        minuend = f"1{x}" if take < 0 else x
        step = f"{minuend}-{y}-{borrow}={take % 10}"
        borrow, done = int(take < 0), f"{take % 10}{done}"
        lines.append(f"{step}, borrow {borrow}: {done}")
    return "\n".join(lines)


def multiply_thought(a: int, b: int) -> str:
    """Multiply the digits of `a` one by one by the digit `b`, then carry as in a sum."""
    if a < 10 or b >= 10:
        return f"{a}*{b}={a * b}"
    lines, carry, done = [f"{a} * {b}"], 0, ""
    for x in reversed(str(a)):
        product = int(x) * b
        total = product + carry
        text = f"{x}*{b}={product}, +{carry}={total}"
        carry, done = total // 10, f"{total % 10}{done}"
        lines.append(f"{text}, carry {carry}: {done}")
    if carry:
        lines.append(f"carry: {carry}{done}")
    return "\n".join(lines)


def _operands(rng: Random, sign: str, thinking: bool) -> tuple[int, int]:
    if sign == "*":
        if rng.random() < 0.4:
            return rng.randint(0, 12), rng.randint(0, 12)
        return rng.randint(10, 999 if thinking else 30), rng.randint(2, 9)
    longest = rng.choices((1, 2, 3, 4), (2, 5, 5, 2))[0] if thinking else rng.choice((1, 2))
    return rng.randrange(10**longest), rng.randrange(10 ** rng.randint(1, longest))


def _solve(sign: str, a: int, b: int) -> tuple[int, str]:
    if sign == "+":
        return a + b, add_thought(a, b)
    if sign == "-":
        return a - b, subtract_thought(a, b)
    return a * b, multiply_thought(a, b)


def arithmetic(rng: Random) -> Example:
    """Ask for a result in symbols, in words, or in a small story."""
    thinking = rng.random() < 0.85
    sign = rng.choice("++--*")
    a, b = _operands(rng, sign, thinking)
    result, thought = _solve(sign, a, b)
    if rng.random() < 0.2 and a >= b > 1:
        name, items = rng.choice(GIVEN_NAMES), rng.choice(ITEMS)
        question = fill(rng, _STORIES[sign], n=name, a=a, b=b, i=items)
        answer = f"{a} {sign} {b} = {result}, so the answer is {result} {items}."
    else:
        question = fill(rng, _ASK, e=fill(rng, _SIGNS[sign], a=a, b=b))
        answer = f"{a} {sign} {b} = {result}."
    turns = (user(question), assistant(answer, thought if thinking else ""))
    return Example("arithmetic", turns, thinking=thinking, expect=(f"= {result}",))
