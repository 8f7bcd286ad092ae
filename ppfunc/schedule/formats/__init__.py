
from .csv import from_csv, to_csv
from .files import read_csv, read_schedule, write_csv
from .json import from_json, to_json
from .steps import to_steps
from .text import FormatError, parse_instruction

__all__ = [
    "FormatError",
    "from_csv",
    "from_json",
    "parse_instruction",
    "read_csv",
    "read_schedule",
    "to_csv",
    "to_json",
    "to_steps",
    "write_csv",
]
