"""The builders whose microbatches are whole: stages that know no carry run all of their schedules."""

from __future__ import annotations

import inspect

from ppfunc.schedule import BUILDERS as ALL

BUILDERS = {name: build for name, build in ALL.items() if "slices" not in inspect.signature(build).parameters}
