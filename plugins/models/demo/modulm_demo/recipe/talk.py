"""Free text: modulm itself, greetings, unanswerable questions, and short stories."""

from random import Random

from . import words
from .example import Example, assistant, fill, single, user

# Each row: questions, the answer, and its required text.
_MODULM: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("What is modulm?", "Tell me about modulm.", "Explain modulm.", "What does modulm do?",
      "Describe modulm in a few words.", "modulm?", "Can you tell me what modulm is?",
      "I have never heard of modulm. What is it?", "So what is this modulm thing?",
      "What is modulm used for?", "Give me a short introduction to modulm."),
     ("modulm is an engine that runs and serves language models. It has a small core, and every "
      "replaceable part is a plugin that you install with pip."), ("plugin", "core")),
    (("How do I add a model?", "How can I add a model to modulm?", "How do I write a model plugin?",
      "I want to support a new model. How?", "How do I add my own architecture?",
      "How does one add a new model family?", "Where do I start if I want to add a model?",
      "Add a model to modulm: what are the steps?", "How do I create a plugin for my model?",
      "What do I do to add a model of mine?"),
     ("Run `modulm plugins new models NAME`. It writes a small package with an entry point in the "
      "group `modulm.models`. Fill in the mathematics, install it with pip, and modulm finds it."),
     ("modulm plugins new models", "modulm.models")),
    (("How do I serve a model?", "How do I serve another model?", "How can I start the server?",
      "How do I run a different model?", "What command serves a model?",
      "How do I start modulm with another model?", "Which command starts a server?",
      "I want to serve a model from the hub. How?", "How to serve models with modulm?",
      "How do I switch to a larger model?"),
     "Run `modulm serve MODEL`, where MODEL is a folder, a hub name, or a short name such as demo.",
     ("modulm serve",)),
    (("How do I list plugins?", "Which plugins are installed?", "How can I see the plugins?",
      "What command lists the plugins?", "Show me how to list the installed plugins.",
      "How do I find out what is installed?", "Is there a way to list all plugins?",
      "List plugins: how?", "How do I check which plugins modulm found?"),
     "Run `modulm plugins list`. It shows every plugin and does not import any of them.",
     ("modulm plugins list",)),
    (("How do I install a plugin?", "How can I install a model family?",
      "How do I get more plugins?",
      "How do I install support for another model?", "What is the command to install a plugin?",
      "Where do plugins come from?", "How are plugins installed?",
      "I need a plugin for a model. How do I install it?", "How do I add a plugin with pip?"),
     ("Use pip: `pip install modulm-<name>` adds a model family, and `pip install "
      "modulm-<kind>-<name>` adds other kinds of plugins."), ("pip install modulm-",)),
    (("What kinds of plugins are there?", "What can be a plugin in modulm?",
      "Which parts of modulm can I replace?", "What types of plugins does modulm have?",
      "Name the kinds of modulm plugins.", "What can plugins add?",
      "Which plugin kinds exist?", "What may I extend in modulm?"),
     ("Models, quantization methods, attention backends, platforms, and tool and reasoning parsers "
      "are plugins. Commands and routes can be added too."),
     ("quantization", "attention", "platforms", "parsers")),
    (("How does modulm find plugins?", "How are plugins discovered?", "What is an entry point for?",
      "How does modulm know about my package?", "How does plugin discovery work?",
      "Which entry point group do models use?", "In which group do I register a model?",
      "How do I register a model?", "Where does modulm look for models?"),
     ("modulm reads Python entry points. A model uses the group `modulm.models`, and its name is "
      "the architecture in config.json."), ("modulm.models",)),
    (("Why did modulm choose this backend?", "How do I see why a backend was chosen?",
      "What does modulm explain do?", "How do I learn what auto means for my model?",
      "How can I see the rejected candidates?", "Which command explains the choices?",
      "How is the attention backend chosen?", "Can modulm explain its decisions?"),
     "Run `modulm explain MODEL`. It shows the candidates, why each was rejected, and the winner.",
     ("modulm explain",)),
    (("Does modulm need a GPU?", "Can modulm run on a CPU?", "Do I need a graphics card?",
      "Will modulm work without a GPU?", "Is a GPU required?", "Can I use modulm on my laptop?",
      "Which hardware does modulm need?", "Does it run on a plain CPU?"),
     "No GPU is needed. modulm runs on a plain CPU, and platform plugins add other devices.",
     ("CPU", "plugins")),
    (("Which API does the modulm server have?", "Is modulm compatible with OpenAI?",
      "Can I use the OpenAI client?", "How do I talk to the server?", "What API does modulm serve?",
      "How do I send a request to modulm?", "Does the server speak the OpenAI API?"),
     "The server speaks the OpenAI API, so you can point the OpenAI client at its address.",
     ("OpenAI",)),
)  # fmt: skip

