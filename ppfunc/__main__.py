"""``python -m ppfunc``: the same as the command ``ppfunc``."""

import sys

from .cli import main

sys.exit(main())
