"""Pools of names and words, and a generator of new names.

Copying must work for unseen names, so about half of all names consist of random syllables.
"""

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIVEN_NAMES = _words("""
    Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karen Leo Maria Nina Oscar Paul Quinn
    Rosa Sam Tom Ursula Victor Wendy Xavier Yara Zoe Ahmed Fatima Omar Layla Hassan Amina Yuki
    Kenji Hana Mei Wei Ling Raj Priya Arjun Anika Ivan Olga Dmitri Elena Pierre Chloe Luc Camille
    Hans Greta Jonas Lena Carlos Lucia Diego Sofia Marco Giulia Paolo Bianca Erik Astrid Lars
    Ingrid Kofi Ama Kwame Zola Thabo Naledi John Mary James Linda Robert Susan Michael Sarah
    William Alice Daniel Julia Peter Laura Mark Eva Simon Kate Adam Ruth Alex Nora Max Mia Noah
    Liam Olivia Lucas Ella Hugo Isla Theo Ava Finn Ruby Otto Lily
""")
SURNAMES = _words("""
    Smith Jones Brown Taylor Miller Wilson Moore Clark Lewis Walker Hall Young King Wright Hill
    Green Baker Adams Nelson Carter Garcia Lopez Silva Santos Costa Rossi Ricci Moreau Dubois
    Weber Schmidt Fischer Wagner Hansen Olsen Lindberg Novak Kowalski Petrov Ivanov Tanaka Sato
    Suzuki Kim Park Chen Wang Li Singh Patel Kumar Khan Ali Haddad Mensah Okafor Diallo Nguyen
    Tran
""")
CITIES = (*_words("""
    Paris London Berlin Madrid Rome Lisbon Dublin Oslo Stockholm Helsinki Copenhagen Warsaw Vienna
    Budapest Athens Istanbul Moscow Kyiv Prague Brussels Amsterdam Zurich Geneva Hamburg Munich
    Milan Naples Barcelona Seville Porto Lyon Nice Tokyo Osaka Kyoto Beijing Shanghai Seoul Busan
    Delhi Mumbai Bangkok Hanoi Jakarta Manila Singapore Tehran Baghdad Cairo Tunis Rabat Nairobi
    Accra Lagos Toronto Montreal Vancouver Boston Chicago Seattle Denver Dallas Miami Houston Lima
    Bogota Quito Santiago Sydney Melbourne Perth Auckland Cologne Leipzig Bergen Tampere Krakow
    Ghent Bristol Leeds Glasgow Cork Turin Verona
"""), "New York", "Los Angeles", "San Francisco", "Rio de Janeiro",
    "Cape Town", "Hong Kong", "New Delhi", "Buenos Aires", "Mexico City",
    "Tel Aviv", "Saint Petersburg")  # fmt: skip
ITEMS = _words("""
    apples oranges pears lemons books pencils pens cups plates lamps chairs tables coins stamps
    eggs cookies bottles boxes candles flowers roses marbles balloons tickets shirts hats shoes
    socks bags keys stones shells cards toys balls bricks nails screws bolts mugs spoons forks
    knives bowls towels pillows blankets brushes notebooks folders markers cables chargers
    batteries mirrors clocks rings scarves gloves jackets umbrellas baskets ropes buckets shovels
    seeds tulips melons onions carrots potatoes tomatoes pizzas cakes muffins sandwiches
""")
ADJECTIVES = _words("""
    red blue green yellow black white brown grey small large old new round square wooden plastic
    metal glass paper cotton leather silver golden heavy light soft cheap fine
""")
JOBS = _words("""
    teacher nurse doctor baker farmer pilot driver painter writer singer lawyer engineer plumber
    carpenter chef waiter librarian gardener tailor dentist actor dancer student scientist
    mechanic photographer translator architect electrician journalist
""")
EVENTS = _words("""
    concert wedding conference workshop meeting party exhibition lecture festival marathon picnic
    seminar dinner auction fair parade recital hackathon reunion training
""")
MONTHS = _words("""
    January February March April May June July August September October November December
""")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TOPIC_LIST = """solar panels|electric cars|healthy breakfast ideas|the history of tea|black holes|
    jazz music|modern art|python programming|growing tomatoes|cheap flights|chess openings|
    ocean currents|volcanoes|bird migration|coffee prices|the latest football results|bread recipes|
    yoga for beginners|world news|used bicycles|space telescopes|hiking trails|board games|
    learning piano|rain forests|open source licenses|wind energy|dog training|stock markets|
    travel insurance|ancient Rome|quantum computers|cold brew coffee|film festivals|garden tools|
    winter tires|vegetarian recipes|language courses|marathon training|house plants"""
