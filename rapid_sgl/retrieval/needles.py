"""Labelled questions for measuring retrieval: facts planted into a real text of any length.

The text is Python's language reference and, where that is too short, the sources of its standard
library; both come with every CPython. The facts are about other things, so nothing else in the
text answers the questions.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rapid_sgl.retrieval.chunking import tokenize

KINDS = ("verbatim", "multi-key", "paraphrased")

# A fact, a question in its own words, and one that shares no content word with it (a test checks).
FACTS = (
    (
        "Captain Mirelle hid the silver compass beneath the third step of the lighthouse.",
        "What did Captain Mirelle hide beneath the third step of the lighthouse?",
        "Where did the sailor conceal her navigation instrument?",
    ),
    (
        "The bakery on Fennel Street closes on Wednesdays because its oven is being repaired.",
        "Why does the bakery on Fennel Street close on Wednesdays?",
        "For what reason can no bread be bought in the middle of the week?",
    ),
    (
        "Doctor Okafor prescribed ginger tea against the seasickness of the crew.",
        "What did Doctor Okafor prescribe against the seasickness of the crew?",
        "Which remedy did the physician recommend for nausea aboard?",
    ),
    (
        "The old violin was insured for nine thousand crowns before the concert tour.",
        "For how much was the old violin insured before the concert tour?",
        "What sum would be paid out if the musical instrument got stolen?",
    ),
    (
        "Every autumn the monks harvest saffron on the terraces above the river.",
        "What do the monks harvest every autumn on the terraces above the river?",
        "Which spice is gathered yearly by members of the religious order?",
    ),
    (
        "The night train to Lisbon departs from platform eleven at a quarter past ten.",
        "From which platform does the night train to Lisbon depart?",
        "When does the overnight railway service towards Portugal leave?",
    ),
    (
        "Grandmother's recipe calls for two spoons of vinegar to keep the crust flaky.",
        "How many spoons of vinegar does Grandmother's recipe call for to keep the crust flaky?",
        "Which sour ingredient makes granny's pastry crisp?",
    ),
    (
        "The glacier above the village lost forty metres of ice during the summer heat wave.",
        "How many metres of ice did the glacier above the village lose during the summer heat wave?",
        "By how much did the frozen mass in the mountains shrink in hot weather?",
    ),
    (
        "Inspector Valdez found the stolen painting rolled up inside a drainpipe.",
        "Where did Inspector Valdez find the stolen painting?",
        "In which hiding place did the detective recover the missing artwork?",
    ),
    (
        "The tortoise at the zoo celebrated its hundred and twelfth birthday with a cake of lettuce.",
        "With what did the tortoise at the zoo celebrate its birthday?",
        "How old did the elderly reptile become?",
    ),
    (
        "Bees from the rooftop hives pollinate the cherry orchard behind the hospital.",
        "Which orchard do bees from the rooftop hives pollinate?",
        "Where do the insects that make honey visit fruit trees?",
    ),
    (
        "The mayor cancelled the fireworks after the drought had dried out the meadows.",
        "Why did the mayor cancel the fireworks?",
        "What made the town's leader call off the pyrotechnic display?",
    ),
    (
        "Lena keeps the spare key of the cottage under a pot of rosemary.",
        "Under what does Lena keep the spare key of the cottage?",
        "How could a visitor get into the little country house when nobody is home?",
    ),
    (
        "The telescope on Mount Harrow recorded a comet with a green tail in March.",
        "What did the telescope on Mount Harrow record in March?",
        "Which celestial body was observed by the astronomers, and what colour was it?",
    ),
    (
        "Rust had weakened the anchor chain, so the ferry drifted onto the sandbank.",
        "Why did the ferry drift onto the sandbank?",
        "What caused the passenger boat to run aground?",
    ),
    (
        "The tailor lined the winter coats with wool from Shetland sheep.",
        "With what did the tailor line the winter coats?",
        "Which animals supplied the warm material inside the jackets?",
    ),
    (
        "Parents may collect their children from the kindergarten until half past five.",
        "Until when may parents collect their children from the kindergarten?",
        "What is the latest time to pick up toddlers from daycare?",
    ),
    (
        "The museum's oldest coin was minted in Syracuse and shows a chariot.",
        "What does the museum's oldest coin show?",
        "What is depicted on the most ancient piece of money in the exhibition?",
    ),
    (
        "Smoking a cigar near the grain silo cost the farmer his insurance.",
        "What did smoking a cigar near the grain silo cost the farmer?",
        "Why did the agricultural worker lose coverage against fire?",
    ),
    (
        "The goalkeeper broke her wrist while climbing over the stadium fence.",
        "How did the goalkeeper break her wrist?",
        "Which injury did the soccer player suffer, and in what circumstances?",
    ),
    (
        "Heavy rain turned the marathon route into mud, and the runners were sent home.",
        "What turned the marathon route into mud?",
        "Why was the long-distance race abandoned?",
    ),
    (
        "The orchestra's new conductor refuses to rehearse before noon.",
        "Before when does the orchestra's new conductor refuse to rehearse?",
        "At what hours is the musical director unwilling to practise?",
    ),
    (
        "An otter stole the fishmonger's breakfast from the pier.",
        "What did an otter steal from the pier?",
        "Which wild creature took food belonging to the seafood seller?",
    ),
    (
        "The lawyer's letter demands payment of the rent arrears within fourteen days.",
        "Within how many days does the lawyer's letter demand payment of the rent arrears?",
        "How long does the tenant have to settle his debt with the landlord?",
    ),
)
# One sentence, many keys: only the right one counts.
KEYED_FACT = "The access code of the {key} vault is {code}."
KEYED_QUESTION = "What is the access code of the {key} vault?"
KEYS = (
    *("crimson", "emerald", "violet", "amber", "ivory", "turquoise", "scarlet", "indigo"),
    *("bronze", "copper", "marble", "granite", "northern", "southern", "eastern", "western"),
)


class NeedleError(ValueError):
    """No such document can be made; the text names the number and the fix."""


@dataclass(frozen=True)
class Probe:
    """A question about a document and where its answer stands."""

    kind: str
    question: str
    answers: tuple[tuple[int, int], ...]  # character ranges; one of them has to be retrieved whole


@dataclass(frozen=True)
class ProbedDocument:
    """A text and questions about it."""

    name: str
    text: str
    probes: list[Probe]


def planted_document(tokenizer: Any, tokens: int, member: int = 0, members: int = 1) -> ProbedDocument:
    """A text of about ``tokens`` tokens with facts at random paragraph ends, the same at every call.

    Args:
        tokenizer: counts the tokens.
        member: which of ``members`` documents: they begin at different places of the text and
            share the facts out among them. The keyed facts are in each, with other codes.

    Raises:
        NeedleError: too few tokens for the facts or more than the text has.
    """
    chance = random.Random(f"{tokens} {member} {members}")
    facts = list(FACTS[member::members])
    keyed = [(key, f"{chance.randrange(10**6):06}") for key in KEYS]
    needles = [fact for fact, _, _ in facts] + [KEYED_FACT.format(key=key, code=code) for key, code in keyed]
    cost = len(tokenize("\n\n".join(needles), tokenizer).ids) + 2 * len(needles)
    if tokens < 4 * cost:
        raise NeedleError(
            f"{tokens} tokens are too few for {len(needles)} facts of {cost} tokens; use {4 * cost} or more"
        )
    text, places = _plant(_hay(tokenizer, tokens - cost, member), needles, chance)
    probes = []
    for fact, verbatim, paraphrased in facts:
        probes += [
            Probe("verbatim", verbatim, (places[fact],)),
            Probe("paraphrased", paraphrased, (places[fact],)),
        ]
    for key, code in keyed:
        place = places[KEYED_FACT.format(key=key, code=code)]
        probes.append(Probe("multi-key", KEYED_QUESTION.format(key=key), (place,)))
    return ProbedDocument(f"Python reference {member + 1}/{members}", text, probes)


def _plant(hay: str, needles: list[str], chance: random.Random) -> tuple[str, dict[str, tuple[int, int]]]:
    """``hay`` with each needle as a paragraph of its own, and where they came to stand."""
    paragraphs = hay.split("\n\n")
    after = sorted(chance.sample(range(len(paragraphs) - 1), len(needles)))
    order = chance.sample(needles, len(needles))
    parts: list[str] = []
    places: dict[str, tuple[int, int]] = {}
    length = 0
    planted = dict(zip(after, order, strict=True))
    for index, paragraph in enumerate(paragraphs):
        for part in [paragraph, *([planted[index]] if index in planted else [])]:
            start = length + (2 if parts else 0)
            length = start + len(part)
            parts.append(part)
            if part is planted.get(index):
                places[part] = (start, length)
    return "\n\n".join(parts), places


def _hay(tokenizer: Any, tokens: int, member: int) -> str:
    """``tokens`` tokens of real text, from a paragraph on that is ``member``'s."""
    text = _reference()
    # Multiples of the golden ratio spread any number of starting points evenly.
    first = text.find("\n\n", int(member * 0.6180339887 % 1 * len(text))) if member else 0
    text = (text[first:] + text[:first]).lstrip("\n")
    # Six characters a token: more than English and code have.
    for source in _library():
        if len(text) >= 6 * tokens:
            break
        text += source
    document = tokenize(text[: 6 * tokens], tokenizer)
    if len(document.ids) < tokens:
        raise NeedleError(f"the built-in text has no {tokens} tokens; use {len(document.ids)} or fewer")
    return document.slice(0, tokens)


@cache
def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n\n"


def _library() -> Iterator[str]:
    """Sources of the standard library's single-file modules, by name."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace") + "\n\n"
