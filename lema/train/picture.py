"""A picture of curves as a PNG file (https://www.w3.org/TR/png-3), drawn without a library."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

__all__ = ["Curve", "drawn"]

Colour: TypeAlias = tuple[int, int, int]
Point: TypeAlias = tuple[float, float]

WIDTH = 960  # pixels
HEIGHT = 540
SAMPLES = 2  # in each direction, of which a pixel is the mean, so that lines are smooth
LEFT, RIGHT, TOP, BOTTOM = 90, 24, 56, 60  # pixels around the curves
INK: Colour = (40, 40, 40)
GRID: Colour = (225, 225, 225)
MARK: Colour = (150, 150, 150)

# The printable characters of ASCII from the space on: five columns each, a bit for each of eight
# rows, the lowest bit on top.
FONT = bytes.fromhex(
    "0000000000 00005f0000 0007000700 147f147f14 242a7f2a12 2313086462 3649562050 0008070300"
    "001c224100 0041221c00 2a1c7f1c2a 08083e0808 0080703000 0808080808 0000606000 2010080402"
    "3e5149453e 00427f4000 7249494946 2141494d33 1814127f10 2745454539 3c4a494931 4121110907"
    "3649494936 464949291e 0000140000 0040340000 0008142241 1414141414 0041221408 0201590906"
    "3e415d594e 7c1211127c 7f49494936 3e41414122 7f4141413e 7f49494941 7f09090901 3e41415173"
    "7f0808087f 00417f4100 2040413f01 7f08142241 7f40404040 7f021c027f 7f0408107f 3e4141413e"
    "7f09090906 3e4151215e 7f09192946 2649494932 03017f0103 3f4040403f 1f2040201f 3f4038403f"
    "6314081463 0304780403 6159494d43 007f414141 0204081020 004141417f 0402010204 4040404040"
    "0003070800 2054547840 7f28444438 3844444428 384444287f 3854545418 00087e0902 18a4a49c78"
    "7f08040478 00447d4000 2040403d00 7f10284400 00417f4000 7c04780478 7c08040478 3844444438"
    "fc18242418 18242418fc 7c08040408 4854545424 04043f4424 3c4040207c 1c2040201c 3c4030403c"
    "4428102844 4c9090907c 4464544c44 0008364100 0000770000 0041360800 0201020402"
)


@dataclass(frozen=True)
class Curve:
    """Points in the order of their steps; a value that is not finite leaves a gap."""

    name: str
    points: Sequence[Point]
    colour: Colour
    dots: bool = False


class _Canvas:
    """Pixels to draw on, each made of several samples."""

    def __init__(self) -> None:
        self._samples = np.full((HEIGHT * SAMPLES, WIDTH * SAMPLES, 3), 255, np.uint8)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        """Fill a rectangle; places are in pixels from the upper left."""
        left, top = (max(0, round(value * SAMPLES)) for value in (x, y))
        right = max(left + 1, round((x + width) * SAMPLES))
        bottom = max(top + 1, round((y + height) * SAMPLES))
        self._samples[top:bottom, left:right] = colour

    def line(self, start: Point, end: Point, colour: Colour, width: float = 1.6) -> None:
        """Draw a line between two places."""
        count = 1 + math.ceil(max(abs(end[0] - start[0]), abs(end[1] - start[1])) * SAMPLES)
        for x, y in zip(
            np.linspace(start[0], end[0], count), np.linspace(start[1], end[1], count), strict=True
        ):
            self.rectangle(x - width / 2, y - width / 2, width, width, colour)

    def text(self, x: float, y: float, text: str, size: int = 2) -> None:
        """Write a text from its upper left corner on, in pixels of `size`."""
        for character in text:
            code = ord(character) - 32
            glyph = FONT[5 * code : 5 * code + 5] if 0 <= code < len(FONT) // 5 else FONT[155:160]
            for column, bits in enumerate(glyph):
                for row in range(8):
                    if bits >> row & 1:
                        self.rectangle(x + column * size, y + row * size, size, size, INK)
            x += 6 * size

    def png(self) -> bytes:
        """Return the picture as a file's content: 8 bits each of red, green and blue."""
        shape = (HEIGHT, SAMPLES, WIDTH, SAMPLES, 3)
        pixels = self._samples.reshape(shape).mean(axis=(1, 3)).round().astype(np.uint8)
        # each row begins with the number of its filter: none
        rows = np.concatenate([np.zeros((HEIGHT, 1), np.uint8), pixels.reshape(HEIGHT, -1)], axis=1)
        header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
            for name, content in chunks
        )


def drawn(title: str, curves: Sequence[Curve], marks: Sequence[float] = ()) -> bytes:
    """Draw curves over steps.

    Args:
        title: above the curves; characters beyond ASCII are shown as ?.
        curves: what is drawn; at least one has a finite point.
        marks: steps that get a vertical line.

    Returns:
        The content of a PNG file.
    """
    points = [point for curve in curves for point in curve.points if math.isfinite(point[1])]
    first, last = _range([step for step, _ in points])
    low, high = _range([value for _, value in points])
    canvas = _Canvas()
    wide = WIDTH - LEFT - RIGHT
    tall = HEIGHT - TOP - BOTTOM

    def position_of(point: Point) -> Point:
        return (
            LEFT + wide * (point[0] - first) / (last - first),
            TOP + tall * (high - point[1]) / (high - low),
        )

    canvas.text(LEFT, 12, title[: wide // 12])
    for value in _ticks(low, high):
        y = position_of((first, value))[1]
        canvas.rectangle(LEFT, y, wide, 1, GRID)
        label = f"{value:.4g}"
        canvas.text(LEFT - 10 - 12 * len(label), y - 7, label)
    for step in _ticks(first, last):
        x = position_of((step, low))[0]
        canvas.rectangle(x, TOP, 1, tall, GRID)
        label = f"{step:.6g}"
        canvas.text(x - 6 * len(label), HEIGHT - BOTTOM + 8, label)
    canvas.text(LEFT + wide / 2 - 24, HEIGHT - 24, "step")
    for mark in marks:
        canvas.rectangle(position_of((mark, low))[0], TOP, 1.5, tall, MARK)
    x = float(LEFT)
    for curve in curves:
        for start, end in zip(curve.points, curve.points[1:], strict=False):
            if math.isfinite(start[1]) and math.isfinite(end[1]):
                canvas.line(position_of(start), position_of(end), curve.colour)
        for point in curve.points if curve.dots or len(curve.points) == 1 else ():
            if math.isfinite(point[1]):
                at = position_of(point)
                canvas.rectangle(at[0] - 3, at[1] - 3, 6, 6, curve.colour)
        canvas.rectangle(x, 38, 20, 4, curve.colour)
        canvas.text(x + 26, 33, curve.name)
        x += 50 + 12 * len(curve.name)
    return canvas.png()


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis, with a little room; never of length 0."""
    low = min(values)
    high = max(values)
    margin = 0.03 * (high - low) or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float, count: int = 6) -> Iterator[float]:
    """Yield round numbers between two ends, about so many."""
    exact = (high - low) / count
    power = 10 ** math.floor(math.log10(exact))
    distance = next(step * power for step in (1, 2, 5, 10) if step * power >= exact)
    number = math.ceil(low / distance)
    while number * distance <= high:
        yield number * distance
        number += 1
