"""Short texts on request: poems with rhymes, stories, letters, lists, sentences."""

from random import Random

from . import words
from .example import Example, assistant, fill, single, user
from .reference import pairs, sentence, with_article

# A couplet per line, with its two verses separated by a bar; {t} is the topic.
_ABOUT = tuple(tuple(line.strip().split(" | ")) for line in """
    I sing about {t} today, | and every worry drifts away.
    When I think of {t} at night, | my little heart is warm and light.
    Of {t} I write this little song, | the verse is short, the love is long.
    O {t}, so dear to me, | you make me happy, you make me free.
    I dream of {t} all day through, | a dream as bright as morning dew.
    Here is a verse for {t} so fine, | a little word, a little line.
    I close my eyes and I can see | how much {t} can mean to me.
    The world is wide, the world is grand, | with {t} we walk hand in hand.
    For {t} I take my pen and write | from early dawn to late at night.
    Whenever {t} is on my mind, | the day is good, the world is kind.
""".strip().splitlines())  # fmt: skip
_ANY = tuple(tuple(line.strip().split(" | ")) for line in """
    The morning light is soft and clear, | it tells the world that day is near.
    The evening comes, the birds are still, | the moon looks down upon the hill.
    A gentle wind goes through the tree | and sings a quiet song for me.
    The stars are shining, one by one, | and rest will come when day is done.
    The river runs, the flowers grow, | the seasons come, the seasons go.
    A little smile, a friendly word, | the sweetest sound I ever heard.
    So let us sing and let us play | and thank the sun for this new day.
    And when the night is cold and deep, | it guards me softly in my sleep.
    The sky is high, the grass is green, | the finest day I have ever seen.
    I take a breath, I close the door, | my heart could never ask for more.
""".strip().splitlines())  # fmt: skip
_OWN = {
    "the sea": "The waves roll in, the waves roll out, | the seagulls sing and fly about.",
    "a cat": "A little cat sits on the mat, | so soft and warm, a happy cat.",
    "a dog": "My dog runs fast, my dog runs far, | he barks at every passing car.",
    "the moon": "The silver moon shines on the lake | and keeps the sleepy world awake.",
    "the sun": "The golden sun climbs up the sky | and warms the birds that pass on by.",
    "rain": "The rain falls softly on the street | and makes a music at my feet.",
    "love": "My love is like a summer rose, | it blooms and nobody knows how it grows.",
    "spring": "The spring is here, the fields are green, | the prettiest I have ever seen.",
    "summer": "The summer sun is warm and bright, | the days are long, and short the night.",
    "autumn": "The autumn leaves are red and gold, | the wind is fresh, the nights are cold.",
    "winter": "The winter snow lies white and deep, | and all the trees are fast asleep.",
    "snow": "The snow falls softly, flake by flake, | and covers house and hill and lake.",
    "trees": "The trees stand tall, the trees stand proud, | their branches reach up to the cloud.",
    "flowers": "The flowers bloom in red and blue, | and every morning drinks the dew.",
    "the night": "The night is calm, the night is deep, | and all the world has gone to sleep.",
    "the stars": "The stars are shining, far and bright, | like tiny lamps that fill the night.",
    "home": "My home is small, my home is dear, | and all the ones I love are here.",
    "a friend": "A friend is there when days are grey | and helps to chase the clouds away.",
    "my mother": "My mother's smile is warm and kind, | the dearest face that I can find.",
    "a bird": "A little bird sits in a tree | and sings its morning song for me.",
    "a river": "The river runs down to the sea, | so wild and clear, so fast and free.",
    "music": "The music plays, I tap my feet, | my heart is dancing to the beat.",
    "coffee": "My coffee cup is warm and black, | it always brings my spirit back.",
    "computers": "My computer hums the whole day long, | it counts in bits and sings a song.",
    "nature": "The woods are green, the lake is blue, | and all of nature greets you too.",
    "happiness": "A happy heart is light and free, | it sings like birds in every tree.",
    "the forest": "The forest whispers, green and deep, | where little foxes go to sleep.",
    "the wind": "The wind runs wild across the hill | and never, never can sit still.",
    "a robot": "A robot walks, a robot sings, | it dreams of wires and metal wings.",
    "time": "The hours come, the hours go, | now running fast, now walking slow.",
    "a mouse": "A tiny mouse lives in my house, | so quick and quiet, little mouse.",
    "peace": "Let peace come down on every land, | and let us all walk hand in hand.",
}  # fmt: skip
_POEM = (
    "Write a short poem.", "Write a poem.", "Write me a poem.", "Can you write a poem?",
    "Please write a short poem.", "Compose a poem.", "I would like a poem.", "A poem, please.",
    "Write a little poem for me.", "Make a poem.", "Give me a poem.", "Create a short poem.",
    "Write some poetry.", "Write a rhyme.", "Do you know a poem?", "Tell me a poem.",
    "Recite a poem.", "Write something poetic.", "Write a poem of four lines.",
)  # fmt: skip
_POEM_ABOUT = (
    "Write a short poem about {t}.", "Write a poem about {t}.", "A poem about {t}, please.",
    "Can you write a poem about {t}?", "Compose a short poem about {t}.", "Poem about {t}",
    "Please write me a poem about {t}.", "Make a rhyme about {t}.", "I need a poem about {t}.",
    "Give me a little poem on {t}.", "Write four lines about {t}.", "Write a verse about {t}.",
    "Create a poem on the topic of {t}.", "Write a small poem about {t} for me.",
)  # fmt: skip
_HAIKU = tuple(line.strip().replace(" | ", "\n") for line in """
    An old silent pond | a frog jumps into water | the sound, then silence
    Snow falls on the hill | the world is quiet and white | a bird leaves its trace
    Cherry blossoms fall | the wind carries them away | spring will come again
    The moon on the lake | a small boat rocks in the night | the stars look at it
    Autumn leaves turn red | the wind sings in empty trees | winter is not far
""".strip().splitlines())  # fmt: skip
_HAIKU_ASKS = ("Write a haiku.", "Write me a haiku.", "A haiku, please.", "Can you write a haiku?",
               "Write a haiku about nature.", "Give me a haiku.", "Compose a haiku.")  # fmt: skip


