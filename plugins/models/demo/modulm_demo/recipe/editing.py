"""Tasks on a given text: rewriting, spelling, sorting words, sentiment, repeating."""

from random import Random

from . import words
from .example import Example, fill, single
from .reference import sentence
from .writing import MEMBERS_OF, joined

_WHO = ("I", "We", "They", "The children", "My friends", "You")
# (verb, past tense, going on, what comes after it)
_VERBS = (
    ("play", "played", "playing", "in the garden"), ("eat", "ate", "eating", "an apple"),
    ("walk", "walked", "walking", "to school"), ("see", "saw", "seeing", "a red bird"),
    ("buy", "bought", "buying", "fresh bread"), ("read", "read", "reading", "a good book"),
    ("write", "wrote", "writing", "a letter"), ("drink", "drank", "drinking", "cold water"),
    ("go", "went", "going", "home"), ("sing", "sang", "singing", "a song"),
    ("like", "liked", "liking", "the new teacher"),
    ("visit", "visited", "visiting", "the old town"),
    ("open", "opened", "opening", "the window"), ("help", "helped", "helping", "the neighbor"),
    ("find", "found", "finding", "a small key"), ("make", "made", "making", "a big cake"),
    ("take", "took", "taking", "the train"), ("watch", "watched", "watching", "a film"),
    ("work", "worked", "working", "in the city"), ("sleep", "slept", "sleeping", "very well"),
    ("clean", "cleaned", "cleaning", "the kitchen"), ("swim", "swam", "swimming", "in the lake"),
    ("need", "needed", "needing", "more time"), ("want", "wanted", "wanting", "a bicycle"),
)  # fmt: skip


def _plain(rng: Random) -> str:
    verb, _, _, rest = rng.choice(_VERBS)
    return f"{rng.choice(_WHO)} {verb} {rest}."


def _phrase(rng: Random) -> str:
    return rng.choice((_plain(rng).rstrip("."), " ".join(rng.sample(words.ITEMS, 2)),
                       f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.ITEMS)}",
                       "hello world", "good morning", words.full_name(rng), words.topic(rng),
                       f"hello {words.given_name(rng)}"))  # fmt: skip


def case(rng: Random) -> Example:
    """Ask for capitals or small letters."""
    text = _phrase(rng)
    upper = ("Write \"{t}\" in capital letters.", "Write in uppercase: {t}", "Uppercase: {t}",
             "Convert to uppercase: {t}", "Make this uppercase: {t}", "Capitalize all letters: {t}",
             "Put \"{t}\" in capitals.")  # fmt: skip
    lower = ("Write \"{t}\" in lowercase.", "Convert to lowercase: {t}", "Lowercase: {t}",
             "Write in small letters: {t}")  # fmt: skip
    if rng.random() < 0.6:
        return single("editing", fill(rng, upper, t=text), text.upper(), (text.upper(),))
    written = text.upper() if rng.random() < 0.7 else text
    return single("editing", fill(rng, lower, t=written), text.lower(), (text.lower(),))


def tense(rng: Random) -> Example:
    """Ask for past, future, a question, a negation, or politeness."""
    who, (verb, past, going, rest) = rng.choice(_WHO), rng.choice(_VERBS)
    statement = f"{who} {verb} {rest}."
    subject = who if who == "I" else who.lower()
    roll = rng.randrange(6)
    request, answer = (
        (("Put this sentence into the past tense: {t}", "Write in the past tense: {t}",
          "Change to the past: {t}", "Rewrite in the past tense: {t}"), f"{who} {past} {rest}."),
        (("Put this sentence into the future tense: {t}", "Write in the future tense: {t}",
          "Rewrite in the future: {t}"), f"{who} will {verb} {rest}."),
        (("Turn this into a question: {t}", "Make a question of this sentence: {t}",
          "Rewrite as a question: {t}"), f"Do {subject} {verb} {rest}?"),
        (("Make this sentence negative: {t}", "Negate this sentence: {t}",
          "Write the opposite with not: {t}"), f"{who} do not {verb} {rest}."),
        (("Put this in the present continuous: {t}", "Rewrite with -ing: {t}"),
         f"{who} {'am' if who == 'I' else 'are'} {going} {rest}."),
        (("Correct this sentence: {w}", "Fix the grammar: {w}", "Correct the mistakes: {w}",
          "Fix this sentence: {w}", "Correct my English: {w}"), statement),
    )[roll]  # fmt: skip
    wrong = rng.choice((statement.lower().rstrip("."), f"{subject} {verb} {rest}",
                        f"{who if who != 'I' else 'i'} {verb}s {rest}"))  # fmt: skip
    return single("editing", fill(rng, request, t=statement, w=wrong), answer, (answer,))