TOPICS = tuple(topic.strip() for topic in _TOPIC_LIST.split("|"))

_ONSETS = (*_words("""
    b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl qu sh sl st th tr x y bl cr fr gl
    kn pr sc sk sp sw
"""), "", "", "", "")  # fmt: skip
_NUCLEI = _words("a e i o u a e i o u ai au ea ee ia ie io oo ou y")
_CODAS = (*[""] * 12, *_words("n l r s t m d k nd rt lt ck x th ss ng lm rd st ff nt"))


def coined(rng: Random, least: int = 1, most: int = 3) -> str:
    """Make a pronounceable word of a few syllables."""
    count = rng.randint(least, most)
    word = "".join(rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS)
                   for _ in range(count))  # fmt: skip
    return word if len(word) > 2 else word + rng.choice("lnrstmk")


def given_name(rng: Random) -> str:
    """A known or invented first name."""
    return rng.choice(GIVEN_NAMES) if rng.random() < 0.5 else coined(rng, 2, 3).capitalize()


def surname(rng: Random) -> str:
    """A known or invented family name."""
    return rng.choice(SURNAMES) if rng.random() < 0.4 else coined(rng, 1, 3).capitalize()


def full_name(rng: Random) -> str:
    """A first name, often with a family name."""
    first = given_name(rng)
    return first if rng.random() < 0.4 else f"{first} {surname(rng)}"


def city(rng: Random) -> str:
    """A known or invented town, sometimes of two words."""
    roll = rng.random()
    if roll < 0.6:
        return rng.choice(CITIES)
    town = coined(rng, 2, 3).capitalize()
    return town if roll < 0.9 else f"{rng.choice(('New', 'Port', 'Saint', 'East'))} {town}"


def item(rng: Random) -> str:
    """A plural noun, sometimes with an adjective or invented."""
    noun = rng.choice(ITEMS) if rng.random() < 0.8 else coined(rng, 1, 2) + "s"
    return noun if rng.random() < 0.6 else f"{rng.choice(ADJECTIVES)} {noun}"


def date(rng: Random) -> str:
    """A date in one of several notations."""
    month, day = rng.randrange(12), rng.randint(1, 28)
    style = rng.randrange(4)
    if style == 0:
        return f"{rng.randint(2020, 2032)}-{month + 1:02}-{day:02}"
    if style == 1:
        return f"{MONTHS[month]} {day}"
    return f"{day} {MONTHS[month]}" if style == 2 else rng.choice(DAYS)


def clock(rng: Random) -> str:
    """A time of day."""
    return f"{rng.randint(7, 22)}:{rng.choice((0, 15, 30, 45)):02}"


def price(rng: Random) -> int | float:
    """A price, whole or with cents."""
    whole = rng.randint(1, 200)
    return whole if rng.random() < 0.5 else round(whole + rng.randint(1, 99) / 100, 2)


def topic(rng: Random) -> str:
    """Something to search for, sometimes about an invented name."""
    known = rng.choice(TOPICS)
    roll = rng.random()
    if roll < 0.5:
        return known
    return f"{known} in {city(rng)}" if roll < 0.75 else f"{full_name(rng)} {rng.choice(ITEMS)}"