def _verses(couplet: tuple[str, ...], topic: str) -> str:
    return "\n".join(sentence(verse.format(t=topic)) for verse in couplet)


def poem_text(rng: Random, topic: str) -> str:
    """Two couplets, the first about the topic; nouns that are not in the table fit too."""
    if topic in _OWN:
        first = tuple(_OWN[topic].split(" | "))
        second = rng.choice(_ABOUT if rng.random() < 0.5 else _ANY)
    else:
        first, second = rng.choice(_ABOUT), rng.choice(_ANY)
    known = topic.replace("a ", "the ", 1) if topic.startswith("a ") else topic
    return f"{_verses(first, known)}\n{_verses(second, known)}"


def poem(rng: Random) -> Example:
    """Ask for a poem of four lines, about anything or a topic."""
    roll = rng.random()
    if roll < 0.08:
        return Example("poems", (user(rng.choice(_HAIKU_ASKS)), assistant(rng.choice(_HAIKU))))
    topic = rng.choice(list(_OWN))
    if roll < 0.4:
        return Example("poems", (user(rng.choice(_POEM)), assistant(poem_text(rng, topic))))
    if rng.random() < 0.35:
        topic = rng.choice((rng.choice(words.ITEMS), rng.choice(words.TOPICS), words.city(rng),
                            f"my {rng.choice(words.ITEMS)}", f"a {rng.choice(words.JOBS)}",
                            words.given_name(rng)))  # fmt: skip
    topic_text = (
        topic.replace("a ", rng.choice(("a ", "my ", "the ")), 1) if topic[:2] == "a " else topic
    )
    question = with_article(fill(rng, _POEM_ABOUT, t=topic_text))
    return Example("poems", (user(question), assistant(poem_text(rng, topic))))


