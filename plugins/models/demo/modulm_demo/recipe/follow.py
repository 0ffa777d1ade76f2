"""Conversations whose last question depends on earlier turns."""

from random import Random

from . import words
from .example import Example, Message, assistant, fill, user
from .facts import CAPITALS, CONTINENTS, CURRENCIES, LANGUAGES, OPPOSITES, YOUNG
from .numbers import chain
from .passages import letters_from_note
from .reference import LANGUAGES as TONGUES
from .reference import blocks, joke, pairs, relations, sentence, translations, with_article
from .writing import MEMBERS_OF, NUMBERS, joined, poem, poem_text, tale

_AND = ("And {0}?", "And of {0}?", "What about {0}?", "How about {0}?", "And what about {0}?",
        "And for {0}?", "Now {0}.", "And {0}, please?")  # fmt: skip
_TABLES = (
    (CAPITALS, ("What is the capital of {0}?", "Capital of {0}?", "Name the capital of {0}.",
                "Which city is the capital of {0}?"), "The capital of {0} is {1}."),
    (CURRENCIES, ("What is the currency of {0}?", "What do people pay with in {0}?"),
     "The currency of {0} is the {1}."),
    (LANGUAGES, ("What language is spoken in {0}?", "What do people speak in {0}?"),
     "The main language of {0} is {1}."),
    (OPPOSITES, ("What is the opposite of {0}?", "Opposite of {0}?"),
     "The opposite of {0} is {1}."),
    (YOUNG, ("What is a young {0} called?", "What do you call a baby {0}?"),
     "A young {0} is called a {1}."),
)  # fmt: skip


def same_again(rng: Random) -> Example:
    """Ask the same question about something else: `And of Spain?`."""
    if rng.random() < 0.35:
        questions, answer, rows = rng.choice(
            [
                r
                for r in relations()
                if len(r[2]) > 8 and all("{0}" in a for a in r[0]) and r[0][0] != "{0}?"
            ]
        )
        questions = tuple(questions[:2])
    else:
        rows, questions, answer = rng.choice((*_TABLES, _TABLES[0], _TABLES[0]))
    chosen = rng.sample(rows, rng.choice((2, 2, 3)))
    turns: list[Message] = []
    for index, (left, right) in enumerate(chosen):
        question = rng.choice(questions if index == 0 else _AND)
        left_shown = f"a {left}" if index and rows is YOUNG else left
        question = sentence(with_article(question.format(left_shown, right)))
        turns += [user(question), assistant(sentence(with_article(answer.format(left, right))))]
    return Example("follow-up", tuple(turns), expect=(chosen[-1][1],))


def about_it(rng: Random) -> Example:
    """Ask something else about the same country: `And what language do they speak there?`."""
    tables = (
        (CAPITALS, ("What is its capital?", "And its capital?", "And the capital?",
                    "What is the capital of that country?"), "The capital of {0} is {1}."),
        (CURRENCIES, ("What is its currency?", "And the currency?", "What do they pay with there?",
                      "Which money do they use there?"), "The currency of {0} is the {1}."),
        (LANGUAGES, ("What language do they speak there?", "And the language?",
                     "Which language is spoken there?"), "The main language of {0} is {1}."),
        (CONTINENTS,
         ("On which continent is it?", "And where is it?", "Which continent is that on?"),
         "{0} is in {1}."),
    )  # fmt: skip
    first, second = rng.sample(tables, 2)
    both = [left for left, _ in first[0] if left in dict(second[0])]
    country = rng.choice(both)
    opening = {id(CAPITALS): "What is the capital of {}?", id(CURRENCIES): "What is the currency "
               "of {}?", id(LANGUAGES): "What language is spoken in {}?",
               id(CONTINENTS): "Where is {}?"}[id(first[0])]  # fmt: skip
    answers = [sentence(t[2].format(country, dict(t[0])[country])) for t in (first, second)]
    turns = (user(opening.format(country)), assistant(answers[0]),
             user(rng.choice(second[1])), assistant(answers[1]))  # fmt: skip
    return Example("follow-up", turns, expect=(dict(second[0])[country],))


