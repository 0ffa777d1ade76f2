"""Questions about a fixed table of facts.

Every fact is seen in training; what is held out is the pairing of a fact with a phrasing.
"""

from dataclasses import dataclass
from random import Random

from .example import Example, single


@dataclass(frozen=True)
class Relation:
    """A two-column table with the ways to ask for its right column."""

    pairs: tuple[tuple[str, str], ...]
    questions: tuple[str, ...]
    answer: str


def _table(text: str) -> tuple[tuple[str, str], ...]:
    """Parse `left:right, left:right`; an entry may span lines."""
    entries = (" ".join(entry.split()) for entry in text.split(","))
    return tuple(tuple(entry.split(":", 1)) for entry in entries if entry)  # type: ignore[misc]


CAPITALS = _table("""
    France:Paris, Germany:Berlin, Italy:Rome, Spain:Madrid, Portugal:Lisbon, Ireland:Dublin,
    Norway:Oslo, Sweden:Stockholm, Finland:Helsinki, Denmark:Copenhagen, Iceland:Reykjavik,
    Poland:Warsaw, Austria:Vienna, Hungary:Budapest, Greece:Athens, Turkey:Ankara, Russia:Moscow,
    Ukraine:Kyiv, Romania:Bucharest, Bulgaria:Sofia, Serbia:Belgrade, Croatia:Zagreb,
    Slovenia:Ljubljana, Slovakia:Bratislava, the Czech Republic:Prague, Belgium:Brussels, the
    Netherlands:Amsterdam, Luxembourg:Luxembourg, Switzerland:Bern, Estonia:Tallinn, Latvia:Riga,
    Lithuania:Vilnius, Belarus:Minsk, Moldova:Chisinau, Albania:Tirana, North Macedonia:Skopje,
    Montenegro:Podgorica, Malta:Valletta, Cyprus:Nicosia, Georgia:Tbilisi, Armenia:Yerevan,
    Azerbaijan:Baku, Japan:Tokyo, China:Beijing, South Korea:Seoul, North Korea:Pyongyang,
    Mongolia:Ulaanbaatar, India:New Delhi, Pakistan:Islamabad, Bangladesh:Dhaka, Nepal:Kathmandu,
    Bhutan:Thimphu, Thailand:Bangkok, Vietnam:Hanoi, Laos:Vientiane, Cambodia:Phnom Penh,
    Malaysia:Kuala Lumpur, Indonesia:Jakarta, the Philippines:Manila, Iran:Tehran, Iraq:Baghdad,
    Syria:Damascus, Lebanon:Beirut, Jordan:Amman, Saudi Arabia:Riyadh, Yemen:Sanaa, Oman:Muscat,
    Qatar:Doha, Kuwait:Kuwait City, Bahrain:Manama, Afghanistan:Kabul, Kazakhstan:Astana,
    Uzbekistan:Tashkent, Kyrgyzstan:Bishkek, Tajikistan:Dushanbe, Turkmenistan:Ashgabat,
    Egypt:Cairo, Libya:Tripoli, Tunisia:Tunis, Algeria:Algiers, Morocco:Rabat, Sudan:Khartoum,
    Ethiopia:Addis Ababa, Kenya:Nairobi, Uganda:Kampala, Rwanda:Kigali, Tanzania:Dodoma,
    Somalia:Mogadishu, Ghana:Accra, Nigeria:Abuja, Senegal:Dakar, Mali:Bamako, Cameroon:Yaounde,
    Angola:Luanda, Zambia:Lusaka, Zimbabwe:Harare, Mozambique:Maputo, Madagascar:Antananarivo,
    Namibia:Windhoek, Botswana:Gaborone, Canada:Ottawa, the United States:Washington,
    Mexico:Mexico City, Guatemala:Guatemala City, Honduras:Tegucigalpa, Nicaragua:Managua, Costa
    Rica:San Jose, Panama:Panama City, Cuba:Havana, Jamaica:Kingston, Haiti:Port-au-Prince,
    Colombia:Bogota, Venezuela:Caracas, Ecuador:Quito, Peru:Lima, Bolivia:Sucre, Chile:Santiago,
    Argentina:Buenos Aires, Uruguay:Montevideo, Paraguay:Asuncion, Brazil:Brasilia,
    Australia:Canberra, New Zealand:Wellington, Fiji:Suva, the United Kingdom:London
""")