_HEROES = {
    "dog": "barked", "cat": "purred", "mouse": "squeaked", "fox": "laughed", "bear": "growled",
    "rabbit": "hopped for joy", "dragon": "blew a little fire", "robot": "beeped",
    "frog": "croaked", "bird": "sang", "king": "smiled", "princess": "smiled", "boy": "laughed",
    "girl": "laughed", "wizard": "waved a wand", "knight": "bowed", "elephant": "trumpeted",
    "horse": "neighed", "pirate": "cheered", "owl": "hooted", "duck": "quacked",
    "lion": "roared", "monkey": "clapped", "snail": "nodded slowly", "ghost": "giggled",
}  # fmt: skip
_PLACES = ("in a small house by the sea", "in a deep forest", "on a high mountain",
           "in an old castle", "in a quiet village", "in a big city", "on a green farm",
           "near a blue lake")  # fmt: skip
_WISHES = {
    "to see the sea": "walked for many days until the waves were there",
    "to find a friend": "knocked at every door until somebody opened",
    "to fly": "built wings of paper and jumped from a little hill",
    "to learn to sing": "practiced every evening by the window",
    "to find a treasure": "followed an old map to a hollow tree",
    "to bake a cake": "mixed flour, sugar and eggs, and waited by the oven",
    "to touch the moon": "climbed the highest tree in the night",
    "to see snow": "waited the whole winter by the window",
}  # fmt: skip
_LAST = ("In the end the wish came true, and the {h} {v}.",
         "It was the best day of all, and the {h} {v}.",
         "At last it worked, and the {h} {v} and went home happy.")  # fmt: skip
_TALE = ("Tell me a story.", "Tell me a short story.", "Write a short story.", "Write a story.",
         "A story, please.", "Can you tell me a story?", "Make up a story.", "Tell a story.",
         "Tell me a bedtime story.", "I want to hear a story.", "Write a tiny story.",
         "Please tell me a very short story.", "Tell me a nice little story.")  # fmt: skip
_TALE_ABOUT = ("Tell me a story about a {h}.", "Write a short story about a {h}.",
               "A story about a {h}, please.", "Can you tell me a story about a {h}?",
               "Write a story about a little {h}.", "Make up a short story about a {h}.",
               "Write a very short story about a {h}.", "Tell me a bedtime story about a {h}.",
               "I want a story about a {h}.", "Story about a {h}")  # fmt: skip


def tale(rng: Random) -> Example:
    """Ask for a story of four sentences about an animal or a fairy-tale character."""
    hero = rng.choice(list(_HEROES))
    wish = rng.choice(list(_WISHES))
    ask = rng.choice(_TALE) if rng.random() < 0.4 else fill(rng, _TALE_ABOUT, h=hero)
    text = (f"Once upon a time there was a little {hero} who lived {rng.choice(_PLACES)}. "
            f"The {hero} wanted {wish}. So the {hero} {_WISHES[wish]}. "
            f"{fill(rng, _LAST, h=hero, v=_HEROES[hero])}")  # fmt: skip
    turns = (user(with_article(ask)), assistant(text))
    return Example("stories", turns, expect=(hero,) if "about" in ask else ())


MEMBERS_OF = {kind: tuple(each.split(", ")) for kind, each in pairs("members.txt")}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NAME = ("Name {n} {k}.", "Give me {n} {k}.", "Tell me {n} {k}.", "Can you name {n} {k}?",
         "I need {n} {k}.", "Please name {n} {k}.", "{n} {k}?", "Say {n} {k}.",
         "What are {n} {k}?", "Write down {n} {k}.", "Think of {n} {k}.")  # fmt: skip
_LIST = ("List {n} {k}.", "Make a list of {n} {k}.", "Write a list of {n} {k}.",
         "Give me a list of {n} {k}.", "Please list {n} {k}.", "Can you list {n} {k}?",
         "Give me a numbered list of {n} {k}.", "I need a list of {n} {k}.")  # fmt: skip
