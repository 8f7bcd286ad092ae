"""Run the command ``ppfunc`` as ``python -m ppfunc``."""

import sys

from .cli import main

sys.exit(main())