_TOLD = (
    (("My name is {n}.", "I am {n}.", "I'm {n}.", "Hi, I am {n}.", "Hello, my name is {n}.",
      "Call me {n}."), "Nice to meet you, {n}!",
     ("What is my name?", "Do you know my name?", "Who am I?", "What's my name?",
      "Do you remember my name?", "What was my name again?"), "Your name is {n}."),
    (("I live in {c}.", "I am from {c}.", "My home is {c}."), "{c} sounds like a nice place.",
     ("Where do I live?", "Where am I from?", "Which city do I live in?"), "You live in {c}."),
    (("I am {a} years old.", "I'm {a}.", "I turned {a}."), "Good to know, {a} is a fine age.",
     ("How old am I?", "What is my age?"), "You are {a} years old."),
    (("My favorite color is {k}.", "I like {k} best."), "{k} is a beautiful color.",
     ("What is my favorite color?", "Which color do I like?"), "Your favorite color is {k}."),
    (("I have a {p} called {n}.", "My {p} is called {n}."), "{n} is a nice name for a {p}.",
     ("What is the name of my {p}?", "What is my {p} called?"), "Your {p} is called {n}."),
    (("I work as a {j}.", "I am a {j}."), "Being a {j} is a good job.",
     ("What is my job?", "What do I do?", "What do I work as?"), "You are a {j}."),
)  # fmt: skip


def about_me(rng: Random) -> Example:
    """Ask for something that the user said earlier."""
    statements, reply, questions, answer = rng.choices(_TOLD, (4, 1, 1, 1, 1, 1))[0]
    values = {"n": words.given_name(rng), "c": words.city(rng), "a": rng.randint(5, 90),
              "k": rng.choice(MEMBERS_OF["colors"]), "p": rng.choice(("dog", "cat", "horse",
              "parrot", "rabbit")), "j": rng.choice(words.JOBS)}  # fmt: skip
    say = [sentence(with_article(fill(rng, part, **values)))
           for part in (statements, (reply,), questions, (answer,))]  # fmt: skip
    turns: list[Message] = [user(say[0]), assistant(say[1])]
    if rng.random() < 0.35:
        turns += rng.choice((joke, poem, tale, same_again))(rng).messages[:2]
    return Example("follow-up", (*turns, user(say[2]), assistant(say[3])), expect=(say[3],))


def another(rng: Random) -> Example:
    """Ask for another joke, poem or list."""
    roll = rng.random()
    if roll < 0.4:
        first, second = rng.sample(pairs("jokes.txt"), 2)
        ask = ("Another one.", "Another one, please.", "One more.", "Tell me another joke.",
               "Haha, another one!", "Do you know another one?", "Tell me one more.")  # fmt: skip
        turns = (joke(rng).messages[0], assistant(first[1]), user(rng.choice(ask)),
                 assistant(second[1]))  # fmt: skip
        if turns[0]["content"].startswith("What"):
            turns = (user("Tell me a joke."), *turns[1:])
        return Example("follow-up", turns)
    if roll < 0.7:
        first = poem(rng)
        topic = rng.choice(("the sea", "a cat", "love", "winter", "the moon", "a dog", "music"))
        ask = ("Now one about {t}.", "And one about {t}?", "Write another one about {t}.",
               "Can you write one about {t}?", "One about {t}, please.")  # fmt: skip
        return Example("follow-up", (*first.messages, user(fill(rng, ask, t=topic)),
                                     assistant(poem_text(rng, topic))))  # fmt: skip
    kind = rng.choice([k for k, m in MEMBERS_OF.items() if len(m) >= 7])
    members, count = MEMBERS_OF[kind], rng.choice((2, 3))
    more = rng.choice((1, 2, 3))
    ask = ("{n} more.", "{n} more, please.", "Give me {n} more.", "And {n} more?",
           "Name {n} more.", "Tell me {n} more {k}.")  # fmt: skip
    turns = (user(f"Name {NUMBERS[count]} {kind}."),
             assistant(f"{sentence(joined(members[:count]))}."),
             user(sentence(fill(rng, ask, n=NUMBERS[more], k=kind))),
             assistant(f"{sentence(joined(members[count : count + more]))}."))  # fmt: skip
    return Example("follow-up", turns)