_JSON_LIST = ("Give me {n} {k} as a JSON list.", "Write {n} {k} as a JSON array.",
              "Return a JSON array of {n} {k}.", "JSON list of {n} {k}, please.",
              "List {n} {k} in JSON.", "A JSON array with {n} {k}.")  # fmt: skip
_SOME = ("Name some {k}.", "Give me some {k}.", "List some {k}.", "Which {k} do you know?",
         "Tell me some {k}.", "What {k} do you know?", "Give me examples of {k}.")  # fmt: skip


def joined(parts: tuple[str, ...] | list[str]) -> str:
    """Join as `a, b and c`."""
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def listing(rng: Random) -> Example:
    """Ask for members of a kind: in a sentence, numbered, or as JSON."""
    kind = rng.choice(list(MEMBERS_OF))
    known = MEMBERS_OF[kind]
    count = min(len(known), rng.choices((2, 3, 4, 5, 6, 7, 8, 10), (3, 8, 4, 6, 2, 1, 1, 1))[0])
    roll = rng.random()
    if roll < 0.12:
        answer = f"{sentence(joined(known[:5]))}."
        return single("lists", fill(rng, _SOME, k=kind), answer, known[1:2])
    picked = known[:count] if rng.random() < 0.8 else tuple(rng.sample(known, count))
    number = NUMBERS[count] if rng.random() < 0.6 else str(count)
    if roll < 0.55:
        templates, answer = _NAME, f"{sentence(joined(picked))}."
    elif roll < 0.88:
        templates = _LIST
        answer = "\n".join(f"{number_}. {sentence(each)}" for number_, each in enumerate(picked, 1))
    else:
        templates, answer = _JSON_LIST, "[" + ", ".join(f'"{each}"' for each in picked) + "]"
    question = sentence(fill(rng, templates, n=number, k=kind))
    return Example("lists", (user(question), assistant(answer)))


_ODD = ("Which one does not belong: {l}?", "Which word does not fit: {l}?",
        "Find the odd one out: {l}.", "What is the odd one out? {l}")  # fmt: skip
_WHICH = ("Which of these is {k}: {l}?", "Which one is {k}: {l}?", "Find {k}: {l}.",
          "Pick {k} from this list: {l}.")  # fmt: skip
_ONE = {"fruits": "a fruit", "vegetables": "a vegetable", "animals": "an animal",
        "birds": "a bird", "insects": "an insect", "colors": "a color", "flowers": "a flower",
        "trees": "a tree", "countries": "a country", "planets": "a planet", "drinks": "a drink",
        "sports": "a sport", "instruments": "an instrument", "clothes": "a piece of clothing",
        "furniture": "a piece of furniture", "tools": "a tool", "vehicles": "a vehicle",
        "languages": "a language", "metals": "a metal", "shapes": "a shape", "jobs": "a job",
        "body parts": "a part of the body", "months": "a month"}  # fmt: skip
_IS = ("Is {w} {k}?", "Is {w} {k} or not?", "Would you say that {w} is {k}?")
_SORT_OF = ("What kind of thing is {w}?", "To which group does {w} belong?",
            "Classify this word: {w}")  # fmt: skip


