"""Compare the programs of stages that several ranks hold: data ranks, and copies in another chain.

Compared is what a stage and its loss call when they are evaluated: operators, their attributes, shapes, and
the bits of tensors that the functions capture; of autograd.Functions also the code of their backward. That is
in the step in which the ranks meet: the first, and the one after a failure. Not compared are what custom
operators do inside, hooks on gradients, shapes that come later, and ranks that were given other shapes.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from operator import ne

from ppfunc.stage.program import SeenCall

from ..errors import AgreementError
from ..lowering.lowered import LoweredStage
from .comparison import checksum, differences

Program = Sequence[tuple[str, str]]
"""Text and place of every call."""


def require_same_programs(stages: Iterable[LoweredStage], gather: Callable[[str], Mapping[int, str]]) -> None:
    """Raise AgreementError for a stage of which ranks run different programs for the same shapes.

    Args:
        stages: of this rank.
        gather: gathers the texts of all ranks that compare.
    """
    programs: dict[str, Program] = {}
    for low in stages:
        takes, *calls = low.outline.calls or (SeenCall(""),)
        modes = sorted({module.training for module in low.outline.modules})
        key = json.dumps([low.model_stage, modes, takes.text])
        programs.setdefault(key, [_written(call) for call in calls])
    texts = {key: "\n".join(text for text, _ in program) for key, program in programs.items()}
    digests = {k: sha256(t.encode(errors="surrogatepass")).hexdigest()[:16] for k, t in texts.items()}
    theirs = sorted(gather(json.dumps(digests, sort_keys=True)).items())
    for key, (one, _), (other, _) in differences((rank, json.loads(text)) for rank, text in theirs):
        by_rank = gather(json.dumps(programs.get(key, ())))
        raise _difference(key, *((rank, json.loads(by_rank[rank])) for rank in (one, other)))


def _difference(key: str, one: tuple[int, Program], other: tuple[int, Program]) -> AgreementError:
    """Name the stage, and the first call that differs."""
    pairs = zip_longest(one[1], other[1], fillvalue=("nothing more", ""))
    here, there = next(pair for pair in pairs if ne(*(text for text, _ in pair)))
    (a, place), (b, other_place) = here, there
    return AgreementError(
        f"stage {json.loads(key)[0]} runs other programs on ranks {one[0]} and {other[0]}: the first"
        f" difference is {a}{place} on rank {one[0]}, {b}{other_place} on rank {other[0]}; give every rank"
        " that holds a stage the same function, the same loss and the same constants"
    )


def _written(call: SeenCall) -> tuple[str, str]:
    """Write a call with the bits of its constants."""
    bits = [f"{int(checksum(t)) % 2**64:016x}" for t in call.constants if not t.is_meta]
    return " ".join([call.text, *bits]), call.place
