"""Captions of scenes: `describe_scene` writes one of many wordings, and `parse_caption` reads what a caption states.

For every caption of `describe_scene`, `parse_caption` returns the statement that `describe_scene` returned with it. A
statement contains only what the words state. Pixels and tokens are not part of this module.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from training.pictures.scenes import COLOURS, RELATIONS, SHAPES, Scene


@dataclass(frozen=True)
class StatedObject:
    shape: str
    colour: str
    size: str | None = None


@dataclass(frozen=True)
class Statement:
    """What a caption states about a scene. None: not stated.

    `objects` has the order of the words, and equal objects are repeated. `position` is that of the only object.
    `relation` is that of the first object to the second.
    """

    objects: tuple[StatedObject, ...]
    background: str | None = None
    position: str | None = None
    relation: str | None = None


class CaptionError(ValueError):
    """A caption names no object that a scene can contain."""


SIZE_WORDS = {
    "small": ("small", "small", "small", "little", "tiny"),
    "large": ("large", "large", "large", "big", "huge"),
}
POSITION_WORDS = {
    "left": ("on the left", "on the left side", "at the left", "to the left", "in the left"),
    "right": ("on the right", "on the right side", "at the right", "to the right", "in the right"),
    "top": ("at the top", "on the top", "in the top", "on top", "at the upper side"),
    "bottom": ("at the bottom", "on the bottom", "in the bottom", "at the lower side"),
    "centre": ("in the centre", "in the center", "in the middle", "at the centre", "at the center", "at the middle"),
}
RELATION_WORDS = {
    "left of": ("to the left of", "to the left of", "left of", "on the left of", "on the left side of"),
    "right of": ("to the right of", "to the right of", "right of", "on the right of", "on the right side of"),
    "above": ("above", "above", "above", "over"),
    "below": ("below", "below", "under", "beneath"),
}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
PREFIXES = ("a picture of", "an image of", "a drawing of", "a painting of", "draw", "show me", "there is")


def describe_scene(scene: Scene, rng: random.Random, full: bool = False) -> tuple[str, Statement]:
    """Return a caption of the scene and what it states. With `full`, nothing that the scene fixes is left out."""
    objects = list(scene.objects)
    relation = scene.relation if full or rng.random() < 0.85 else None
    if scene.kind == "pair" and rng.random() < 0.5:
        objects.reverse()
        relation = OPPOSITE[relation] if relation else None
    states_sizes = rng.random() < (0.7 if scene.kind == "single" else 0.5)
    sizes = [item.size if full or (states_sizes and rng.random() < 0.9) else None for item in objects]
    if scene.kind == "count":
        sizes = [sizes[0]] * len(objects)
    position = scene.position if full or rng.random() < 0.65 else None
    background = scene.background if full or rng.random() < 0.9 else None
    statement = Statement(
        tuple(StatedObject(item.shape, item.colour, size) for item, size in zip(objects, sizes, strict=True)),
        background,
        position,
        relation,
    )
    if scene.kind == "count":
        subject = _counted_phrase(statement.objects, rng)
    elif scene.kind == "pair":
        first, second = statement.objects
        connection = _connection(relation, rng)
        subject = f"{_object_phrase(first, rng)}{connection} {_object_phrase(second, rng)}"
    else:
        subject = _object_phrase(statement.objects[0], rng)
    return _sentence(subject, position, background, rng), statement


def _with_article(words: str, rng: random.Random) -> str:
    article = rng.choices(("a", "the", "", "one"), (0.66, 0.12, 0.19, 0.03))[0]
    if article == "a" and words[0] in "aeiou":
        article = "an"
    return f"{article} {words}".strip()


def _adjectives_and_noun(item: StatedObject, rng: random.Random) -> str:
    size = rng.choice(SIZE_WORDS[item.size]) + " " if item.size else ""
    return f"{size}{item.colour} {item.shape}"


def _object_phrase(item: StatedObject, rng: random.Random) -> str:
    return _with_article(_adjectives_and_noun(item, rng), rng)


def _counted_phrase(objects: tuple[StatedObject, ...], rng: random.Random) -> str:
    numbers = ("two", "two", "2", "a pair of") if len(objects) == 2 else ("three", "three", "3")
    return f"{rng.choice(numbers)} {_adjectives_and_noun(objects[0], rng)}s"


def _connection(relation: str | None, rng: random.Random) -> str:
    if relation:
        return rng.choice(("", "", "", " is", ",")) + " " + rng.choice(RELATION_WORDS[relation])
    return rng.choice((" and", " and", " and", " and", " next to", " with", " beside", ","))


def _sentence(subject: str, position: str | None, background: str | None, rng: random.Random) -> str:
    position_phrase = f"{rng.choice(('', '', '', ','))} {rng.choice(POSITION_WORDS[position])}" if position else ""
    if background is None:
        text = subject + position_phrase
    else:
        style = rng.random()
        background_phrase = _background_phrase(background, rng)
        if style < 0.12:
            text = f"{background_phrase}, {subject}{position_phrase}"
        elif style < 0.2:
            text = f"{background} background, {subject}{position_phrase}"
        elif style < 0.28:
            text = f"{subject}{position_phrase}, {background} background"
        elif style < 0.5:
            text = f"{subject} {background_phrase}{position_phrase}"
        else:
            text = f"{subject}{position_phrase} {background_phrase}"
    if rng.random() < 0.15:
        text = f"{rng.choice(PREFIXES)} {text}"
    return text + "." if rng.random() < 0.15 else text


def _background_phrase(background: str, rng: random.Random) -> str:
    if rng.random() < 0.15:
        return f"on {background}"
    preposition = rng.choices(("on", "against", "with", "in front of"), (0.65, 0.2, 0.1, 0.05))[0]
    article = rng.choices(("a", "the", ""), (0.8, 0.1, 0.1))[0]
    if article == "a" and background[0] in "aeiou":
        article = "an"
    return f"{preposition} {article} {background} background".replace("  ", " ")


_COLOUR_WORDS = "|".join(COLOURS)
_SIZE_BY_WORD = {word: size for size, words in SIZE_WORDS.items() for word in words}
_COUNT_BY_WORD = {"two": 2, "2": 2, "pair of": 2, "three": 3, "3": 3}
_OBJECT_PATTERN = re.compile(
    rf"\b(?:(two|2|pair of|three|3) )?(?:({'|'.join(_SIZE_BY_WORD)}) )?({_COLOUR_WORDS}) ({'|'.join(SHAPES)})s?\b"
)
_BACKGROUND_PATTERNS = (
    re.compile(rf"\b({_COLOUR_WORDS}) background\b"),
    re.compile(rf"\bon (?:an? |the )?({_COLOUR_WORDS})\b(?! (?:{'|'.join(SHAPES)}))"),
)
_RELATION_PATTERNS = (
    ("left of", re.compile(r"\bleft (side )?of\b")),
    ("right of", re.compile(r"\bright (side )?of\b")),
    ("above", re.compile(r"\b(above|over)\b")),
    ("below", re.compile(r"\b(below|under|beneath)\b")),
)
_POSITION_PATTERNS = (
    ("left", re.compile(r"\bleft\b")),
    ("right", re.compile(r"\bright\b")),
    ("top", re.compile(r"\b(top|upper)\b")),
    ("bottom", re.compile(r"\b(bottom|lower)\b")),
    ("centre", re.compile(r"\b(centre|center|middle)\b")),
)


def parse_caption(caption: str) -> Statement:
    """Return what a caption states, also if `describe_scene` would not word it so.

    Raises CaptionError if it names no object.
    """
    text = " ".join(re.sub(r"[^a-z0-9 ]", " ", caption.lower()).split())
    background = None
    for pattern in _BACKGROUND_PATTERNS:
        if match := pattern.search(text):
            background = match[1]
            text = text[: match.start()] + text[match.end() :]
            break
    matches = list(_OBJECT_PATTERN.finditer(text))
    if not matches:
        raise CaptionError(
            f"Caption {caption!r} names no object. Name one, as in 'a large red circle on a blue background'."
        )
    objects = tuple(
        StatedObject(match[4], match[3], _SIZE_BY_WORD.get(match[2] or ""))
        for match in matches
        for _ in range(_COUNT_BY_WORD.get(match[1] or "", 1))
    )
    relation = position = None
    if len(matches) == 2:
        between = text[matches[0].end() : matches[1].start()]
        relation = next((name for name, pattern in _RELATION_PATTERNS if pattern.search(between)), None)
    elif len(objects) == 1:
        remaining = text[: matches[0].start()] + "|" + text[matches[0].end() :]
        position = next((name for name, pattern in _POSITION_PATTERNS if pattern.search(remaining)), None)
    return Statement(objects, background, position, relation)


assert set(OPPOSITE) == set(RELATION_WORDS) == set(RELATIONS)