def classify(rng: Random) -> Example:
    """Ask for the odd one out, the one of a kind, or whether something is of a kind."""
    kind, other = rng.sample(list(_ONE), 2)
    picked = rng.sample(MEMBERS_OF[kind], 3)
    others = [each for each in MEMBERS_OF[other] if each not in MEMBERS_OF[kind]]
    stranger = rng.choice(others)
    roll = rng.random()
    if roll < 0.35:
        mixed = [*picked, stranger]
        rng.shuffle(mixed)
        answer = f"{sentence(stranger)} does not belong, because the others are {kind}."
        return single("classes", fill(rng, _ODD, l=", ".join(mixed)), answer, (sentence(stranger),))
    if roll < 0.65:
        mixed = [stranger, rng.choice(others), picked[0]]
        rng.shuffle(mixed)
        question = fill(rng, _WHICH, k=_ONE[kind], l=", ".join(mixed))
        return single("classes", question, f"{sentence(picked[0])} is {_ONE[kind]}.",
                      (sentence(picked[0]),))  # fmt: skip
    word = picked[0]
    article_word = (
        word if word[0].isupper() or kind in ("colors", "sports", "drinks") else f"a {word}"
    )
    if roll < 0.8:
        question = with_article(fill(rng, _SORT_OF, w=article_word))
        return single(
            "classes", question, with_article(f"{sentence(article_word)} is {_ONE[kind]}."), ()
        )
    if rng.random() < 0.5:
        answer = with_article(f"Yes, {article_word} is {_ONE[kind]}.")
        return single("classes", with_article(fill(rng, _IS, w=article_word, k=_ONE[kind])), answer,
                      ("Yes",))  # fmt: skip
    strange = _ONE[other]
    if word in MEMBERS_OF[other]:
        return classify(rng)
    answer = with_article(f"No, {article_word} is {_ONE[kind]}.")
    return single(
        "classes", with_article(fill(rng, _IS, w=article_word, k=strange)), answer, ("No",)
    )


_MAIL_ASKS = ("Write a short email to {n} about the {e}.", "Write {n} an email about the {e}.",
              "Write a short message to {n} about the {e} on {d}.",
              "Help me write an email to {n}: the {e} is on {d}.",
              "Invite {n} to the {e} on {d}.", "Write an invitation for {n} to a {e} on {d}.",
              "Draft an email to {n} about our {e}.")  # fmt: skip
_EXCUSES = ("Write an email to my boss that I am sick.", "Write a sick note to my boss.",
            "Tell my boss by email that I am ill today.", "Write a short email that I am late.",
            "Write an apology.", "Write an apology to my friend.",
            "Help me apologize to a friend.")  # fmt: skip


def letter(rng: Random) -> Example:
    """Ask for a short email, an invitation or an apology."""
    if rng.random() < 0.3:
        ask = rng.choice(_EXCUSES)
        text = "Hello,\n\nI am sick today and cannot come to work. I am sorry.\n\nBest wishes"
        if "late" in ask:
            text = "Hello,\n\nI am sorry, I will be a little late today.\n\nBest wishes"
        if "apolog" in ask:
            text = "Dear friend,\n\nI am very sorry. I hope you can forgive me.\n\nBest wishes"
        return Example("letters", (user(ask), assistant(text)))
    name, event, day = words.given_name(rng), rng.choice(words.EVENTS), words.date(rng)
    ask = rng.choice(_MAIL_ASKS)
    when = f" on {day}" if "{d}" in ask else ""
    body = f"I would like to invite you to the {event}{when}. I hope to see you there."
    if "nvit" not in ask:
        body = f"I am writing to you about the {event}{when}. Please let me know what you think."
    text = f"Dear {name},\n\n{body}\n\nBest wishes"
    question = with_article(ask.format(n=name, e=event, d=day))
    return Example("letters", (user(question), assistant(text)), expect=(name,))


_WITH = ("Write a sentence with the word {w}.", "Use {w} in a sentence.",
         "Make a sentence with {w}.", "Give me a sentence with the word \"{w}\".",
         "Write a sentence about a {w}.", "Write one sentence about a {w}.",
         "Write an example sentence for {w}.")  # fmt: skip
_SENTENCES = ("The {w} is in the garden.", "I saw a {w} yesterday.", "My friend has a {w}.",
              "There is a {w} in front of the house.")  # fmt: skip


def made_sentence(rng: Random) -> Example:
    """Ask for a sentence with a word."""
    kind = rng.choice(("animals", "fruits", "furniture", "tools", "vehicles", "birds", "flowers"))
    word = rng.choice(MEMBERS_OF[kind]) if rng.random() < 0.7 else words.coined(rng, 2, 2)
    answer = with_article(fill(rng, _SENTENCES, w=word))
    return single("sentences", with_article(fill(rng, _WITH, w=word)), answer, (word,))
