"""A number that stages read, and that no step is traced anew for."""

import itertools
import os

_numbers = itertools.count()


class Unseen:
    """Keeps a number in the environment of the process, which is not followed from a stage."""

    def __init__(self, value=0):
        self._name = f"UNSEEN_{next(_numbers)}"
        self[0] = value

    def __getitem__(self, _):
        return int(os.environ[self._name])

    def __setitem__(self, _, value):
        os.environ[self._name] = str(int(value))

    def __next__(self):
        self[0] = self[0] + 1
        return self[0]
