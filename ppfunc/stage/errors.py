"""Name the stage, the reason and the mend where a stage cannot be served as it is written."""

from __future__ import annotations


class StageError(RuntimeError):
    """Raised for a stage that an engine cannot serve: which one, why, and the mend.

    Args:
        stage: name of the stage, such as ``"stage 3"``.
        reason: what is wrong, with what was got and what was expected.
        instead: what to use or change; empty where the error says enough.
    """

    def __init__(self, stage: str, reason: str, instead: str) -> None:
        super().__init__(f"{stage}: {reason}." + (f" Instead: {instead}." if instead else ""))
        self.stage, self.reason, self.instead = stage, reason, instead

    def __reduce__(self) -> tuple[type[StageError], tuple[str, str, str]]:
        return type(self), (self.stage, self.reason, self.instead)