_CHAT: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning", "Good evening", "Hello there!",
      "Hey there", "Hi!", "Good afternoon", "Greetings", "Hello, are you there?",
      "Hi, how are you?",
      "Hello, how are you?", "How are you?", "Hey, what's up?", "Nice to meet you.", "Good day",
      "Hello my friend", "Hi modulm", "hello demo", "Hey you", "Morning!", "Yo", "Howdy"),
     "Hello! How can I help you?", ("Hello",)),
    (("Thanks", "Thank you", "Thank you!", "Thanks a lot", "Many thanks", "Thanks for your help",
      "Great, thanks", "Thank you very much", "Cool, thank you", "Perfect, thanks!", "thx",
      "That helps, thanks", "Wonderful, thank you", "Ok thanks", "Nice, thanks", "Good job",
      "Well done", "Great answer", "That was helpful"),
     "You are welcome! Ask me anything else you would like to know.", ("welcome",)),
    (("Bye", "Goodbye", "See you", "See you later", "Good night", "Bye bye", "I have to go",
      "That is all", "See you tomorrow", "Have a nice day", "Farewell", "Talk to you later",
      "I am leaving now"),
     "Goodbye! Have a nice day.", ("Goodbye",)),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
      "Introduce yourself.", "What model are you?", "Are you a human?", "Are you a robot?",
      "Which model is this?", "Who made you?", "What's your name?", "Who am I talking to?",
      "How big are you?", "Describe yourself.", "Are you an AI?", "Who trained you?"),
     "I am the modulm demo model, a very small language model that comes with modulm.",
     ("modulm demo model",)),
    (("What can you do?", "How can you help me?", "What do you know?", "Help", "Help me",
      "What should I ask you?", "What are you good at?", "Can you help me?", "What is possible?",
      "Give me some ideas what to ask.", "What questions can you answer?",
      "Show me what you can do."),
     ("I can answer simple questions, add and subtract numbers, call tools, fill JSON objects, "
      "tell short stories, and explain modulm."), ("tools", "JSON", "modulm")),
)  # fmt: skip

_UNKNOWABLE = (
    "What did {n} eat for breakfast?", "Who is {n}?", "Where does {n} live?",
    "What is the phone number of {n}?", "What will happen in {y}?", "Who won the {e} in {c}?",
    "How old is {n}?", "What is the population of {c}?", "Who is the mayor of {c}?",
    "What is the meaning of {w}?", "What does {w} mean?", "How do I repair a {w}?",
    "Who will win the {e} next year?", "What is {n} thinking right now?", "Tell me about {n}.",
    "When was {n} born?", "What happened in {c} in {y}?", "Who invented the {w}?",
    "Is {n} a good {j}?", "How tall is {n}?", "What is the best restaurant in {c}?",
    "What is the favorite color of {n}?", "When is the {e} in {c}?",
    "How much money does {n} have?",
    "Who was the king of {c} in {y}?", "What is the password of {n}?",
)  # fmt: skip
_UNSURE = "I am sorry, I do not know that. I am a very small model and know only a few things."

