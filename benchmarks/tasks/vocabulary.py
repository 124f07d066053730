"""Words and texts that the retrieval tasks hide things in, and the names of the things."""

from __future__ import annotations

import random
import re
import string
import uuid
from functools import cache
from pathlib import Path

from kvpass.benchmarks.text import reference

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

_NOVELS = ("moby_dick", "pride_and_prejudice")

_QUALITIES = """
able amber ancient bitter bold brave brisk calm clever cold cosmic crisp curious dark deep distant dusty eager early
faint famous fierce final flat fresh gentle giant glad golden grand green happy heavy hidden hollow honest humble
icy idle jolly keen kind late lively lonely loud lucky mellow mighty modest narrow noble odd pale patient plain polite
proud quick quiet rapid rare rough round royal rusty sharp shy silent silver simple sleepy slim smooth soft solid
steady stern sweet swift tall tame tidy tiny vivid warm wild wise young
"""

_THINGS = """
anchor apple arrow badge barrel basket beacon bell blanket boat bottle bridge bucket button candle canyon carpet castle
chair cherry circle cloud compass copper corner cottage cradle desert drum eagle engine falcon feather fence field
flame flute forest fountain garden glacier hammer harbor harvest helmet hill island jacket jungle kettle ladder lantern
lemon letter lion marble meadow mirror mountain needle ocean orchard oven paddle palace pencil pepper piano pillow
planet pocket pond rabbit ribbon river rocket saddle sailor school shadow shelter signal spoon station statue storm
table temple ticket tiger tower train tunnel valley violin wagon wallet whistle willow window winter
"""

_ADJECTIVES, _NOUNS = _QUALITIES.split(), _THINGS.split()


def word(draw: random.Random) -> str:
    """An adjective and a noun."""
    return f"{draw.choice(_ADJECTIVES)}-{draw.choice(_NOUNS)}"


def number(draw: random.Random) -> str:
    """Seven digits."""
    return str(draw.randrange(10**6, 10**7))


def uuid4(draw: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def letters(draw: random.Random, size: int, alphabet: str = string.ascii_lowercase) -> str:
    """``size`` letters."""
    return "".join(draw.choices(alphabet, k=size))


@cache
def plain_words() -> tuple[str, ...]:
    """The lower-case words of four to nine letters in Python's language reference, each once, sorted."""
    return tuple(sorted(set(re.findall(r"(?<!\S)[a-z]{4,9}(?!\S)", reference()))))


def sentences(data: Path | None) -> tuple[str, ...]:
    """Sentences of 20 to 300 characters: of the novels in ``data/text``, of all texts there, or of the reference."""
    files = sorted((data / "text").glob("*.txt")) if data else []
    files = [path for path in files if path.stem in _NOVELS] or files
    return _sentences(tuple(files))


@cache
def _sentences(files: tuple[Path, ...]) -> tuple[str, ...]:
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files] or [reference()]
    found = (" ".join(part.split()) for text in texts for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text))
    kept = tuple(part for part in found if 20 <= len(part) <= 300 and part[0].isupper() and part[-1] in ".!?")
    if not kept:
        raise ValueError(f"no sentences in {', '.join(path.name for path in files)}")
    return kept
