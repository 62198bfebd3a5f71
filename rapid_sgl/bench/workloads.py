"""What the prompts of a measurement ask for: an ordinary answer, or one that repeats its source.

``answer`` asks about a text. The other three have answers that a copy of one planted passage goes far in: ``quote`` a
letter word for word, ``extract`` a list, ``rewrite`` a configuration with one value changed. Their answers are begun
for the model (``Task.prefix``), as completion APIs allow, so that a small model, too, goes on with the copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

QUESTION = "What are the rules that this text describes? List them one by one, in its own words."
# English prose and Python code have about four characters to a token.
CHARS_PER_TOKEN = 4
# Multiples of the golden ratio spread any number of starting points evenly over the text.
SPREAD = 0.6180339887
# Where in the document a source may begin: behind the head window, ahead of the recent one.
SHALLOWEST, DEEPEST = 0.25, 0.55
# What is planted is numbered, or has names that nothing else has: with repeated words a small model loses its place.
GOODS = (
    "rope canvas lamps barrels anchors paint timber copper coffee wool salt glass sugar tobacco leather tea"
)
MAKERS = (
    "Aldana Brekke Corvino Dufour Ekstrom Farrow Galvin Hadley Iversen Jansky Kessler Lindqvist Moreau Novak "
    "Okafor Petrov"
)
BEGUN_LINES = 4  # of the answer that the prompt begins
LETTER = """\
[1] Dear Mr. {name}, the winter of {year} came early to our rock, and I write before the last boat leaves.
[2] The lamp burns well, yet the {steps} steps to the gallery are wet with salt and I have fallen twice.
[3] Three barrels of oil arrived broken on Tuesday; the carpenter mended two of them with tar and sailcloth.
[4] My brother painted the northern railing green because no white paint has come from the harbour since April.
[5] On quiet evenings we count the ships that pass the sandbank and write their names on the kitchen wall.
[6] A grey seal sleeps beneath the landing stage, and the dog has stopped barking at her.
[7] Please send wicks of the thicker kind, a new brass hinge for the pantry, and any newspaper, however old.
[8] The ointment helped my hand, but the cough that I had in autumn returned with the fog.
[9] If the inspector visits in spring, tell him that the bell was cracked long before we came.
[10] We ask for nothing else except coal, patience and a kinder wind."""
SETTINGS = """\
[1] hostname = "{name}.example.org"
[2] port = {port}
[3] workers = 12
[4] log_file = "/var/log/harbour/access.log"
[5] greeting = "Welcome to the harbour"
[6] timezone = "Europe/Lisbon"
[7] compression = "zstd"
[8] retry_policy = "exponential"
[9] upload_limit = "25 MB"
[10] database = "postgres://reader@storage/{name}"
[11] session_cookie = "harbour_id"
[12] maintenance_window = "Sunday 03:00"
[13] contact = "operations@example.org"
[14] metrics_endpoint = "/internal/metrics"
[15] feature_flags = ["search", "export", "dark-mode"]
[16] allowed_origins = ["https://www.example.org"]
[17] password_hash = "argon2id"
[18] garbage_collection = "nightly"
[19] language = "pt-PT"
[20] banner = "Harbour office, berth {berth}"
"""


@dataclass(frozen=True)
class Task:
    """One document and what is asked about it."""

    text: str
    question: str
    prefix: str = ""  # the answer's first words, part of the prompt
    source: tuple[int, int] | None = None  # characters of ``text`` that the answer repeats


def make_task(workload: str, member: int, context: int) -> Task:
    """The task of the ``member``-th prompt; each member reads another part of Python's reference.

    Args:
        workload: one of ``rapid_sgl.bench.WORKLOADS``.
        context: tokens of the prompt, which decide where a source lies.
    """
    text = _text_from(member)
    at = int(_depth(member) * context * CHARS_PER_TOKEN)
    return _MAKERS[workload](text, member, at)


def _answer(text: str, member: int, at: int) -> Task:
    return Task(text, QUESTION)


def _quote(text: str, member: int, at: int) -> Task:
    draw = random.Random(member)
    letter = LETTER.format(
        name=draw.choice(MAKERS.split()), year=draw.randint(1804, 1898), steps=draw.randint(150, 240)
    )
    text, source = _planted(text, at, letter)
    opening = letter[len("[1] ") : letter.index(", the winter")]
    question = f'Repeat the numbered letter that begins "{opening}" word for word.'
    return Task(text, question, _begun(letter), source)


def _extract(text: str, member: int, at: int) -> Task:
    inventory = _inventory(random.Random(member))
    text, source = _planted(text, at, inventory)
    question = "List every entry of the inventory of crates, one per line, as it is written."
    return Task(text, question, _begun(inventory), source)


def _rewrite(text: str, member: int, at: int) -> Task:
    draw = random.Random(member)
    name = draw.choice(MAKERS.split()).lower()
    settings = SETTINGS.format(name=name, port=draw.randint(2000, 9000), berth=draw.randint(2, 90)).strip()
    text, source = _planted(text, at, settings)
    question = "Write the whole configuration file again with workers = 48 and everything else as it is."
    return Task(text, question, _begun(settings.replace("workers = 12", "workers = 48")), source)


def _begun(answer: str) -> str:
    return "".join(answer.splitlines(keepends=True)[:BEGUN_LINES])


_MAKERS: dict[str, Callable[[str, int, int], Task]] = {
    "answer": _answer,
    "quote": _quote,
    "extract": _extract,
    "rewrite": _rewrite,
}


def _planted(text: str, at: int, passage: str) -> tuple[str, tuple[int, int]]:
    """``text`` with ``passage`` as a paragraph of its own behind character ``at``, and where it went."""
    end = text.find("\n\n", at)
    start = end + 2
    return f"{text[:start]}{passage}\n\n{text[start:]}", (start, start + len(passage))


def _inventory(draw: random.Random) -> str:
    goods, makers = GOODS.split(), MAKERS.split()
    draw.shuffle(goods)
    draw.shuffle(makers)
    return "\n".join(
        f"Entry {number}: {kind}, {draw.randint(11, 98)} crates from {maker}"
        for number, (kind, maker) in enumerate(zip(goods, makers, strict=True), start=1)
    )


def _depth(member: int) -> float:
    return SHALLOWEST + (DEEPEST - SHALLOWEST) * ((member + 0.5) * SPREAD % 1)


def _text_from(member: int) -> str:
    """The whole reference, rotated to begin at the paragraph that is ``member``'s."""
    text = _reference()
    first = text.find("\n\n", int(member * SPREAD % 1 * len(text)))
    return text[first:].lstrip("\n") + text[:first]


@cache
def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n\n"
