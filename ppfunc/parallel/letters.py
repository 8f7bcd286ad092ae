"""Read the layout of a pipeline from text, one letter a layer: ``"Et*3|(tt|)*29,m|L"``."""

import re
from dataclasses import dataclass

from .partition import Partition
from .placement import Placement, place

LETTERS = {"E": "embedding", "t": "decoder", "m": "multi-token prediction", "L": "loss"}
_LIMIT = 1_000_000  # letters that a text may unfold to
_SIGNS = re.compile(r"\*[0-9,]*|[^,]", re.DOTALL)


@dataclass(frozen=True)
class Layout:
    """Describe the layers of each stage of a pipeline, one letter a layer.

    Args:
        stages: the letters of each stage: ``E`` embedding, ``t`` decoder, ``m`` multi-token
            prediction, ``L`` loss.

    >>> layout = parse_layout("Ett|(tt|)*2,m|L")
    >>> layout.stages, layout.decoders
    (('Ett', 'tt', 'tt', 'm', 'L'), (2, 2, 2, 0, 0))
    >>> layout.partition.boundaries
    (0, 3, 5, 7, 8, 9)
    """

    stages: tuple[str, ...]

    def __str__(self) -> str:
        return "|".join(self.stages)

    @property
    def partition(self) -> Partition:
        """Partition all layers; embedding, loss and prediction count as layers."""
        return Partition.from_sizes(map(len, self.stages), allow_empty=True)

    @property
    def decoders(self) -> tuple[int, ...]:
        """Count the decoder layers of each stage."""
        return tuple(stage.count("t") for stage in self.stages)

    def placement(self, ranks: int) -> Placement:
        """Deal the stages round ``ranks`` ranks, which have to divide them."""
        return place("loop", ranks, len(self.stages))


def parse_layout(
    text: str, *, decoders: int | None = None, ranks: int | None = None, allow_empty: bool = False
) -> Layout:
    """Read the layout that a text describes.

    Letters are layers, ``|`` ends a stage, ``*n`` repeats the letter or the group in parentheses
    before it. Commas have no meaning.

    Args:
        text: such as ``"Et*3|(tt|)*29,m|L"``.
        decoders: how many decoder layers there have to be.
        ranks: how many ranks the stages have to divide among.
        allow_empty: whether a stage may have no layer.

    Raises:
        ValueError: the text cannot be read, does not begin with its only embedding or end with its only
            loss, has a decoder after ``m``, has an empty stage without ``allow_empty``, or has other
            counts than asked for.

    References:
        Megatron-LM, ``--pipeline-model-parallel-layout``.
    """
    unfolded = _unfold(text)
    layout = Layout(tuple(unfolded.split("|")))
    if not allow_empty and "" in layout.stages:
        raise ValueError(
            f"stage {layout.stages.index('')} of {text!r} would be empty: the sizes are "
            f"{list(map(len, layout.stages))}; remove a '|', or set allow_empty"
        )
    _require_order(text, unfolded.replace("|", ""))
    if decoders is not None and sum(layout.decoders) != decoders:
        raise ValueError(
            f"{text!r} has {sum(layout.decoders)} decoder layers 't', but the model has {decoders}"
        )
    if ranks is not None:
        layout.placement(ranks)
    return layout


def _unfold(text: str) -> str:
    """Write out repetitions; return the letters."""
    groups = [""]  # what stands in each open parenthesis so far
    opened: list[int] = []
    item: str | None = None  # what a star would repeat
    for sign in _SIGNS.finditer(text):
        token, position, times = sign[0], sign.start(), 1
        if token == "(":
            groups.append("")
            opened.append(position)
            item = None
            continue
        if token == ")":
            if not opened:
                raise _unreadable(text, position, "there is no '(' for this ')'")
            opened.pop()
            item = groups.pop()
        elif token[0] == "*" and item is not None:
            groups[-1] = groups[-1][: len(groups[-1]) - len(item)]
            times = _times(text, position, token)
        elif token in LETTERS or token == "|":
            item = token
        else:
            known = ", ".join(f"{key} ({meaning})" for key, meaning in LETTERS.items())
            raise _unreadable(text, position, f"expected a layer, {known}, or one of | ( ) * ,")
        if len(groups[-1]) + len(item) * times > _LIMIT:
            raise _unreadable(text, position, f"more than {_LIMIT} layers")
        groups[-1] += item * times
        item = None if token[0] == "*" else item
    if opened:
        raise _unreadable(text, opened[-1], "there is no ')' for this '('")
    return groups[0]


def _times(text: str, position: int, token: str) -> int:
    """Read how often a star repeats."""
    digits = token[1:].replace(",", "")
    if not digits:
        raise _unreadable(text, position, "expected a number after '*'")
    return int(digits) if len(digits) <= len(str(_LIMIT)) else _LIMIT + 1


def _require_order(text: str, letters: str) -> None:
    for letter, where, place_ in (("E", "begin", 0), ("L", "end", -1)):
        if letters.count(letter) != 1 or letters[place_] != letter:
            raise ValueError(
                f"{text!r} has {letters.count(letter)} {LETTERS[letter]} layers {letter!r}: "
                f"a layout has exactly one, with which it {where}s"
            )
    if "t" in letters.partition("m")[2]:
        raise ValueError(f"{text!r} has a decoder 't' after 'm': multi-token prediction follows all decoders")


def _unreadable(text: str, position: int, why: str) -> ValueError:
    return ValueError(
        f"cannot read the layout {text!r} at character {position}, {text[position : position + 10]!r}: {why}"
    )
