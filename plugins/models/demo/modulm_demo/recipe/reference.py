"""Questions with one written answer: tables, definitions, everyday talk, translations, jokes.

The texts are in `texts/`; the first line of each file describes its format.
"""

import re
from functools import cache
from pathlib import Path
from random import Random

from .example import Example, assistant, fill, single, user

_TEXTS = Path(__file__).with_name("texts")
_A = re.compile(r"\b([Aa]) (?=[aeio]|u(?!ni|se|su))")
LANGUAGES = ("French", "German", "Spanish", "Italian")

_DEFINE = (
    "What is {w}?", "What's {w}?", "Define {w}.", "What does {w} mean?", "Explain {w}.",
    "Can you explain {w}?", "Tell me what {w} is.", "Explain {w} in simple words.",
    "What exactly is {w}?", "{w}: what is that?", "Do you know what {w} is?", "Describe {w}.",
    "Give me a definition of {w}.", "Please explain what {w} is.", "Explain {w} to a child.",
    "What do you know about {w}?", "In one sentence, what is {w}?", "Tell me about {w}.",
    "I want to know what {w} is.", "What is the meaning of {w}?",
)  # fmt: skip
_TRANSLATE = (
    "How do you say \"{w}\" in {l}?", "Translate \"{w}\" into {l}.", "What is \"{w}\" in {l}?",
    "Translate {w} to {l}.", "What is {w} in {l}?", "How do you say {w} in {l}?",
    "What is the {l} word for {w}?", "{w} in {l}?", "Say {w} in {l}.", "{l} for {w}?",
    "Translate into {l}: {w}", "Translate to {l}: \"{w}\"", "Give me the {l} for \"{w}\".",
    "Can you translate {w} into {l}?", "What do they say for {w} in {l}?",
    "Please translate \"{w}\" to {l}.", "What does {w} mean in {l}?", "Translate '{w}' to {l}.",
)  # fmt: skip
_BACK = (
    "What does \"{w}\" mean in English?", "What does {w} mean?", "Translate {w} to English.",
    "What is \"{w}\" in English?", "Translate \"{w}\" from {l} to English.",
    "What does the {l} word \"{w}\" mean?", "What is the English word for {w}?",
)  # fmt: skip
_WHICH_LANGUAGE = (
    "Which language is \"{w}\"?", "What language is \"{w}\"?", "In which language is \"{w}\"?",
    "What language is this: {w}", "Which language is this? {w}", "Detect the language: {w}",
)  # fmt: skip
_JOKES = (
    "Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Joke, please.", "A joke please",
    "Tell me another joke.", "Make me laugh.", "Say something funny.", "Can you tell a joke?",
    "Tell a joke.", "Give me a joke.", "I want to hear a joke.", "Do you know any jokes?",
    "Got a joke for me?", "Tell me something funny.", "Tell me a short joke.", "Another joke!",
    "Tell us a good joke.", "Please tell me a funny joke.", "Write a joke.", "Know any good jokes?",
)  # fmt: skip
_JOKES_ABOUT = (
    "Tell me a joke about {w}.", "A joke about {w}, please.", "Do you know a joke about {w}?",
    "Make a joke about {w}.", "Give me a joke about {w}.", "Write a joke about {w}.",
    "Can you tell me a joke about {w}?", "Tell a {w} joke.", "Do you know a {w} joke?",
)  # fmt: skip
_RIDDLES = (
    "Tell me a riddle.", "Give me a riddle.", "Do you know a riddle?", "A riddle, please.",
    "Ask me a riddle.", "Can you tell me a riddle?",
)  # fmt: skip
_AROUND = (
    *["{q}"] * 14, "Can you help me? {q}", "Hey, {q}", "Quick question: {q}", "I wonder: {q}",
    "{q} Please answer briefly.", "{q} Thanks!", "Hi! {q}", "Please: {q}",
    "{q} Answer in one sentence.",
    "I have a question: {q}", "So, {q}", "{q} I am curious.", "One question: {q}",
)  # fmt: skip


