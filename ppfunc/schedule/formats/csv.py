"""Write and read the CSV form of ``torch.distributed.pipelining``: one row per rank, one instruction per cell.

What torch has a token for comes out as torch's own file, compute only or with communication, and
torch's files are read, blanks included. Everything else is written in the same grammar (see
:mod:`ppfunc.schedule.formats.text`): ``0LOAD3 0OFFLOAD3 0FETCH3 0REDUCE_TIED 0STEP``, the peer of a skip
connection as ``>PEER`` and a slot as ``@SLOT``.

* A cell is a step of its own, as torch runs it: the cells of one step stand in its order.
* A blank is an idle step. Only a file of nothing but compute may have blanks.
* The rank of a stage is the row that computes it.
* Chains are those that the microbatches show. All stages work on all microbatches: one chain.
  Two chains, as in DualPipe, are stages ``0..p-1`` working on the first half of the microbatches and
  stages ``p..2p-1`` on the second half; k chains likewise, in k equal parts.
* Skip connections are the edges that messages with ``>PEER`` travel.
* The name is not in the file; a schedule that is read gets the name of its file.

torch divides the gradients by the number of microbatches where a ``REDUCE_GRAD`` stands, and nowhere
else: a file without that instruction gives it the sum over the microbatches.
"""

from __future__ import annotations

import csv
import io

from ..errors import ScheduleError
from ..instruction import COMMUNICATION, COMPUTE, Instruction, Op
from ..schedule import Schedule
from .infer import infer_layout
from .text import FormatError, parse_instruction

_Cells = list[Instruction | None]
_ONCE = COMPUTE | COMMUNICATION


def to_csv(schedule: Schedule) -> str:
    r"""Return the CSV text of ``schedule``: a row per rank, a cell per instruction.

    >>> from ppfunc.schedule.builders import gpipe
    >>> to_csv(gpipe(ranks=2, microbatches=2))
    '0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n'
    """
    idle = ("",) if schedule.ops <= COMPUTE else ()
    rows = (",".join([str(cell) for step in program for cell in step or idle]) for program in schedule.programs)
    return "".join(row + "\n" for row in rows)


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Read the schedule that the CSV ``text`` describes; it is not yet checked.

    >>> from_csv("0F0,0B0\\n1F0,1B0\\n").placement
    (0, 1)
    >>> from_csv("0F0,0B0\\n1F0,1B0junk\\n")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ppfunc.schedule.formats.text.FormatError: row 2 (rank 1), column 2: '1B0junk' is not an instruction: ...

    Args:
        text: the content of a file.
        name: the name of the schedule.

    Raises:
        FormatError: a cell that is not an instruction, with row and column (both from 1).
        ScheduleError: the numbers of stages and microbatches cannot be those of any schedule.
    """
    rows = _rows(text)
    if not rows:
        raise FormatError("the text is empty: expected one row of instructions per rank")
    ops = {i.op for row in rows for i in row if i is not None}
    if not ops <= COMPUTE:
        _refuse_blanks(rows, min(op.value for op in ops - COMPUTE))
    placement, chains = infer_layout(rows)
    programs = tuple(tuple(() if i is None else (i,) for i in row) for row in rows)
    return Schedule(name, placement, chains, programs, _skips(rows, len(placement)))


def _rows(text: str) -> list[_Cells]:
    """The instructions of every row, None for a blank."""
    rows: list[_Cells] = []
    seen: set[str] = set()
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise FormatError(f"row {len(rows) + 1} (rank {len(rows)}): not CSV: {error}") from None
        if cells is None:
            return rows
        if not any(cells):
            raise ScheduleError(len(rows), (0, 0), None, "its row is empty: expected at least one stage in every row")
        row: _Cells = []
        rows.append(row)
        for cell in cells:
            instruction = _cell(cell, rows) if cell else None
            # Told here, and not by the proof, so that a file of nothing else takes no time.
            if instruction is not None and cell in seen and instruction.op in _ONCE:
                raise ScheduleError(len(rows) - 1, (len(row), 0), instruction, _first(rows, instruction))
            seen.add(cell)
            row.append(instruction)


def _cell(cell: str, rows: list[_Cells]) -> Instruction:
    try:
        return parse_instruction(cell)
    except FormatError as error:
        raise FormatError(f"row {len(rows)} (rank {len(rows) - 1}), column {len(rows[-1]) + 1}: {error}") from None


def _first(rows: list[_Cells], instruction: Instruction) -> str:
    rank = next(rank for rank, row in enumerate(rows) if instruction in row)
    return f"it is there twice, first on rank {rank}, step {rows[rank].index(instruction)}"


def _refuse_blanks(rows: list[_Cells], token: str) -> None:
    for rank, row in enumerate(rows):
        if None in row:
            place = f"row {rank + 1} (rank {rank}), column {row.index(None) + 1}"
            raise FormatError(f"{place}: a blank, but only files of nothing but compute may have blanks: this has {token}")


def _skips(rows: list[_Cells], stages: int) -> tuple[tuple[int, int], ...]:
    """The edges of messages that name their peer, each from its source stage."""
    edges = set()
    for rank, row in enumerate(rows):
        for position, i in enumerate(row):
            if i is not None and i.peer is not None:
                if max(i.stage, i.peer) >= stages:
                    reason = f"there are only {stages} stages: expected a peer from 0 to {stages - 1}"
                    raise ScheduleError(rank, (position, 0), i, reason)
                edges.add((i.stage, i.peer) if i.op in (Op.SEND_F, Op.RECV_B) else (i.peer, i.stage))
    return tuple(sorted(edges))