CURRENCIES = _table("""
    Japan:yen, the United Kingdom:pound, India:rupee, China:yuan, Switzerland:franc, Poland:zloty,
    Sweden:krona, Norway:krone, Turkey:lira, Russia:ruble, Mexico:peso, Brazil:real,
    Thailand:baht, Vietnam:dong, South Korea:won, Hungary:forint, the Czech Republic:koruna,
    Israel:shekel, South Africa:rand, Germany:euro, France:euro, Italy:euro, Spain:euro,
    Canada:dollar, Australia:dollar, the United States:dollar, Nigeria:naira, Ukraine:hryvnia,
    Bangladesh:taka
""")

LANGUAGES = _table("""
    Brazil:Portuguese, Portugal:Portuguese, Mexico:Spanish, Argentina:Spanish, Austria:German,
    Germany:German, Italy:Italian, Japan:Japanese, Egypt:Arabic, Morocco:Arabic, Greece:Greek,
    Poland:Polish, Hungary:Hungarian, Finland:Finnish, Denmark:Danish, Sweden:Swedish,
    Iceland:Icelandic, Iran:Persian, Thailand:Thai, Vietnam:Vietnamese, Turkey:Turkish,
    Australia:English, Ukraine:Ukrainian, France:French, Spain:Spanish, Chile:Spanish
""")

CONTINENTS = _table("""
    France:Europe, Germany:Europe, Norway:Europe, Greece:Europe, Poland:Europe, Ireland:Europe,
    Japan:Asia, China:Asia, India:Asia, Nepal:Asia, Thailand:Asia, Vietnam:Asia, Mongolia:Asia,
    Egypt:Africa, Kenya:Africa, Ghana:Africa, Morocco:Africa, Angola:Africa, Nigeria:Africa,
    Canada:North America, Mexico:North America, Cuba:North America, Brazil:South America,
    Peru:South America, Chile:South America, Argentina:South America, Bolivia:South America
""")

SYMBOLS = _table("""
    hydrogen:H, helium:He, lithium:Li, carbon:C, nitrogen:N, oxygen:O, fluorine:F, neon:Ne,
    sodium:Na, magnesium:Mg, aluminium:Al, silicon:Si, phosphorus:P, sulfur:S, chlorine:Cl,
    argon:Ar, potassium:K, calcium:Ca, titanium:Ti, chromium:Cr, iron:Fe, nickel:Ni, copper:Cu,
    zinc:Zn, silver:Ag, tin:Sn, iodine:I, tungsten:W, platinum:Pt, gold:Au, mercury:Hg, lead:Pb,
    uranium:U
""")

AUTHORS = _table("""
    Hamlet:William Shakespeare, Macbeth:William Shakespeare, Don Quixote:Miguel de Cervantes, War
    and Peace:Leo Tolstoy, Anna Karenina:Leo Tolstoy, Crime and Punishment:Fyodor Dostoevsky,
    Pride and Prejudice:Jane Austen, Emma:Jane Austen, Frankenstein:Mary Shelley, Dracula:Bram
    Stoker, Moby Dick:Herman Melville, Oliver Twist:Charles Dickens, Great Expectations:Charles
    Dickens, The Odyssey:Homer, The Iliad:Homer, The Divine Comedy:Dante Alighieri, Faust:Johann
    von Goethe, Les Miserables:Victor Hugo, The Three Musketeers:Alexandre Dumas, Jane
    Eyre:Charlotte Bronte, Wuthering Heights:Emily Bronte, The Time Machine:H. G. Wells, Treasure
    Island:Robert Louis Stevenson, The Jungle Book:Rudyard Kipling, Ulysses:James Joyce, The
    Trial:Franz Kafka
""")

YOUNG = _table("""
    dog:puppy, cat:kitten, cow:calf, horse:foal, sheep:lamb, goat:kid, pig:piglet, lion:cub,
    bear:cub, deer:fawn, duck:duckling, goose:gosling, swan:cygnet, kangaroo:joey, frog:tadpole,
    owl:owlet, hen:chick, eagle:eaglet, hare:leveret, fox:cub, whale:calf, elephant:calf
""")

OPPOSITES = _table("""
    hot:cold, big:small, fast:slow, up:down, left:right, early:late, light:dark, open:closed,
    full:empty, hard:soft, high:low, old:new, rich:poor, strong:weak, true:false, wet:dry,
    happy:sad, day:night, first:last, long:short, loud:quiet, deep:shallow, wide:narrow,
    sweet:bitter, begin:end, buy:sell, win:lose, push:pull, near:far, thick:thin
""")

