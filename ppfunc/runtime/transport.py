"""What the interpreter asks of a transport: to carry named tuples of tensors between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from ppfunc.schedule import Instruction
from ppfunc.stage import LeafSignature

Thunk = Callable[[], None]


class Tag(NamedTuple):
    """The name of a message, the same at both ends.

    Args:
        direction: ``"F"`` for activations, ``"B"`` for their gradients, ``"R"`` for parameter gradients of copies.
        source: the stage that produces it, -1 for the batch.
        destination: the stage that consumes it.
        microbatch: the microbatch, -1 where it belongs to the whole stage.
    """

    direction: str
    source: int
    destination: int
    microbatch: int


Values = dict[Tag, tuple[torch.Tensor, ...]]


class Route(NamedTuple):
    """Messages of one kind from one rank to another.

    Args:
        direction: as in :class:`Tag`.
        sender, receiver: two ranks.
    """

    direction: str
    sender: int
    receiver: int

    @property
    def ranks(self) -> tuple[int, int]:
        """Both ends."""
        return self.sender, self.receiver


class Transfer(NamedTuple):
    """One end of one message.

    Args:
        outgoing: whether this is the sending end.
        tag: the name of the message; the tensors are taken from, or put into, ``values[tag]``.
        peer: the rank at the other end.
        leaves: shape and dtype of each tensor, agreed at both ends before data moves.
        device: where received tensors are to live.
    """

    outgoing: bool
    tag: Tag
    peer: int
    leaves: tuple[LeafSignature, ...]
    device: torch.device


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


class Failure(NamedTuple):
    """Where a rank was when it failed: its step and instruction are None outside the program.

    ``context`` says more about the instruction, such as what its stage was given.
    """

    rank: int
    position: int | None
    instruction: Instruction | None
    cause: BaseException
    context: str = ""

    @property
    def reason(self) -> str:
        """One line: the type of the exception, its message, and the context."""
        try:
            message = str(self.cause)
        except Exception:
            message = "(its message cannot be had)"
        return f"{type(self.cause).__name__}: {message}{self.context}"


class Transport(Protocol):
    """Carries messages between the ranks of one pipeline.

    ``post``, ``arrive`` and ``release`` are called once, when a program is bound, and return
    what is to run at that place in every step, or None where nothing has to be done there.
    The other methods act at once.

    ``generation`` counts the failures: what was agreed before one has to be agreed again.
    """

    generation: int

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        """The ranks that live in this process, of a pipeline of ``ranks``; ValueError where the number does not fit."""

    def connect(self, routes: Iterable[Route]) -> None:
        """Open what messages need on these routes; every process names the same ones."""

    def enroll(self) -> int:
        """The number of one more step function, the same on all ranks, which make theirs in the same order."""

    def share(self, text: str) -> list[str]:
        """The text of every process."""

    def begin(self, call: str, key: str | None) -> str:
        """Begin a step: the first rank's key is passed on and returned.

        AgreementError where a rank makes another call, or has another key; None stands for no opinion.
        """

    def end(self) -> None:
        """End a step: returns once every rank has come to its end, so that a step fails on all ranks or on none."""

    def tell(self, rank: int, peer: int, text: str) -> None:
        """Send a text from ``rank`` to ``peer``, without waiting for it; all are heard before the next ``share``."""

    def hear(self, rank: int, peer: int) -> str:
        """Receive the next text that ``peer`` sent to ``rank``."""

    def post(self, rank: int, batch: Sequence[Transfer], values: Values) -> Thunk | None:
        """Post the messages of one step as one batch, in the order given."""

    def arrive(self, rank: int, transfer: Transfer, values: Values) -> Thunk | None:
        """Wait until a posted receive is in ``values``."""

    def release(self, rank: int, transfer: Transfer, values: Values) -> Thunk | None:
        """Wait until a posted send no longer needs its tensors, and let go of them."""

    def spread(self, owner: int, tensors: tuple[torch.Tensor, ...], leaves: tuple[LeafSignature, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
        """The tensors of rank ``owner``, on every rank; ``tensors`` is read where ``owner`` lives."""

    def fail(self, failure: Failure) -> BaseException:
        """Tell the peers, tear down what they may be waiting on, and return the error to raise here."""