_STORY_ASKS = (
    "Tell me a story about a {j} called {n}.", "Write a short story about {n} the {j}.",
    "Tell me a short story about {n} and some {i}.", "I want a story about {n} in {c}.",
    "Please tell a story with a {j} named {n}.", "Write a tiny story about {n}.",
    "Can you tell me a story about {n} who lives in {c}?", "A story about {n} and {i}, please.",
    "Make up a story about a {j} in {c} called {n}.",
)  # fmt: skip
_OPENINGS = (
    "Once upon a time there was a {j} called {n}.", "{n} was a {j} in {c}.",
    "In {c} there lived a {j} named {n}.", "Every day {n} the {j} walked through {c}.",
)  # fmt: skip
_TROUBLES = (
    "One morning all the {i} were gone.", "One day {n} found {i} in front of the door.",
    "One rainy night a stranger asked {n} for {i}.", "But {n} had lost the {i} and was very sad.",
    "One evening {n} heard a strange noise behind the {i}.",
)  # fmt: skip
_TURNS = (
    "{n} searched the whole town and asked everybody for help.",
    "An old neighbor smiled and pointed to the garden.",
    "So {n} put on a warm coat and went out to look.",
    "A small dog came along and showed the way.",
    "{n} was afraid at first, but then took a deep breath.",
)  # fmt: skip
_ENDINGS = (
    "In the end the {i} were safe, and {n} shared them with all friends.",
    "From that day on {n} and the neighbor were best friends.",
    "Everybody laughed, and {n} went home happy.",
    "That night {n} slept well and dreamed of {i}.",
)  # fmt: skip


# Phrases around a question, which turn few phrasings into many prompts.
_AROUND_QUESTION = (
    "{q}", "{q}", "{q}", "{q}", "Quick question: {q}", "I am new here. {q}", "One more thing: {q}",
    "{q} Please be brief.", "Please tell me: {q}", "Just wondering: {q}", "{q} Thank you.",
)  # fmt: skip
_AROUND_CHAT = (
    "{q}", "{q}", "{q}", "{q}", "{q}", "{q} :)", "Ah, {q}", "Well, {q}", "Oh. {q}", "So, {q}",
    "{q} Really.",
)  # fmt: skip


def _answered(rng: Random, category: str, rows: tuple, around: tuple[str, ...]) -> Example:
    questions, answer, expect = rng.choice(rows)
    question = rng.choice(around).format(q=rng.choice(questions))
    return single(category, question, answer, expect)


def about_modulm(rng: Random) -> Example:
    """Ask about modulm."""
    return _answered(rng, "modulm", _MODULM, _AROUND_QUESTION)


def greeting(rng: Random) -> Example:
    """Make greetings, thanks, goodbyes, and questions about the model itself."""
    return _answered(rng, "chat", _CHAT, _AROUND_CHAT)


def unknown(rng: Random) -> Example:
    """Ask something that the model cannot know."""
    name = f"{words.given_name(rng)} {words.surname(rng)}"
    question = fill(rng, _UNKNOWABLE, n=name, c=words.city(rng), y=rng.randint(1200, 2090),
                    e=rng.choice(words.EVENTS), w=words.coined(rng, 2, 3),
                    j=rng.choice(words.JOBS))  # fmt: skip
    return single("unknown", question, _UNSURE, ("do not know",))


def story(rng: Random) -> Example:
    """Ask for a story of four or five sentences about something."""
    name, town = words.given_name(rng), words.city(rng)
    job, items = rng.choice(words.JOBS), rng.choice(words.ITEMS)
    question = fill(rng, _STORY_ASKS, n=name, c=town, j=job, i=items)
    parts = [_OPENINGS, _TROUBLES, *([_TURNS] * rng.choice((1, 1, 2))), _ENDINGS]
    text = " ".join(fill(rng, part, n=name, c=town, j=job, i=items) for part in parts)
    return Example("story", (user(question), assistant(text)), expect=(name,))


def small_talk(rng: Random) -> Example:
    """Make an example of any of these that no tool could help with."""
    return rng.choice((about_modulm, greeting, story))(rng)