def with_article(text: str) -> str:
    """Change `a` to `an` before vowels."""
    return _A.sub(r"\1n ", text)


def sentence(text: str) -> str:
    """Capitalize the first letter."""
    return text[:1].upper() + text[1:]


@cache
def lines(name: str) -> tuple[str, ...]:
    """The lines of a text, without empty lines and comments."""
    written = (_TEXTS / name).read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in written if line.strip() and not line.startswith("# "))


@cache
def pairs(name: str, mark: str = ": ") -> tuple[tuple[str, str], ...]:
    """Lines of two parts."""
    return tuple((left, right) for left, _, right in (row.partition(mark) for row in lines(name)))


@cache
def blocks(name: str) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """(questions, answers) of a file in the format of answers.txt."""
    parsed: list[tuple[list[str], list[str]]] = []
    for line in lines(name):
        if line.startswith("= "):
            parsed[-1][1].append(line.removeprefix("= ").replace("\\n", "\n").replace("\\\\", "\\"))
        else:
            parsed.append(([ask.strip() for ask in line.split(" | ")], []))
    return tuple((tuple(questions), tuple(answers)) for questions, answers in parsed)


@cache
def relations() -> tuple[tuple[tuple[str, ...], str, tuple[tuple[str, str], ...]], ...]:
    """(questions, answer, pairs) of relations.txt."""
    parsed: list[tuple[list[str], str, tuple[tuple[str, str], ...]]] = []
    questions: list[str] = []
    answer = ""
    for line in lines("relations.txt"):
        if line.startswith("? "):
            questions.append(line.removeprefix("? "))
        elif line.startswith("= "):
            answer = line.removeprefix("= ")
        else:
            rows = (row.partition(": ") for row in line.split("; "))
            parsed.append((questions, answer, tuple((left, right) for left, _, right in rows)))
            questions = []
    return tuple((tuple(questions), answer, rows) for questions, answer, rows in parsed)


@cache
def translations() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(English, the translation into each of LANGUAGES)."""
    return tuple((left, tuple(right.split(", "))) for left, right in pairs("translations.txt"))


def _around(rng: Random, question: str) -> str:
    return rng.choice(_AROUND).format(q=question)


def related(rng: Random) -> tuple[str, str, str]:
    """(question, answer, required text) of a pair of a table."""
    questions, answer, rows = rng.choices(relations(), [len(r[2]) ** 0.8 for r in relations()])[0]
    left, right = rng.choice(rows)
    question = sentence(with_article(rng.choice(questions).format(left, right)))
    return question, sentence(with_article(answer.format(left, right))), right


def world(rng: Random) -> Example:
    """Ask a question that a table answers."""
    question, answer, right = related(rng)
    return single("world", _around(rng, question), answer, (sentence(right) if answer.startswith(
        sentence(right)) else right,))  # fmt: skip


def definition(rng: Random) -> Example:
    """Ask for a definition."""
    word, answer = rng.choice(pairs("definitions.txt"))
    term = word if rng.random() < 0.85 else re.sub(r"^(an?|the) ", "", word)
    question = _around(rng, sentence(fill(rng, _DEFINE, w=term)))
    return single("definitions", question, answer, (answer,))


def everyday(rng: Random) -> Example:
    """Ask why or how, for advice, about feelings, or for small programs."""
    questions, answers = rng.choice(blocks("answers.txt"))
    answer = rng.choice(answers)
    question = rng.choice(questions)
    if len(question.split()) > 3:
        question = _around(rng, question)
    return single("everyday", question, answer, (answer,) if len(answers) == 1 else ())


def abroad(rng: Random) -> Example:
    """Small talk in German, French and a few other languages."""
    if rng.random() < 0.25:
        country, city = rng.choice(_GERMAN_COUNTRIES)
        ask = rng.choice(("Was ist die Hauptstadt von {}?", "Wie heißt die Hauptstadt von {}?",
                          "Hauptstadt von {}?", "Nenne die Hauptstadt von {}."))  # fmt: skip
        answer = f"Die Hauptstadt von {country} ist {city}."
        if rng.random() < 0.5:
            country, city = rng.choice(_FRENCH_COUNTRIES)
            ask = rng.choice(("Quelle est la capitale {} ?", "La capitale {} ?",
                              "Quelle ville est la capitale {} ?"))  # fmt: skip
            answer = f"La capitale {country} est {city}."
        return single("abroad", ask.format(country), answer, (city,))
    if rng.random() < 0.15:
        a, b = rng.randint(1, 20), rng.randint(1, 20)
        ask = rng.choice(("Was ist {} plus {}?", "Wie viel ist {} plus {}?", "Rechne {} plus {}.",
                          "Combien font {} plus {} ?", "Calcule {} plus {}."))  # fmt: skip
        return single("abroad", ask.format(a, b), f"{a} + {b} = {a + b}.", (f"= {a + b}",))
    questions, answers = rng.choice(blocks("abroad.txt"))
    return single(
        "abroad", rng.choice(questions), rng.choice(answers), answers[:1] * (len(answers) < 2)
    )


def _capitals(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(pair.split(":")) for pair in " ".join(text.split()).split(", "))


_GERMAN_COUNTRIES = _capitals("""
    Frankreich:Paris, Deutschland:Berlin, Italien:Rom, Spanien:Madrid, Portugal:Lissabon,
    Österreich:Wien, Polen:Warschau, Griechenland:Athen, Norwegen:Oslo,
    Schweden:Stockholm, Finnland:Helsinki, Dänemark:Kopenhagen, Russland:Moskau,
    England:London, Japan:Tokio, China:Peking, Irland:Dublin, Ungarn:Budapest,
    Belgien:Brüssel, Ägypten:Kairo