_RUDE = (
    ("Give me the book.", "Could you please give me the book?"),
    ("Open the window.", "Could you please open the window?"),
    ("Close the door.", "Could you please close the door?"),
    ("Send me the file.", "Could you please send me the file?"),
    ("Call me tomorrow.", "Could you please call me tomorrow?"),
    ("Help me.", "Could you please help me?"), ("Come here.", "Could you please come here?"),
    ("Wait.", "Could you please wait a moment?"), ("Be quiet.", "Could you please be quiet?"),
    ("I want coffee.", "I would like a coffee, please."),
    ("I want water.", "I would like some water, please."),
    ("Tell me the price.", "Could you please tell me the price?"),
    ("Answer me.", "Could you please answer me?"), ("Stop that.", "Could you please stop that?"),
    ("Bring me the menu.", "Could you please bring me the menu?"),
    ("Show me the way.", "Could you please show me the way?"),
)  # fmt: skip
_POLITE = ("Make this more polite: {t}", "Say this politely: {t}", "Rewrite politely: {t}",
           "How can I say this politely? {t}", "Make it polite: {t}",
           "Rewrite this sentence in a friendly way: {t}")  # fmt: skip


def polite(rng: Random) -> Example:
    """Ask to rephrase a request politely."""
    rude, kind = rng.choice(_RUDE)
    return single("editing", fill(rng, _POLITE, t=rude), kind, (kind,))


_FEELINGS = (
    ("positive", ("I love this film.", "The food was great!", "What a wonderful day!",
                  "This is the best phone I ever had.", "I am very happy with it.",
                  "The staff was friendly and helpful.", "Great service, thank you!",
                  "I really like this book.", "The hotel was clean and quiet.",
                  "Excellent work!", "The concert was amazing.")),
    ("negative", ("I hate this film.", "The food was terrible.", "What an awful day.",
                  "This is the worst phone I ever had.", "I am very angry about it.",
                  "The staff was rude.", "Bad service, never again.", "I do not like this book.",
                  "The hotel was dirty and loud.", "It broke after one day.",
                  "The concert was boring.")),
)  # fmt: skip
_FEELS = ("Is this positive or negative? {t}", "What is the sentiment of this text: {t}",
          "Sentiment: {t}", "Positive or negative: {t}", "Is this review positive or negative? {t}",
          "Classify the sentiment: {t}", "How does this person feel? {t}")  # fmt: skip


def sentiment(rng: Random) -> Example:
    """Ask whether a remark is positive or negative."""
    kind, texts = rng.choice(_FEELINGS)
    return single("editing", fill(rng, _FEELS, t=rng.choice(texts)), f"It is {kind}.", (kind,))


_SPELLED = (
    *(word for kind in ("fruits", "animals", "colors", "body parts", "furniture")
      for word in MEMBERS_OF[kind] if word.isalpha()),
    "house", "water", "hello", "friend", "school", "book", "tree", "world", "python", "computer",
    "sun", "moon", "star", "love", "bread", "milk", "summer", "winter", "paper", "music",
)  # fmt: skip


def spelling(rng: Random) -> Example:
    """Ask for the letters of a word, their number, the first, the last, or the reverse."""
    word = rng.choice(_SPELLED)
    letters = ", ".join(word)
    roll = rng.random()
    if roll < 0.35:
        ask = ("Spell {w}.", "How do you spell {w}?", "Spell the word {w}.", "Spell \"{w}\".",
               "Please spell {w} for me.", "Can you spell {w}?")  # fmt: skip
        return single("spelling", fill(rng, ask, w=word), "-".join(word.upper()),
                      ("-".join(word.upper()),))  # fmt: skip
    if roll < 0.6:
        ask = ("How many letters are in {w}?", "How many letters does {w} have?",
               "How many letters does the word \"{w}\" have?", "Count the letters of {w}.",
               "How many letters are there in \"{w}\"?")  # fmt: skip
        answer = f"{letters}: that is {len(word)} letters."
        return single("spelling", fill(rng, ask, w=word), answer, (str(len(word)),))
    if roll < 0.7:
        ask = ("What is the first letter of {w}?", "Which letter does {w} begin with?",
               "What letter does {w} start with?")  # fmt: skip
        return single("spelling", fill(rng, ask, w=word), f"The first letter of {word} is "
                      f"{word[0].upper()}.", (word[0].upper(),))  # fmt: skip
    if roll < 0.8:
        ask = ("What is the last letter of {w}?", "Which letter does {w} end with?")
        return single("spelling", fill(rng, ask, w=word), f"The last letter of {word} is "
                      f"{word[-1].upper()}.", (word[-1].upper(),))  # fmt: skip
    ask = ("Spell {w} backwards.", "Write {w} backwards.", "Reverse the word {w}.",
           "What is {w} backwards?", "Reverse \"{w}\".")  # fmt: skip
    return single("spelling", fill(rng, ask, w=word), word[::-1], (word[::-1],))


