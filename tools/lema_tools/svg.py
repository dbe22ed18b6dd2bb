"""Charts as inline SVG and HTML: curves, stacked bars, a timeline. Every text that is given is
escaped.

Sizes are those of the drawing, which the page scales; colours are numbers, which the page has
styles for.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lema_tools.page import escape

__all__ = ["Bar", "Series", "Span", "bars", "chart", "columns", "legend", "number", "timeline"]

WIDTH = 560
HEIGHT = 250
LEFT = 58
RIGHT = 12
TOP = 12
BOTTOM = 30
MOST = 500  # points of a curve; of more, means are drawn
COLOURS = 10  # that the page has


@dataclass(frozen=True)
class Series:
    """A curve: numbers over steps."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    style: str = "line"  # or `faint`, or `dots`


@dataclass(frozen=True)
class Span:
    """Something that took from `begin` to `end`, in seconds."""

    track: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Bar:
    """A bar of parts side by side, with a mark where something was measured."""

    parts: Mapping[str, float]
    colours: Mapping[str, int]
    mark: float | None = None


def number(value: float) -> str:
    """Write a number as an axis does: `0.0012`, `3.4`, `12k`, `1e-06`."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if unit <= size < 1e15:
                return f"{value / unit:.4g}{letter}"
        return f"{value:.3g}"
    return f"{value:.4g}"


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    if raw < sys.float_info.min:
        return [low]
    unit = 10 ** math.floor(math.log10(raw))
    step = unit * next((factor for factor in (1, 2, 5, 10) if factor * unit >= raw), 10)
    first = math.ceil(low / step - 1e-9)
    return [
        at * step for at in range(first, first + 2 * count + 2) if at * step <= high + 1e-9 * step
    ]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MOST:
        return list(points)
    size = math.ceil(len(points) / MOST)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def chart(
    title: str,
    series: Sequence[Series],
    *,
    marks: Sequence[tuple[float, str]] = (),
    from_zero: bool = False,
) -> str:
    """Return a figure of curves over steps, with vertical `marks`. What is not finite leaves a gap,
    and is counted below; where there is nothing to draw, the figure says so."""
    finite = [point for curve in series for point in curve.points if math.isfinite(point[1])]
    lost = sum(len(curve.points) for curve in series) - len(finite)
    note = f'<p class="note">{lost:,} points are not finite.</p>' if lost else ""
    names = {curve.name: curve.colour for curve in series if curve.points and curve.name != title}
    head = f"<figure><figcaption>{escape(title)}{legend(names)}"
    if not finite:
        return f'{head}</figcaption><p class="none">Nothing was measured.</p>{note}</figure>'
    first = min(x for x, _ in finite)
    last = max(x for x, _ in finite)
    low = min(y for _, y in finite)
    high = max(y for _, y in finite)
    low = min(0.0, low) if from_zero else low
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    low = low if from_zero else low - margin
    high = high + margin
    wide = WIDTH - LEFT - RIGHT
    tall = HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = 0.5 if last == first else (x - first) / (last - first)
        return LEFT + wide * across, TOP + tall * (high - y) / (high - low)

    drawn = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over steps"'
    ]
    data_points = {
        curve.name: [[x, round(at(x, y)[0], 1), number(y)] for x, y in _thinned(curve.points)]
        for curve in series
    }
    drawn.append(f' data-points="{escape(json.dumps(data_points), quote=True)}">')
    for value in _ticks(low, high):
        y = at(first, value)[1]
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(
            f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{number(value)}</text>'
        )
    for value in _ticks(first, last, 5):
        drawn.append(
            f'<text class="tick mid" x="{at(value, low)[0]:.1f}" '
            f'y="{HEIGHT - 8}">{number(value)}</text>'
        )
    for step, name in marks:
        x = at(step, low)[0]
        if x > LEFT + 20:  # the first is where the axis is
            drawn.append(f'<path class="mark" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        drawn.append(f'<text class="tick" x="{x + 5:.1f}" y="{TOP + 4}">{escape(name)}</text>')
    for curve in series:
        drawn += _drawn(curve, at)
    return f'{head}</figcaption>{"".join(drawn)}<g class="cursor"></g></svg>{note}</figure>'


def _drawn(series: Series, at: object) -> Iterable[str]:
    position = at
    assert callable(position)
    points = _thinned(series.points)
    if series.style == "dots":
        for x, y in points:
            if math.isfinite(y):
                cx, cy = position(x, y)
                yield f'<circle class="c{series.colour}" cx="{cx:.1f}" cy="{cy:.1f}" r="3.5"/>'
    path = ""
    pen = "M"
    for x, y in points:
        if math.isfinite(y):
            cx, cy = position(x, y)
            path = f"{path}{pen}{cx:.1f} {cy:.1f}"
            pen = "L"
        else:
            pen = "M"
    yield f'<path class="curve {series.style} c{series.colour}" d="{path}"/>'


def legend(names: Mapping[str, int], values: Mapping[str, str] | None = None) -> str:
    """Return names beside their colours: in a line, or below each other with a value each where
    `values` are given.
    """
    items = []
    for name, colour in names.items():
        value = f"<b>{escape(values[name])}</b>" if values else ""
        items.append(f'<span><i class="b{colour % COLOURS}"></i>{escape(name)}{value}</span>')
    return f'<span class="legend{" parts" if values else ""}">{"".join(items)}</span>'


def bars(bar: Bar, values: Mapping[str, str], *, mark: str = "", note: str = "") -> str:
    """Return one bar, with its parts and their `values` below; `mark` is said at the mark,
    `note` at the end.
    """
    total = max(sum(bar.parts.values()), bar.mark or 0.0) or 1.0
    cells = []
    for name, size in bar.parts.items():
        tooltip = escape(f"{name}: {values[name]}")
        style = f"width:{100 * size / total:.3f}%"
        cells.append(
            f'<i class="b{bar.colours[name] % COLOURS}" style="{style}" title="{tooltip}"></i>'
        )
    marked = ""
    if bar.mark is not None:
        marked = (
            '<div class="measured" '
            f'style="width:{100 * bar.mark / total:.3f}%"><span>{escape(mark)}</span></div>'
        )
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    colours = {name: bar.colours[name] for name in bar.parts}
    return f'<div class="bar">{"".join(cells)}</div>{marked}{legend(colours, values)}{below}'


def columns(
    title: str, parts: Sequence[tuple[float, Mapping[str, float]]], colours: Mapping[str, int]
) -> str:
    """Return a figure of stacked columns over steps, of the `parts` of each that have `colours`."""
    head = f"<figure><figcaption>{escape(title)}{legend(colours)}</figcaption>"
    if not parts:
        return f'{head}<p class="none">Nothing was measured.</p></figure>'
    size = math.ceil(len(parts) / 60)
    groups = [parts[at : at + size] for at in range(0, len(parts), size)]
    stacked = [
        (
            group[-1][0],
            {name: sum(amounts[name] for _, amounts in group) / len(group) for name in colours},
        )
        for group in groups
    ]
    high = 1.06 * max(sum(column.values()) for _, column in stacked) or 1.0
    tall = HEIGHT - TOP - BOTTOM
    column_width = (WIDTH - LEFT - RIGHT) / len(stacked)
    drawn = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for value in _ticks(0.0, high):
        y = TOP + tall * (1 - value / high)
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(
            f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{number(value)}</text>'
        )
    for at, (step, column) in enumerate(stacked):
        y = float(HEIGHT - BOTTOM)
        x = LEFT + at * column_width
        for name, value in column.items():
            height = tall * value / high
            y -= height
            tooltip = escape(f"step {number(step)}: {name} {value:.3g} s")
            geometry = (
                f'x="{x + 0.06 * column_width:.1f}" y="{y:.2f}" '
                f'width="{0.88 * column_width:.2f}" height="{height:.2f}"'
            )
            drawn.append(
                f'<rect class="f{colours[name] % COLOURS}" '
                f"{geometry}><title>{tooltip}</title></rect>"
            )
        if at % max(1, len(stacked) // 5) == 0:
            drawn.append(
                f'<text class="tick mid" x="{x + column_width / 2:.1f}" '
                f'y="{HEIGHT - 8}">{number(step)}</text>'
            )
    return f"{head}{''.join(drawn)}</svg></figure>"


def timeline(spans: Sequence[Span], tracks: Mapping[str, int]) -> str:
    """Return rows of what happened when, one for each track with its colour; a pointer tells
    name and length.
    """
    begin = min(span.begin for span in spans)
    end = max(span.end for span in spans)
    left = 150
    wide = 1000 - 150 - 30
    row = 26
    height = row * len(tracks) + 30
    scale = wide / ((end - begin) or 1.0)
    drawn = [f'<svg viewBox="0 0 1000 {height}" role="img" aria-label="timeline of a step">']
    for at, track in enumerate(tracks):
        y = at * row
        drawn.append(f'<path class="grid" d="M{left} {y + row - 1}H970"/>')
        drawn.append(f'<text class="track end" x="{left - 8}" y="{y + 17}">{escape(track)}</text>')
    for value in _ticks(0.0, 1000 * (end - begin), 8):
        x = left + value / 1000 * scale
        drawn.append(f'<path class="grid" d="M{x:.1f} 0V{row * len(tracks)}"/>')
        drawn.append(
            f'<text class="track mid" x="{x:.1f}" y="{height - 10}">{number(value)} ms</text>'
        )
    index_by_track = {track: at for at, track in enumerate(tracks)}
    for span in spans:
        at = index_by_track[span.track]
        x = left + (span.begin - begin) * scale
        width = max(0.6, (span.end - span.begin) * scale)
        tooltip = escape(f"{span.track}: {span.name}, {1000 * (span.end - span.begin):.3g} ms")
        geometry = f'x="{x:.2f}" y="{at * row + 4}" width="{width:.2f}" height="{row - 9}"'
        drawn.append(
            f'<rect class="f{tracks[span.track]}" rx="1.5" '
            f"{geometry}><title>{tooltip}</title></rect>"
        )
    return f'<div class="wide">{"".join(drawn)}</svg></div>'
