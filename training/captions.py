"""Words for scenes, and back: `describe` words a scene in one of many ways, `parse` says what a caption demands.

Promises: for every caption that `describe` makes, `parse` gives the same demand that `describe` returned with it.
A demand holds only what the words state. Knows nothing of pixels or tokens.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from training.world import COLOURS, RELATIONS, SHAPES, Scene


@dataclass(frozen=True)
class FigureDemand:
    shape: str
    colour: str
    size: str | None = None


@dataclass(frozen=True)
class Demand:
    """`figures` in the order of the words, alike ones repeated; None: not stated. `position` is that of the only
    figure, `relation` that of the first figure to the second."""

    figures: tuple[FigureDemand, ...]
    background: str | None = None
    position: str | None = None
    relation: str | None = None


class CaptionError(ValueError):
    """The caption names no figure of this world; write for example "a large red circle on a blue background"."""


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


def describe(scene: Scene, rng: random.Random, full: bool = False) -> tuple[str, Demand]:
    """One wording of the scene, and what it states. With `full`, nothing that the scene fixes is left out."""
    figures = list(scene.figures)
    relation = scene.relation if full or rng.random() < 0.85 else None
    if scene.kind == "pair" and rng.random() < 0.5:
        figures.reverse()
        relation = OPPOSITE[relation] if relation else None
    stated = rng.random() < (0.7 if scene.kind == "single" else 0.5)
    sizes = [figure.size if full or (stated and rng.random() < 0.9) else None for figure in figures]
    if scene.kind == "count":
        sizes = [sizes[0]] * len(figures)
    position = scene.position if full or rng.random() < 0.65 else None
    background = scene.background if full or rng.random() < 0.9 else None
    demand = Demand(
        tuple(FigureDemand(f.shape, f.colour, size) for f, size in zip(figures, sizes, strict=True)),
        background,
        position,
        relation,
    )
    if scene.kind == "count":
        subject = _several(demand.figures, rng)
    elif scene.kind == "pair":
        joint = _joint(relation, rng)
        subject = f"{_one(demand.figures[0], rng)}{joint} {_one(demand.figures[1], rng)}"
    else:
        subject = _one(demand.figures[0], rng)
    return _sentence(subject, position, background, rng), demand


def _article(words: str, rng: random.Random) -> str:
    article = rng.choices(("a", "the", "", "one"), (0.66, 0.12, 0.19, 0.03))[0]
    if article == "a" and words[0] in "aeiou":
        article = "an"
    return f"{article} {words}".strip()


def _look(figure: FigureDemand, rng: random.Random) -> str:
    size = rng.choice(SIZE_WORDS[figure.size]) + " " if figure.size else ""
    return f"{size}{figure.colour} {figure.shape}"


def _one(figure: FigureDemand, rng: random.Random) -> str:
    return _article(_look(figure, rng), rng)


def _several(figures: tuple[FigureDemand, ...], rng: random.Random) -> str:
    words = ("two", "two", "2", "a pair of") if len(figures) == 2 else ("three", "three", "3")
    return f"{rng.choice(words)} {_look(figures[0], rng)}s"


def _joint(relation: str | None, rng: random.Random) -> str:
    if relation:
        return rng.choice(("", "", "", " is", ",")) + " " + rng.choice(RELATION_WORDS[relation])
    return rng.choice((" and", " and", " and", " and", " next to", " with", " beside", ","))


def _sentence(subject: str, position: str | None, background: str | None, rng: random.Random) -> str:
    place = f"{rng.choice(('', '', '', ','))} {rng.choice(POSITION_WORDS[position])}" if position else ""
    if background is None:
        text = subject + place
    else:
        style = rng.random()
        ground = _ground(background, rng)
        if style < 0.12:
            text = f"{ground}, {subject}{place}"
        elif style < 0.2:
            text = f"{background} background, {subject}{place}"
        elif style < 0.28:
            text = f"{subject}{place}, {background} background"
        elif style < 0.5:
            text = f"{subject} {ground}{place}"
        else:
            text = f"{subject}{place} {ground}"
    if rng.random() < 0.15:
        text = f"{rng.choice(PREFIXES)} {text}"
    return text + "." if rng.random() < 0.15 else text


def _ground(background: str, rng: random.Random) -> str:
    way = rng.random()
    if way < 0.15:
        return f"on {background}"
    joint = rng.choices(("on", "against", "with", "in front of"), (0.65, 0.2, 0.1, 0.05))[0]
    article = rng.choices(("a", "the", ""), (0.8, 0.1, 0.1))[0]
    if article == "a" and background[0] in "aeiou":
        article = "an"
    return f"{joint} {article} {background} background".replace("  ", " ")


_COLOUR = "|".join(COLOURS)
_SIZE = {word: size for size, words in SIZE_WORDS.items() for word in words}
_NUMBER = {"two": 2, "2": 2, "pair of": 2, "three": 3, "3": 3}
_FIGURE = re.compile(rf"\b(?:(two|2|pair of|three|3) )?(?:({'|'.join(_SIZE)}) )?({_COLOUR}) ({'|'.join(SHAPES)})s?\b")
_BACKGROUND = (
    re.compile(rf"\b({_COLOUR}) background\b"),
    re.compile(rf"\bon (?:an? |the )?({_COLOUR})\b(?! (?:{'|'.join(SHAPES)}))"),
)
_RELATION = (
    ("left of", re.compile(r"\bleft (side )?of\b")),
    ("right of", re.compile(r"\bright (side )?of\b")),
    ("above", re.compile(r"\b(above|over)\b")),
    ("below", re.compile(r"\b(below|under|beneath)\b")),
)
_POSITION = (
    ("left", re.compile(r"\bleft\b")),
    ("right", re.compile(r"\bright\b")),
    ("top", re.compile(r"\b(top|upper)\b")),
    ("bottom", re.compile(r"\b(bottom|lower)\b")),
    ("centre", re.compile(r"\b(centre|center|middle)\b")),
)


def parse(caption: str) -> Demand:
    """What a caption demands, for captions of this world in anybody's words; raises CaptionError where it names
    no figure."""
    text = " ".join(re.sub(r"[^a-z0-9 ]", " ", caption.lower()).split())
    background = None
    for pattern in _BACKGROUND:
        found = pattern.search(text)
        if found:
            background = found[1]
            text = text[: found.start()] + text[found.end() :]
            break
    matches = list(_FIGURE.finditer(text))
    if not matches:
        raise CaptionError(f"no figure in {caption!r}; name one as in 'a large red circle on a blue background'")
    figures = tuple(
        FigureDemand(match[4], match[3], _SIZE.get(match[2] or ""))
        for match in matches
        for _ in range(_NUMBER.get(match[1] or "", 1))
    )
    relation = position = None
    if len(matches) == 2:
        between = text[matches[0].end() : matches[1].start()]
        relation = next((name for name, pattern in _RELATION if pattern.search(between)), None)
    elif len(figures) == 1:
        rest = text[: matches[0].start()] + "|" + text[matches[0].end() :]
        position = next((name for name, pattern in _POSITION if pattern.search(rest)), None)
    return Demand(figures, background, position, relation)


assert set(OPPOSITE) == set(RELATION_WORDS) == set(RELATIONS)
