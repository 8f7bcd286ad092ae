"""Read the layout of a pipeline from text, one letter a layer: ``"Et*3|(tt|)*29,m|L"``."""

from dataclasses import dataclass

from .partition import Partition
from .placement import Placement, place

LETTERS = {"E": "embedding", "t": "decoder", "m": "multi-token prediction", "L": "loss"}
_LIMIT = 1_000_000  # letters that a text may unfold to
_DEPTH = 50  # parentheses inside each other


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

    @property
    def decoder_partition(self) -> Partition:
        """Partition the decoder layers alone. Stages without decoders are empty."""
        return Partition.from_sizes(self.decoders, allow_empty=True)

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
    unfolded, end = _sequence(text, 0)
    if end < len(text):
        raise _unreadable(text, end, "there is no '(' for this ')'")
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


def _sequence(text: str, position: int, depth: int = 0) -> tuple[str, int]:
    """Unfold the text from ``position`` up to an unmatched ``)`` or its end.

    Returns:
        The letters, and the position where they end.
    """
    if depth > _DEPTH:
        raise _unreadable(text, position, f"more than {_DEPTH} parentheses inside each other")
    parts: list[str] = []
    length = 0
    while position < len(text) and text[position] != ")":
        start, letter = position, text[position]
        position += 1
        if letter == ",":
            continue
        if letter == "(":
            item, position = _sequence(text, position, depth + 1)
            if position == len(text):
                raise _unreadable(text, start, "there is no ')' for this '('")
            position += 1
        elif letter in LETTERS or letter == "|":
            item = letter
        else:
            known = ", ".join(f"{key} ({meaning})" for key, meaning in LETTERS.items())
            raise _unreadable(text, start, f"expected a layer, {known}, or one of | ( ) * ,")
        times, position = _repeats(text, position)
        length += len(item) * times
        if length > _LIMIT:
            raise _unreadable(text, start, f"more than {_LIMIT} layers")
        parts.append(item * times)
    return "".join(parts), position


def _repeats(text: str, position: int) -> tuple[int, int]:
    """Read the repetitions ``*n`` at ``position``, 1 without a star, and skip commas.

    Returns:
        The number, and the position after it.
    """
    star = position
    while star < len(text) and text[star] == ",":
        star += 1
    if star == len(text) or text[star] != "*":
        return 1, position
    end = star + 1
    while end < len(text) and text[end] in "0123456789,":
        end += 1
    digits = text[star + 1 : end].replace(",", "")
    if not digits:
        raise _unreadable(text, star, "expected a number after '*'")
    if len(digits) > 7:
        raise _unreadable(text, star, f"more than {_LIMIT} layers")
    return int(digits), end


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
