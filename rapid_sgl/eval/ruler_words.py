"""Words for RULER's needles and word lists.

RULER takes them from the package wonderwords. Here keys are made of the adjectives and nouns
below, and word lists of the words of CPython's language reference and standard library, so that
nothing has to be downloaded.
"""

from __future__ import annotations

import re
import sysconfig
from functools import cache
from pathlib import Path

_ADJECTIVES = """
    able acidic agile amber ample ancient angry aquatic arctic ashen bashful bitter bland blissful bold bony
    brave breezy brief bright brisk bronze bulky bumpy calm candid careful cheerful chilly civil clever cloudy
    clumsy coastal cosmic cozy crafty crisp curious curly damp daring deep dizzy dusty eager early earnest elastic
    elegant empty faint fancy fearless fierce floral fluffy fragile frosty frugal gentle giddy glossy golden grand
    grumpy handy hasty hazy heavy hollow honest humble hungry icy idle jagged jolly keen kind lanky lavish lazy
    lively lonely loud lucky lunar mellow mighty misty modest muddy narrow neat nimble noble noisy oblong odd
    opaque orderly patient plain plump polite proud quaint quick quiet rapid rare ripe rocky rough royal rustic
    salty scarce shaggy sharp shiny silent simple sleepy slender smooth snowy solar solid spicy stale steep sticky
    sturdy subtle sunny swift tender thick thirsty tidy timid tiny tough tranquil upbeat vast velvet vivid warm
    wary watery wicked windy witty wooden woolly young zesty"""
_NOUNS = """
    acorn airport album anchor ankle apple apron arrow attic badge bakery balloon banana banjo barrel basket beach
    beacon beaver bicycle blanket blossom bonnet bottle boulder bracelet branch bridge broom bucket butter button
    cabin cactus camel candle canoe canyon carpet carrot castle cattle cellar chapel cherry chimney circus citadel
    clarinet cliff clock closet cobbler collar comet compass cottage cradle crater cricket crown curtain cushion
    dagger daisy desert diary dolphin donkey drawer drum eagle easel elbow engine falcon farmer feather fence ferry
    fiddle flute forest fossil fountain fox galaxy garden garlic geyser giraffe glacier goblet grape guitar hammer
    hammock harbor harvest hazel helmet heron hinge honey horizon hotel iceberg island ivy jacket jaguar jar jewel
    jungle kettle kitten ladder lagoon lantern lemon library lizard lobster locket magnet mango maple marble meadow
    mirror monkey mosaic mountain muffin mustard napkin needle nest oasis ocean olive onion orchard otter oven owl
    paddle palace panther parade parrot peach pebble pelican pencil pepper piano pickle pigeon pillow pirate planet
    pocket pond pony porch potato prairie puddle pumpkin puzzle quarry quilt rabbit raccoon radish raft rainbow
    raven ribbon river robin rocket saddle salmon sandal scarf school seagull shadow shelf shovel shrimp spider
    spoon squirrel stable statue stream sunset swamp sweater teapot temple thimble thunder ticket tiger toast tomato
    tower trumpet tulip tunnel turtle umbrella valley vessel village violin volcano wagon walnut waterfall whale
    willow window winter wizard yacht zebra"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())


@cache
def reference_text() -> str:
    """CPython's language reference, all topics in the order of their names."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


@cache
def common_words(least: int = 0) -> tuple[str, ...]:
    """Lower-case words of 3 to 10 letters, in an order that is fixed within one Python version.

    Those of the language reference; where ``least`` is more, the words of the library's sources too.
    """
    words = dict.fromkeys(sorted(_words(reference_text())))
    if len(words) < least:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            words.update(dict.fromkeys(sorted(_words(path.read_text(encoding="utf-8", errors="replace")))))
    return tuple(words)


def _words(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.\\-])[a-z]{3,10}(?![\w(=.-])", text))