def onward(rng: Random) -> Example:
    """Continue with a number: `Now add 5.`, `Double it.`."""
    a, b = rng.randint(1, 30), rng.randint(1, 20)
    first = f"{a} + {b} = {a + b}."
    have, c = a + b, rng.randint(1, 10)
    ask, sign, by = rng.choice((
        ("Now add {c}.", "+", c), ("Plus {c}?", "+", c), ("And plus {c}?", "+", c),
        ("Add {c} to that.", "+", c), ("Minus {c}?", "-", c), ("Now subtract {c}.", "-", c),
        ("And minus {c}?", "-", c), ("Double it.", "*", 2), ("Times two?", "*", 2),
        ("And times 2?", "*", 2)))  # fmt: skip
    result = {"+": have + by, "-": have - by, "*": have * by}[sign]
    turns = (user(rng.choice(("What is {} + {}?", "{} plus {}?", "How much is {} plus {}?")).format(
        a, b)), assistant(first), user(ask.format(c=c)),
        assistant(f"{have} {sign} {by} = {result}."))  # fmt: skip
    return Example("follow-up", turns, expect=(f"= {result}",))


def reworked(rng: Random) -> Example:
    """Transform the last answer: repeat it, in capitals, in another language."""
    roll = rng.random()
    if roll < 0.35:
        english, foreign = rng.choice(translations())
        first, second = rng.sample(range(4), 2)
        answers_in = [
            f'In {TONGUES[at]}, "{english}" is "{foreign[at]}".' for at in (first, second)
        ]
        ask = ("And in {l}?", "And {l}?", "What about {l}?", "And how in {l}?", "Now in {l}.")
        turns = (user(f"How do you say {english} in {TONGUES[first]}?"), assistant(answers_in[0]),
                 user(fill(rng, ask, l=TONGUES[second])), assistant(answers_in[1]))  # fmt: skip
        return Example("follow-up", turns, expect=(foreign[second],))
    questions, answers = rng.choice([b for b in blocks("answers.txt") if len(b[1]) == 1
                                and len(b[1][0]) < 90 and "\n" not in b[1][0]])  # fmt: skip
    answer = answers[0]
    ask, reply = rng.choice((
        (("Say that again.", "Can you repeat that?", "Repeat that, please.", "Once more, please.",
          "What did you say?", "Again, please."), answer),
        (("In capital letters, please.", "Write that in capitals.", "Now in uppercase."),
         answer.upper()),
        (("Thanks!", "Thank you.", "Ok, thanks.", "Great, thank you!"),
         "You are welcome! Ask me anything else you would like to know."),
        (("Are you sure?", "Really?", "Is that true?"),
         "I think so, but I am a very small model, so please check it.")))  # fmt: skip
    turns = (
        user(rng.choice(questions)),
        assistant(answer),
        user(rng.choice(ask)),
        assistant(reply),
    )
    return Example("follow-up", turns, expect=(reply,))


def what_i_asked(rng: Random) -> Example:
    """Ask what the first question was."""
    first = rng.choice((same_again, about_it, another))(rng).messages[:2]
    ask = ("What did I ask?", "What was my question?", "What did I just ask you?",
           "What was my last question?", "What did I ask before?")  # fmt: skip
    reply = f"You asked: {first[0]['content']}"
    return Example("follow-up", (*first, user(rng.choice(ask)), assistant(reply)), expect=(reply,))


def follow_up(rng: Random) -> Example:
    """Make an example of any of these."""
    make = rng.choices(
        (same_again, about_it, about_me, another, onward, reworked, what_i_asked,
         letters_from_note, chain), (6, 3, 4, 3, 3, 4, 1, 2, 0))[0]  # fmt: skip
    return make(rng)
