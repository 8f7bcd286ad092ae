"""Run the command ``ppfunc`` as ``python -m ppfunc``."""

import sys

from ppfunc.cli import main

sys.exit(main())