def alphabet(rng: Random) -> Example:
    """Ask to sort words, or for the next letter."""
    if rng.random() < 0.35:
        index = rng.randrange(25)
        letter, following = chr(65 + index), chr(66 + index)
        ask = ("What letter comes after {a}?", "Which letter comes after {a} in the alphabet?",
               "What comes after {a} in the alphabet?", "Which letter follows {a}?")  # fmt: skip
        return single("ordering", fill(rng, ask, a=letter), f"{following} comes after {letter}.",
                      (following,))  # fmt: skip
    chosen = rng.sample(
        MEMBERS_OF[
            rng.choice(("fruits", "animals", "colors", "tools", "clothes", "countries", "cities"))
        ],
        rng.choice((3, 3, 4)),
    )
    ask = ("Sort these words: {l}", "Sort alphabetically: {l}",
    "Put these in alphabetical order: {l}",
           "Sort the words {l} by the alphabet.", "Order alphabetically: {l}")  # fmt: skip
    answer = ", ".join(sorted(chosen, key=str.lower))
    return single("ordering", fill(rng, ask, l=", ".join(chosen)), answer, (answer,))


def repeat(rng: Random) -> Example:
    """Ask to repeat something, once or several times, or to greet somebody."""
    roll = rng.random()
    text = _phrase(rng)
    if roll < 0.4:
        ask = ("Repeat after me: {t}", "Say: {t}", "Repeat: {t}", "Please say \"{t}\".",
               "Write exactly this: {t}", "Say \"{t}\".", "Echo: {t}",
               "Repeat this: {t}")  # fmt: skip
        return single("editing", fill(rng, ask, t=text), text, (text,))
    if roll < 0.65:
        name = words.given_name(rng)
        ask = ("Say hello to {n}.", "Greet {n}.", "Say hi to {n}.", "Please greet my friend {n}.")
        return single("editing", fill(rng, ask, n=name), f"Hello, {name}!", (name,))
    word = rng.choice(MEMBERS_OF[rng.choice(("fruits", "animals", "colors"))])
    times, times_text = rng.choice(
        ((2, "twice"), (3, "three times"), (3, "3 times"), (5, "five times"))
    )
    ask = ("Write the word {w} {n}.", "Say {w} {n}.", "Repeat {w} {n}.", "Print {w} {n}.")
    answer = " ".join([word] * times)
    return single("editing", fill(rng, ask, w=word, n=times_text), answer, (answer,))


def combine(rng: Random) -> Example:
    """Ask to join, replace, select or count words."""
    chosen = rng.sample(MEMBERS_OF[rng.choice(("fruits", "animals", "colors", "tools"))], 3)
    roll = rng.randrange(4)
    if roll == 0:
        ask = ("Join these words with and: {l}", "Make a phrase of these words: {l}")
        answer = sentence(joined(chosen)) + "."
        return single("editing", fill(rng, ask, l=", ".join(chosen)), answer, (answer,))
    if roll == 1:
        old, (new, *_rest) = rng.choice(words.ITEMS), rng.sample(words.ITEMS, 2)
        text = f"{rng.choice(_WHO)} like {old}."
        ask = ("Replace {a} with {b}: {t}", "In this sentence, change {a} to {b}: {t}",
               "Replace the word {a} by {b}: {t}")  # fmt: skip
        answer = text.replace(old, new)
        return single("editing", fill(rng, ask, a=old, b=new, t=text), answer, (answer,))
    if roll == 2:
        text = _plain(rng)
        number = len(text.split())
        ask = ("How many words are in this sentence: {t}", "Count the words: {t}",
               "How many words does this have? {t}")  # fmt: skip
        return single("editing", fill(rng, ask, t=text), f"It has {number} words.", (str(number),))
    index, ordinal = rng.choice(((0, "first"), (1, "second"), (2, "third"), (2, "last")))
    ask = ("What is the {n} word here: {l}?", "Which one is {n}: {l}?",
           "Give me the {n} of these: {l}",
           "What is the {n} item in the list {l}?")  # fmt: skip
    return single("editing", fill(rng, ask, n=ordinal, l=", ".join(chosen)),
                  f"The {ordinal} one is {chosen[index]}.", (chosen[index],))  # fmt: skip


def editing(rng: Random) -> Example:
    """Make an example of any of these."""
    make = rng.choices((case, tense, polite, sentiment, spelling, alphabet, repeat, combine),
                       (3, 4, 1.5, 1.5, 4, 2.5, 3, 2.5))[0]  # fmt: skip
    return make(rng)