COLORS = _table("""
    grass:green, the sky on a clear day:blue, snow:white, coal:black, a ripe banana:yellow,
    blood:red, a ripe tomato:red, the sun at sunset:orange, chocolate:brown, an elephant:grey,
    milk:white, a lemon:yellow, a flamingo:pink, an emerald:green, a ruby:red, a sapphire:blue
""")

COUNTS = _table("""
    days are in a week:7, months are in a year:12, hours are in a day:24, minutes are in an
    hour:60, seconds are in a minute:60, legs does a spider have:8, legs does an insect have:6,
    legs does a dog have:4, arms does an octopus have:8, sides does a triangle have:3, sides does
    a square have:4, sides does a pentagon have:5, sides does a hexagon have:6, sides does an
    octagon have:8, planets are in the solar system:8, continents are there:7, letters are in the
    English alphabet:26, strings does a violin have:4, strings does a guitar have:6, players are
    on a football team:11, keys does a piano have:88, bits are in a byte:8, weeks are in a
    year:52, wheels does a bicycle have:2, years are in a century:100, years are in a decade:10,
    cards are in a standard deck:52, degrees are in a circle:360
""")

WHICH = _table("""
    the largest planet in the solar system:Jupiter, the smallest planet in the solar
    system:Mercury, the planet closest to the sun:Mercury, the planet known as the red
    planet:Mars, the planet with the brightest rings:Saturn, the star at the center of the solar
    system:the Sun, the largest ocean:the Pacific Ocean, the highest mountain in the world:Mount
    Everest, the longest river in Africa:the Nile, the largest river in South America:the Amazon,
    the largest hot desert:the Sahara, the largest continent:Asia, the smallest
    continent:Australia, the largest country by area:Russia, the smallest country:Vatican City,
    the largest animal:the blue whale, the tallest animal:the giraffe, the fastest land animal:the
    cheetah, the largest bird:the ostrich, the hardest natural material:diamond, the chemical
    formula of water:H2O, the gas that plants take in:carbon dioxide, the gas that people need to
    breathe:oxygen, the most common gas in the air:nitrogen, the freezing point of water:0 degrees
    Celsius, the boiling point of water:100 degrees Celsius, the organ that pumps blood:the heart,
    the largest organ of the body:the skin, the force that pulls things down:gravity, the first
    month of the year:January, the last month of the year:December, the shortest month of the
    year:February, the natural satellite of the Earth:the Moon, the smallest prime number:2, the
    square root of 81:9, the square root of 144:12, the tool that measures temperature:a
    thermometer, the process by which plants make food from light:photosynthesis, the first person
    on the Moon:Neil Armstrong, the painter of the Mona Lisa:Leonardo da Vinci, the inventor of
    the telephone:Alexander Graham Bell, the scientist who described gravity:Isaac Newton, the
    scientist behind the theory of relativity:Albert Einstein, the author of the theory of
    evolution:Charles Darwin
""")

