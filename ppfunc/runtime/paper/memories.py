"""Show the bytes that every rank holds over a step, as a table and as a picture."""

from collections.abc import Iterable, Iterator, Sequence

from ppfunc._checks import show_table, table
from ppfunc.schedule import Costs, Schedule, Timeline, simulate
from ppfunc.schedule.formats.svg import amount, clipped, legend, line, number, page, rect, short, text, ticks
from ppfunc.schedule.instruction import KINDS, Unit
from ppfunc.schedule.proof.timeline import Time

from .ledger import Allocation, Bytes, Memory, Moment

_BANDS = {  # of a lane, upwards; each ends with a field of Bytes
    "batch": "parameters, optimizer, batch",
    "gradients": "gradients",
    "residuals": "residuals",
    "updated": "messages, results",
}
_ENDS = [Bytes._fields.index(kind) + 1 for kind in _BANDS]
_NAMES, _LEFT, _ACROSS, _LANE, _APART = 76.0, 128.0, 672.0, 48.0, 16.0  # pixels
_MOST = 2000  # instructions of a picture, of some 120 bytes each
_STYLE = """
.batch { fill: #b4bdcc } .gradients { fill: #23906c } .residuals { fill: #3f72d0 } .updated { fill: #e5a62f }
.most { fill: #cdb5ea } .band { pointer-events: none }"""
_DARK = """
.batch { fill: #566277 } .updated { fill: #e5ad42 } .most { fill: #6a5486 }"""


class Memories(dict[int, Memory]):
    """Maps ranks to the memory that they hold; a line for each rank as text, a lane for each as a picture.

    Args:
        memories: pairs of a rank and its memory.
        schedule: schedule of the step.
    """

    def __init__(self, memories: Iterable[tuple[int, Memory]], schedule: Schedule) -> None:
        super().__init__(memories)
        self.schedule = schedule

    def __repr__(self) -> str:
        """Write of every rank its peak, where that is, the kind with most of it, and the largest tensor."""
        rows = []
        for rank, memory in self.items():
            kind, size = max(memory.held._asdict().items(), key=lambda item: item[1])
            tensor = memory.largest[0] if memory.largest else Allocation(0, "", None, "", "")
            rows.append(
                [
                    rank,
                    amount(memory.peak, "B"),
                    str(memory.at or "the end"),
                    f"{kind} {amount(size, 'B')}",
                    " ".join(filter(None, (tensor.name, tensor.line, amount(tensor.size, "B")))),
                ]
            )
        return table(["rank", "peak", "in", "most of it", "largest tensor"], rows)

    _repr_pretty_ = show_table

    def to_svg(self) -> str:
        """Draw the bytes of every rank over the step as an SVG file: a lane per rank, time to the right.

        A lane is filled, by kind, with the bytes that are held once an instruction has run, and above them
        with the most while it runs. Communication counts in the next instruction that takes time.
        """
        timeline, most = simulate(self.schedule, Costs(step=1)), max(m.peak for m in self.values())
        wide, high = _ACROSS / float(timeline.makespan), _LANE / (most or 1)
        peaks = {rank: f"{amount(m.peak, 'B')} in {m.at or 'the end'}" for rank, m in self.items()}
        width = _LEFT + _ACROSS + 20 + 6 * max(map(len, peaks.values()))
        bands = [
            (kind, end) for kind, start, end in zip(_BANDS, [0, *_ENDS], _ENDS, strict=False)
            if any(sum(memory.most[start:end]) for memory in self.values())
        ]  # fmt: skip
        words = {kind: _BANDS[kind] for kind, _ in bands} | {"most": "only while an instruction runs"}
        signs = [(rect(kind, 0, 0, 14, 14), 14.0, label) for kind, label in words.items()]
        entries, y = legend(signs, width, 72)
        title, right = f"{clipped(self.schedule.name, 40)}: bytes on paper", _LEFT + _ACROSS
        time = "time is simulated: F, I, W and STEP take 1 each; at the right, the peaks"
        elements = [text("ink h", _NAMES, 34, title), text("soft", _NAMES, 56, time), *entries]
        for rank, memory in self.items():
            y += _LANE + _APART
            levels = [(size, y - size * high) for size in ticks(0, most, _LANE, 20)]
            elements += [
                *(line(_LEFT, level, right, level) for _, level in levels),
                *(text("soft end", _LEFT - 8, level + 4, amount(size, "B")) for size, level in levels),
                f'<g transform="translate({_LEFT} {number(y)}) scale({wide:.6g} -1)">',
                *_lane(memory, timeline, rank, high, bands),
                "</g>",
                text("ink end", _NAMES - 10, y - _LANE / 2 + 4, f"rank {rank}"),
                text("ink", right + 10, y - _LANE / 2 + 4, peaks[rank]),
            ]
        for at in ticks(0, float(timeline.makespan), _ACROSS):
            x = _LEFT + at * wide
            elements += [line(x, y, x, y + 5), text("soft mid", x, y + 18, short(at))]
        spoken = "; ".join(f"rank {rank}: {peak}" for rank, peak in peaks.items())
        told = f"A lane per rank, time to the right. Peaks: {spoken}."
        return page(title, told, width, y + 30, _STYLE, _DARK, elements)

    def _repr_svg_(self) -> str | None:
        return self.to_svg() if sum(len(m.moments) for m in self.values()) <= _MOST else None


def _lane(
    memory: Memory, timeline: Timeline, rank: int, high: float, bands: Sequence[tuple[str, int]]
) -> Iterator[str]:
    """Draw the most bytes while each instruction runs, and before them the bytes that are held then."""
    starts, ends = timeline.starts[rank], timeline.ends[rank]
    held, since, now = list[tuple[Time, Bytes]](), list[Moment](), 0
    for moment, start, end in zip(memory.moments, starts, ends, strict=True):
        since.append(moment)
        if busy := KINDS[moment.instruction.op].unit is Unit.RANK:
            full, now, since = max(since, key=lambda moment: moment.most), end, []
            told = f"{amount(full.most, 'B')} in {full.instruction}, {amount(sum(moment.after), 'B')} then"
            yield rect("most", start, 0, end - start, full.most * high, inside=f"<title>{told}</title>")
        held.append((start if busy else now, moment.after))
    for kind, end in reversed(bands):
        steps = "".join(f"H{number(time)}V{number(sum(after[:end]) * high)}" for time, after in held)
        yield f'<path class="{kind} band" d="M0 0{steps}H{number(timeline.makespan)}V0Z"/>'
