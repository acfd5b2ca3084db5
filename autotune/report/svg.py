"""Small pictures as SVG text. Colours are CSS classes, so that a page can have a dark and a light theme."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np


def element(name: str, content: str = "", **attributes: object) -> str:
    """One SVG element; `_` in attribute names stands for `-`, and `class_` for `class`."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_number(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{text}>{content}</{name}>" if content else f"<{name}{text}/>"


def text(x: float, y: float, content: str, class_: str = "label", anchor: str = "start") -> str:
    """A line of text at (x, y)."""
    return element("text", html.escape(content), x=x, y=y, class_=class_, text_anchor=anchor)


def title(content: str) -> str:
    """What a browser shows when the pointer rests on the element around it."""
    return f"<title>{html.escape(content)}</title>"


def picture(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """A picture that scales with the page; `label` says what it shows."""
    return element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


def area(values: np.ndarray, x: float, y: float, width: float, height: float, class_: str, name: str) -> str:
    """A filled curve of shares from 0 to 1 in a box; `y` is its bottom."""
    step = width / len(values)
    points = [(x, y)]
    for number, value in enumerate(np.clip(values, 0.0, 1.0)):
        top = y - float(value) * height
        points += [(x + number * step, top), (x + (number + 1) * step, top)]
    points.append((x + width, y))
    path = " ".join(f"{_number(a)},{_number(b)}" for a, b in points)
    return element("polygon", title(name), points=path, class_=class_)


def bar(x: float, y: float, width: float, height: float, class_: str, name: str) -> str:
    """A rectangle with a name; never so narrow that it cannot be seen."""
    return element(
        "rect",
        title(name),
        x=x,
        y=y,
        width=max(width, 0.6),
        height=height,
        class_=class_,
        rx=min(2.0, height / 4),
    )


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between `low` and `high`."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
    first = math.ceil(low / step) * step
    return [first + step * n for n in range(int((high - first) / step + 1e-9) + 1)]


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
