"""Write and read schedules as text and pictures: CSV, JSON, grid, instruction streams, SVG, Chrome trace."""

from .compute_only import compute_only
from .csv import from_csv, to_csv
from .files import read_csv, read_schedule, write_csv
from .grid import to_grid
from .json import from_json, to_json
from .steps import to_steps
from .svg import to_svg
from .text import FormatError, parse_instruction
from .trace import to_trace

__all__ = [
    "FormatError",
    "compute_only",
    "from_csv",
    "from_json",
    "parse_instruction",
    "read_csv",
    "read_schedule",
    "to_csv",
    "to_grid",
    "to_json",
    "to_steps",
    "to_svg",
    "to_trace",
    "write_csv",
]
