"""Write programs as tables, which ``native.cpp`` runs: the same operators in the same order as in Python."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import Node

from ..._torch import OpOverload, schema
from ...errors import TRACED_LINES
from .cut import Block
from .fast_dispatch import RECORDING
from .graph import arguments, is_element, is_mutable

NONE = -1
"""Stands for the slot of a value that nothing reads."""


def table(
    block: Block, names: tuple[str, ...], title: str, settle: tuple[str, ...]
) -> tuple[Any, ...] | None:
    """Write the table of a program.

    Args:
        block: its part of a trace.
        names: of its arguments; ``into`` is no tuple of tensors, but what gradients are added to.
        title: ends with its name.
        settle: names of the arguments whose tensors may come with any strides.

    Returns:
        The arguments of ``make`` of ``native.cpp``; None for a program that calls more than plain operators.
    """
    body = [n for n in block.body if not is_element(n)]
    if not all(map(_is_plain, body)):
        return None
    slots = _Slots(block, body)
    given = [
        ([slots.of(n) for n in row], name in settle)
        for name, row in zip(names, block.arguments, strict=True)
        if name != "into"
    ]
    calls = [slots.call(node) for node in body]
    results = [[NONE if n is None else slots.of(n) for n in row] for row in block.results]
    places = {
        line: place.removeprefix(", called at ")
        for line, node in enumerate(body, 1)
        if (place := node.meta.get("place"))
    }
    sums = len(given) if "into" in names else NONE
    described = f"<{title}>", title.split()[-1], {TRACED_LINES: places}
    return *described, len(slots.numbers), slots.constants, given, sums, calls, results


def _is_plain(node: Node) -> bool:
    if node.op == "call_method":  # it adds gradients up
        return True
    return isinstance(node.target, OpOverload) and node.target is not RECORDING and not is_mutable(node)


class _Slots:
    """Gives each value that is read a slot, and describes calls by slots."""

    def __init__(self, block: Block, body: list[Node]) -> None:
        self.numbers: dict[Node, int] = {}
        self.constants: list[tuple[int, torch.Tensor]] = []
        self._last: dict[Node, Node | None] = {a: n for n in body for a in n.all_input_nodes}
        self._last |= dict.fromkeys(n for row in block.results for n in row if n is not None)

    def of(self, node: Node) -> int:
        if node not in self._last:
            return NONE
        if node not in self.numbers:
            self.numbers[node] = len(self.numbers)
            if node.op == "get_attr":
                self.constants.append((self.numbers[node], node.meta["constant"]))
        return self.numbers[node]

    def call(self, node: Node) -> tuple[Any, ...]:
        """Describe a call: operator, operands, slots of results, whether they are one list, what ends."""
        ended = [n for n in node.all_input_nodes if self._last[n] is node and n.op != "get_attr"]
        if node.op == "call_method":
            _, gradients, numbers, _ = arguments(node)
            dead = [self.numbers[n] for n in ended if n in self.numbers]
            return None, ([self.of(n) for n in gradients], (numbers,)), [], False, dead
        operator = schema(node.target)
        given = dict(zip((a.name for a in operator.arguments), node.args, strict=False)) | node.kwargs
        uses = Counter(id(value) for value in given.values())
        taken = {n for n in ended if uses[id(n)] == 1 and not _is_listed(n, given)}
        operands = tuple(
            self._operand(given[a.name], taken) if a.name in given else ("default",)
            for a in operator.arguments
        )
        dead = [self.of(n) for n in ended if n not in taken]
        one_list = len(operator.returns) == 1 and isinstance(node.meta["val"], list | tuple)
        return (operator.name, operator.overload_name), operands, self._results(node), one_list, dead

    def _operand(self, value: Any, taken: set[Node]) -> tuple[Any, ...]:
        if isinstance(value, Node):
            return "slot", self.of(value), value in taken
        if isinstance(value, list | tuple) and any(isinstance(v, Node) for v in value):
            return "slots", [NONE if v is None else self.of(v) for v in value]
        return "constant", value

    def _results(self, node: Node) -> list[int]:
        if "results" not in node.meta:
            return [self.of(node)]
        elements = {n.args[1]: n for n in node.users if is_element(n)}
        return [self.of(elements[i]) if i in elements else NONE for i in range(node.meta["results"])]


def _is_listed(node: Node, given: dict[str, Any]) -> bool:
    return any(isinstance(value, list | tuple) and node in value for value in given.values())