RELATIONS = (
    Relation(
        CAPITALS,
        (
            "What is the capital of {0}?",
            "What's the capital of {0}?",
            "Capital of {0}?",
            "Which city is the capital of {0}?",
            "Name the capital of {0}.",
            "Tell me the capital of {0}.",
            "Can you tell me the capital of {0}?",
            "Do you know the capital of {0}?",
            "{0}: what is its capital?",
            "I need the capital city of {0}.",
            "What city is the capital of {0}?",
            "Please name the capital city of {0}.",
            "the capital of {0} is?",
        ),
        "The capital of {0} is {1}.",
    ),
    Relation(
        CAPITALS,
        (
            "{1} is the capital of which country?",
            "Which country has {1} as its capital?",
            "What country is {1} the capital of?",
            "Of which country is {1} the capital?",
            "Name the country whose capital is {1}.",
            "Whose capital is {1}?",
            "Tell me which country has the capital {1}.",
        ),
        "{1} is the capital of {0}.",
    ),
    Relation(
        CURRENCIES,
        (
            "What is the currency of {0}?",
            "Which currency does {0} use?",
            "What money do people use in {0}?",
            "What do people pay with in {0}?",
            "Name the currency of {0}.",
            "Currency of {0}?",
            "Tell me the currency of {0}.",
            "Which money is used in {0}?",
            "What's the currency in {0}?",
        ),
        "The currency of {0} is the {1}.",
    ),
    Relation(
        LANGUAGES,
        (
            "What language is spoken in {0}?",
            "Which language do people speak in {0}?",
            "What is the main language of {0}?",
            "Name the main language of {0}.",
            "Language of {0}?",
            "What do people speak in {0}?",
            "Tell me the language of {0}.",
            "What's the official language of {0}?",
        ),
        "The main language of {0} is {1}.",
    ),
    Relation(
        CONTINENTS,
        (
            "On which continent is {0}?",
            "What continent is {0} in?",
            "Where is {0}?",
            "Which continent is {0} on?",
            "{0} is on which continent?",
            "Continent of {0}?",
            "In which part of the world is {0}?",
            "Tell me the continent of {0}.",
        ),
        "{0} is in {1}.",
    ),
    Relation(
        SYMBOLS,
        (
            "What is the chemical symbol of {0}?",
            "What's the symbol for {0}?",
            "Symbol of {0}?",
            "Which chemical symbol does {0} have?",
            "Name the chemical symbol for {0}.",
            "How is {0} written in chemistry?",
            "Tell me the symbol of the element {0}.",
            "What letters stand for {0} in the periodic table?",
        ),
        "The chemical symbol of {0} is {1}.",
    ),
    Relation(
        SYMBOLS,
        (
            "Which element has the symbol {1}?",
            "What element is {1}?",
            "The symbol {1} stands for which element?",
            "Name the element with the symbol {1}.",
            "What does {1} stand for in chemistry?",
            "In the periodic table, what is {1}?",
        ),
        "{1} is the symbol of {0}.",
    ),
    Relation(
        AUTHORS,
        (
            "Who wrote {0}?",
            "Who is the author of {0}?",
            "Who's the author of {0}?",
            "Name the author of {0}.",
            "By whom was {0} written?",
            "Author of {0}?",
            "Tell me who wrote {0}.",
            "Do you know who wrote {0}?",
            "Which author wrote {0}?",
        ),
        "{0} was written by {1}.",
    ),
    Relation(
        YOUNG,
        (
            "What is a young {0} called?",
            "What do you call a baby {0}?",
            "Name for a baby {0}?",
            "What is the young of a {0} called?",
            "How is a young {0} called?",
            "What's a baby {0} called?",
            "Tell me the word for a young {0}.",
            "What is the name of a baby {0}?",
        ),
        "A young {0} is called a {1}.",
    ),
    Relation(
        OPPOSITES,
        (
            "What is the opposite of {0}?",
            "Opposite of {0}?",
            "What's the opposite of {0}?",
            "Name the opposite of {0}.",
            "Give me the opposite of {0}.",
            "Which word is the opposite of {0}?",
            "What is an antonym of {0}?",
            "Tell me a word that means the opposite of {0}.",
        ),
        "The opposite of {0} is {1}.",
    ),
    Relation(
        COLORS,
        (
            "What color is {0}?",
            "Which color is {0}?",
            "What colour is {0}?",
            "Color of {0}?",
            "Tell me the color of {0}.",
            "What is the color of {0}?",
            "What's the color of {0}?",
            "Name the color of {0}.",
        ),
        "The color of {0} is {1}.",
    ),
    Relation(
        COUNTS,
        (
            "How many {0}?",
            "Can you tell me how many {0}?",
            "Do you know how many {0}?",
            "Tell me how many {0}.",
            "Please tell me how many {0}.",
            "I want to know how many {0}.",
            "Quick question: how many {0}?",
            "So how many {0}?",
        ),
        "The answer is {1}.",
    ),
    Relation(
        WHICH,
        (
            "What is {0}?",
            "What's {0}?",
            "Which one is {0}?",
            "Name {0}.",
            "Tell me {0}.",
            "Can you name {0}?",
            "Do you know {0}?",
            "Please name {0}.",
            "I want to know {0}.",
            "Quick question: what is {0}?",
        ),
        "It is {1}.",
    ),
)

_WEIGHTS = [len(relation.pairs) * (2 if relation is RELATIONS[0] else 1) for relation in RELATIONS]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def fact(rng: Random) -> Example:
    """Ask for one fact of one table."""
    relation = rng.choices(RELATIONS, _WEIGHTS)[0]
    left, right = rng.choice(relation.pairs)
    question = _sentence(rng.choice(relation.questions).format(left, right))
    answer = _sentence(relation.answer.format(left, right))
    reverse = relation.answer.startswith("{1}")
    return single("facts", question, answer, (left if reverse else right,))
