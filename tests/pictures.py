"""What holds of every picture: words for it, texts that are inside and apart, a legend of what is drawn."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

SVG = "{http://www.w3.org/2000/svg}"
BACKGROUND = {"paper", "track", "level", "tick", "lead", "limit", "band"}  # which no legend explains


def require_legible(picture: str) -> ElementTree.Element:
    """Check the text of an SVG file, and return its root."""
    root = ElementTree.fromstring(picture)
    assert root.get("role") == "img"
    assert all(root.find(f"{SVG}{name}").text.strip() for name in ("title", "desc"))
    width, height = float(root.get("width")), float(root.get("height"))
    boxes = list(texts(root))
    for kind, told, left, top, right, bottom in boxes:
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, (kind, told, left, right)
    for one, other in combinations([box for box in boxes if box[0][0] != "n"], 2):
        assert not covers(one[2:], other[2:]), (one, other)
    entries = [g for g in root.iter(f"{SVG}g") if g.find(f"{SVG}text") is not None]
    in_legend = {kind for g in entries for kind in classes(g)} - {"point"}
    drawn = {kind for element in root if element not in entries for kind in classes(element)} - {"point"}
    assert in_legend == drawn - BACKGROUND, (in_legend, drawn)
    return root


def classes(element: ElementTree.Element) -> set[str]:
    """The classes of what is drawn there."""
    shapes = [f"{SVG}{name}" for name in ("rect", "line", "circle", "path")]
    drawn = [e for e in element.iter() if e.tag in shapes]
    return {kind for e in drawn for kind in e.get("class").split()}


def texts(root: ElementTree.Element):
    """Class, content and box of every text."""
    for parent in (root, *root.iter(f"{SVG}g")):
        x, y = map(float, re.findall(r"[\d.]+", parent.get("transform", "0 0"))[:2])
        for text in parent.findall(f"{SVG}text"):
            kind = text.get("class").split()
            size = 18 if "h" in kind else 11
            length = len(text.text) * size * (0.59 if "h" in kind else 0.52)
            left = x + float(text.get("x"))
            left -= length * (1 if "end" in kind else 0.5 if {"mid", "n"} & {*kind} else 0)
            line = y + float(text.get("y"))
            yield kind, text.text, left, line - 0.75 * size, left + length, line + 0.2 * size


def covers(one, other) -> bool:
    """Whether two boxes overlap."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
