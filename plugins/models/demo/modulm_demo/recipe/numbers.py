"""Number tasks in words and digits: counting, comparing, sorting, halves, shares, short chains."""

from random import Random

from . import words
from .arithmetic import add_thought, multiply_thought, subtract_thought
from .example import Example, assistant, fill, single, user
from .reference import sentence

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS = ("", "", *["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"])


def spelled(number: int) -> str:
    """A whole number from 0 to 9999 in English words."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    unit, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    more, rest = divmod(number, unit)
    return f"{spelled(more)} {name}" + (f" {spelled(rest)}" if rest else "")


_ASK_SUM = ("What is {e}?", "How much is {e}?", "{e}?", "What's {e}?", "Calculate {e}.",
            "Tell me what {e} is.", "Work out {e}.", "What do you get for {e}?", "{e}",
            "Can you calculate {e}?", "What does {e} make?", "{e} equals what?",
            "Please compute {e}.", "How many are {e}?", "{e} is?")  # fmt: skip


def in_words(rng: Random) -> Example:
    """Ask for a sum of numbers in words; the thought has the columns."""
    a, b, sign = rng.randint(0, 99), rng.randint(0, 60), rng.choice("++--*")
    if sign == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
    if sign == "-" and b > a:
        a, b = b, a
    spoken = {"+": ("plus", "and", "plus"), "-": ("minus", "take away", "minus"),
              "*": ("times", "times", "multiplied by")}  # fmt: skip
    question = fill(rng, _ASK_SUM, e=f"{spelled(a)} {rng.choice(spoken[sign])} {spelled(b)}")
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    thought = {"+": add_thought, "-": subtract_thought, "*": multiply_thought}[sign](a, b)
    turns = (user(sentence(question)), assistant(f"{a} {sign} {b} = {result}.", thought))
    return Example("number words", turns, thinking=True, expect=(f"= {result}",))


def written_out(rng: Random) -> Example:
    """Convert digits to words or back."""
    number = rng.choice((rng.randint(0, 100), rng.randint(0, 999), rng.randint(0, 9999)))
    if rng.random() < 0.6:
        ask = ("Write {n} in words.", "How do you write {n} in words?", "Spell out {n}.",
               "Write the number {n} as a word.", "{n} in words?", "What is {n} in words?",
               "Say {n} in words.")  # fmt: skip
        text = spelled(number)
        return single("number words", fill(rng, ask, n=number), f"{sentence(text)}.",
                      (sentence(text),))  # fmt: skip
    ask = ("Write {n} in figures.", "Write {n} as a number.", "What number is {n}?",
           "Write {n} in digits.", "{n} in digits?", "What is {n} as a number?")  # fmt: skip
    return single("number words", sentence(fill(rng, ask, n=spelled(number))), f"{number}",
                  (str(number),))  # fmt: skip


def divide(rng: Random) -> Example:
    """Ask for quotients without a remainder, halves, doubles, or percentages."""
    roll = rng.randrange(6)
    if roll <= 1:
        b, c = rng.randint(1, 12), rng.randint(1, 12)
        e = rng.choice((f"{b * c} / {b}", f"{b * c}/{b}", f"{b * c} divided by {b}",
                        f"{spelled(b * c)} divided by {spelled(b)}", f"{b * c} : {b}"))  # fmt: skip
        return single("division", sentence(fill(rng, _ASK_SUM, e=e)), f"{b * c} / {b} = {c}.",
                      (f"= {c}",))  # fmt: skip
    if roll == 2:
        half = rng.choice((rng.randint(1, 50), rng.randint(1, 10) * 50))
        ask = ("What is half of {n}?", "What is the half of {n}?", "Half of {n}?",
               "How much is half of {n}?", "Divide {n} by two.")  # fmt: skip
        return single("division", fill(rng, ask, n=half * 2), f"Half of {half * 2} is {half}.",
                      (str(half),))  # fmt: skip
    if roll == 3:
        number = rng.choice((rng.randint(1, 50), rng.randint(1, 10) * 50))
        ask = ("What is double {n}?", "What is the double of {n}?", "Double {n}.",
               "What is twice {n}?", "How much is two times {n}?")  # fmt: skip
        return single("division", fill(rng, ask, n=number), f"Twice {number} is {number * 2}.",
                      (str(number * 2),))  # fmt: skip
    if roll == 4:
        share, whole = (
            rng.choice((10, 50, 25, 20, 100)),
            rng.choice((20, 40, 60, 80, 100, 200, 300, 400, 500, 1000)),
        )
        ask = ("What is {p}% of {n}?", "What is {p} percent of {n}?", "{p}% of {n}?",
               "How much is {p}% of {n}?", "Calculate {p} percent of {n}.")  # fmt: skip
        return single("division", fill(rng, ask, p=share, n=whole),
                      f"{share}% of {whole} is {share * whole // 100}.",
                      (str(share * whole // 100),))  # fmt: skip
    people = rng.randint(2, 9)
    each, item = rng.randint(1, 10), rng.choice(words.ITEMS)
    ask = ("{p} friends share {n} {i} equally. How many {i} does each get?",
           "I have {n} {i} and {p} boxes. How many {i} go into each box?",
           "{n} {i} are divided among {p} children. How many does each child get?")  # fmt: skip
    return single("division", fill(rng, ask, p=people, n=people * each, i=item),
                  f"{people * each} / {people} = {each}, so the answer is {each} {item}.",
                  (f"= {each}",))  # fmt: skip


def chain(rng: Random) -> Example:
    """Ask for a chain of two operations."""
    a, b, c = (rng.randint(1, 30) for _ in range(3))
    first, second = rng.choice("++-"), rng.choice("++-")
    half = a + b if first == "+" else a - b
    result = half + c if second == "+" else half - c
    expression = rng.choice((f"{a} {first} {b} {second} {c}", f"{a}{first}{b}{second}{c}",
                        f"{a} {_SAID[first]} {b} {_SAID[second]} {c}"))  # fmt: skip
    thought = f"{a} {first} {b} = {half}\n{half} {second} {c} = {result}"
    turns = (user(fill(rng, _ASK_SUM, e=expression)),
             assistant(f"{a} {first} {b} {second} {c} = {result}.", thought))  # fmt: skip
    return Example("chains", turns, thinking=True, expect=(f"= {result}",))


_SAID = {"+": "plus", "-": "minus"}
_GREATER = ("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?",
            "What is more, {a} or {b}?", "Is {a} greater than {b}?", "Which is bigger, {a} or {b}?",
            "What is greater: {a} or {b}?")  # fmt: skip
_LESS = ("Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?",
         "What is less, {a} or {b}?", "Is {a} less than {b}?")  # fmt: skip
_BIG = ("ant", "mouse", "cat", "dog", "sheep", "horse", "elephant", "whale")


def compare(rng: Random) -> Example:
    """Ask for the larger of two numbers or animals, for odd or even, or for the next number."""
    roll = rng.random()
    if roll < 0.4:
        a, b = rng.sample(range(rng.choice((20, 100, 1000))), 2)
        ask = rng.choice(_GREATER + _LESS)
        more = ask in _GREATER
        picked = max(a, b) if more else min(a, b)
        answer = f"{picked} is {'larger' if more else 'smaller'} than {a + b - picked}."
        if ask.startswith("Is"):
            yes = picked == a
            answer = f"{'Yes' if yes else 'No'}, {answer}"
        return single("comparing", ask.format(a=a, b=b), answer, (answer,))
    if roll < 0.6:
        low, high = sorted(rng.sample(range(len(_BIG)), 2))
        first, second = rng.sample((_BIG[low], _BIG[high]), 2)
        ask, answer = rng.choice((
            ("Which is bigger, a {a} or a {b}?", _BIG[high]), ("What is larger: a {a} or a {b}?",
             _BIG[high]), ("Which animal is smaller, a {a} or a {b}?", _BIG[low]),
            ("Which is heavier, a {a} or a {b}?", _BIG[high])))  # fmt: skip
        from .reference import with_article

        how = "smaller" if "smaller" in ask else "heavier" if "heavier" in ask else "bigger"
        question = with_article(ask.format(a=first, b=second))
        return single("comparing", question, with_article(f"A {answer} is {how}."), (answer,))
    if roll < 0.8:
        number = rng.randint(0, 200)
        kind = "odd" if number % 2 else "even"
        ask = ("Is {n} odd or even?", "Is {n} even or odd?", "Is the number {n} even?",
               "Is {n} an odd number?", "Is {n} even?", "Is {n} odd?")  # fmt: skip
        return single("comparing", fill(rng, ask, n=number), f"{number} is {kind}.", (kind,))
    number = rng.choice((rng.randint(1, 99), rng.randint(100, 999)))
    after = rng.random() < 0.6
    ask = ("What comes after {n}?", "What number comes after {n}?", "Which number follows {n}?",
           "What is the next number after {n}?") if after else (
           "What comes before {n}?", "Which number comes before {n}?")  # fmt: skip
    neighbour = number + 1 if after else number - 1
    return single(
        "comparing",
        fill(rng, ask, n=number),
        f"{neighbour} comes {'after' if after else 'before'} {number}.",
        (str(neighbour),),
    )


def count(rng: Random) -> Example:
    """Ask to count up, down or in steps, or to continue a sequence."""
    roll = rng.random()
    if roll < 0.6:
        last = rng.choice((5, 10, 10, 20, 3, 7, 12, 15, 8, 6))
        down = rng.random() < 0.25
        text = spelled(last) if rng.random() < 0.5 else str(last)
        ask = (("Count down from {n}.", "Count backwards from {n}.", "Count down from {n} to 1.",
                "Count from {n} down to one.") if down else
               ("Count to {n}.", "Count from 1 to {n}.", "Count from one to {n}.",
                "Can you count to {n}?", "Please count up to {n}.",
                "List the numbers from 1 to {n}.",
                "Write the numbers 1 to {n}.", "Count to {n} for me."))  # fmt: skip
        row = list(range(1, last + 1))
        sequence = ", ".join(map(str, reversed(row) if down else row))
        return single("counting", fill(rng, ask, n=text), sequence, (sequence,))
    step, start = rng.choice((1, 2, 2, 3, 5, 10)), rng.randint(1, 20)
    row = [start * (step if step in (5, 10) else 1) + step * index for index in range(6)]
    if roll < 0.75:
        row = [step * index for index in range(1, 7)]
        ask = ("Count in steps of {n}.", "Count by {n}s.", "Give me the multiples of {n}.",
               "List multiples of {n}.")  # fmt: skip
        return single("counting", fill(rng, ask, n=step), ", ".join(map(str, row)), ())
    ask = ("What comes next: {r}?", "Continue: {r}", "Which number comes next? {r}",
           "What is the next number: {r}, ...?", "Continue the row {r}.",
           "Complete the pattern: {r}")  # fmt: skip
    return single("counting", fill(rng, ask, r=", ".join(map(str, row[:4]))),
                  f"The next number is {row[4]}.", (str(row[4]),))  # fmt: skip


def order(rng: Random) -> Example:
    """Ask to sort numbers, or for the minimum or maximum."""
    numbers = rng.sample(range(rng.choice((10, 50, 100))), rng.choice((3, 4, 4, 5)))
    listed = ", ".join(map(str, numbers))
    roll = rng.random()
    if roll < 0.5:
        ask = ("Sort these numbers: {l}", "Sort {l}.", "Put these numbers in order: {l}",
               "Order these numbers from small to large: {l}", "Sort the numbers {l}.",
               "Arrange {l} in ascending order.", "Can you sort {l}?")  # fmt: skip
        answer = ", ".join(map(str, sorted(numbers)))
        return single("ordering", fill(rng, ask, l=listed), answer, (answer,))
    if roll < 0.6:
        ask = ("Sort these numbers from large to small: {l}", "Sort {l} in descending order.")
        answer = ", ".join(map(str, sorted(numbers, reverse=True)))
        return single("ordering", fill(rng, ask, l=listed), answer, (answer,))
    if roll < 0.8:
        ask = ("Which is the largest number: {l}?", "What is the largest of {l}?",
               "Find the maximum of {l}.", "Which of these is the biggest: {l}?")  # fmt: skip
        return single("ordering", fill(rng, ask, l=listed), f"{max(numbers)} is the largest.",
                      (str(max(numbers)),))  # fmt: skip
    ask = ("Which is the smallest number: {l}?", "What is the smallest of {l}?",
           "Find the minimum of {l}.", "Which of these is the lowest: {l}?")  # fmt: skip
    return single("ordering", fill(rng, ask, l=listed), f"{min(numbers)} is the smallest.",
                  (str(min(numbers)),))  # fmt: skip


def numbers(rng: Random) -> Example:
    """Make an example of any of these."""
    make = rng.choices((in_words, written_out, divide, chain, compare, count, order),
                       (6, 3, 5, 4, 4, 4, 4))[0]  # fmt: skip
    return make(rng)