""")
_FRENCH_COUNTRIES = _capitals("""
    de la France:Paris, de l'Allemagne:Berlin, de l'Italie:Rome, de l'Espagne:Madrid, du
    Portugal:Lisbonne, de l'Autriche:Vienne, de la Pologne:Varsovie, de la Grèce:Athènes,
    de la Norvège:Oslo, de la Suède:Stockholm, de la Russie:Moscou, du Japon:Tokyo, de la
    Chine:Pékin, de la Belgique:Bruxelles, de la Suisse:Berne, de l'Angleterre:Londres
""")


def translation(rng: Random) -> Example:
    """Ask to translate a word or phrase, or which language it is."""
    english, foreign = rng.choice(translations())
    index = rng.choices(range(4), (4, 4, 2, 2))[0]
    language, word = LANGUAGES[index], foreign[index]
    roll = rng.random()
    if roll < 0.8:
        question = sentence(fill(rng, _TRANSLATE, w=english, l=language))
        answer = f'In {language}, "{english}" is "{word}".'
        return single("translation", question, answer, (word,))
    if roll < 0.92 or sum(word in row[1] for row in translations()) > 1:
        question = sentence(fill(rng, _BACK, w=word, l=language))
        return single("translation", question, f'"{word}" means "{english}".', (english,))
    question = fill(rng, _WHICH_LANGUAGE, w=word)
    return single("translation", question, f'"{word}" is {language}.', (language,))


def joke(rng: Random) -> Example:
    """Ask for a joke, sometimes about a topic, or a riddle."""
    if rng.random() < 0.15:
        riddle, answer = rng.choice(pairs("riddles.txt", " = "))
        if rng.random() < 0.5:
            return single("jokes", riddle, answer, (answer,))
        return single("jokes", rng.choice(_RIDDLES), f"{riddle} ({answer})", ())
    topic, text = rng.choice(pairs("jokes.txt"))
    if rng.random() < 0.55:
        return single("jokes", rng.choice(_JOKES), text, ())
    subject = topic if topic.endswith(("h", "c", "ce", "sea", "ol", "od", "ol")) else topic + "s"
    ask = rng.choice(_JOKES_ABOUT)
    subject = rng.choice((topic, f"a {topic}", subject)) if "about" in ask else topic
    turns = (user(with_article(ask.format(w=subject))), assistant(text))
    return Example("jokes", turns)
