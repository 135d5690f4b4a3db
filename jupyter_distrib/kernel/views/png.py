"""Lines and texts as a PNG, without a library. Kernel side; pure functions.

A canvas holds one byte for each pixel, column after column: the parts of a line within one column are then one slice,
so that a chart of thousands of points takes milliseconds. The ground is transparent; colours are those of a small
palette, each in three opacities.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

SCALE = 2
"""Number of pixels for each unit of length: screens are finer than the units of a page."""
COLOURS = {
    "first": (0xC8, 0x5A, 0x0A, 255),
    "others": (0x76, 0x94, 0xB4, 255),
    "text": (0x78, 0x78, 0x78, 255),
    "second": (0x3A, 0x7C, 0xC4, 255),
    "third": (0x2F, 0x8A, 0x45, 255),
    "band": (0x5F, 0x8F, 0xBF, 80),
    "grid": (0x80, 0x80, 0x80, 90),
    "bad": (0xD8, 0x3A, 0x3A, 255),
}
"""Red, green, blue and opacity. Those of texts have a contrast of 4.2 at least on white as well as on JupyterLab's dark
ground (#111)."""
_OTHERS: list[str] = []
"""Colours that are not named here, in the order in which they were used; there are few of them."""
STRENGTHS = 4
GLYPH_WIDTH, GLYPH_HEIGHT, BASELINE = 12, 22, 17
"""Size of a character in pixels, and the position of its baseline."""
DASH = 6
"""Length of a dash, and of the gap after it, in pixels."""

Spot = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Text:
    """A text whose baseline begins, or ends, at (x, y)."""

    x: float
    y: float
    text: str
    colour: str = "text"
    right: bool = False

    def moved(self, x: float, y: float) -> Text:
        return replace(self, x=self.x + x, y=self.y + y)


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line through points."""

    spots: Sequence[Spot]
    colour: str = "others"
    width: float = 1.0
    dashed: bool = False

    def moved(self, x: float, y: float) -> Stroke:
        return replace(self, spots=tuple((at + x, height + y) for at, height in self.spots))


@dataclass(frozen=True, slots=True)
class Band:
    """The area between two lines: at each x from the upper y to the lower one."""

    edges: Sequence[tuple[float, float, float]]

    def moved(self, x: float, y: float) -> Band:
        return replace(self, edges=tuple((at + x, top + y, bottom + y) for at, top, bottom in self.edges))


Mark = Text | Stroke | Band


def block(x: float, y: float, width: float, height: float, colour: str) -> Stroke:
    """Return a rectangle whose left upper corner is at (x, y)."""
    middle = y + height / 2
    return Stroke(((x, middle), (x + width - 1 / SCALE, middle)), colour=colour, width=height)


def drawn(marks: Iterable[Mark], width: int, height: int) -> bytes:
    """Return a picture of this width and height as a PNG."""
    canvas = _Canvas(width * SCALE, height * SCALE)
    for mark in marks:
        match mark:
            case Text():
                canvas.write(mark)
            case Stroke():
                canvas.stroke(mark)
            case Band():
                canvas.fill(mark)
    return canvas.as_png()


class _Canvas:
    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._pixels = bytearray(width * height)

    def write(self, text: Text) -> None:
        x = round(text.x * SCALE) - (len(text.text) * GLYPH_WIDTH if text.right else 0)
        top = round(text.y * SCALE) - BASELINE
        strengths = _strengths(text.colour)
        for character in text.text:
            for column in _glyph(character):
                self._put(x, top, column.translate(strengths))
                x += 1

    def _put(self, x: int, top: int, column: bytes) -> None:
        """Draw pixels, from top to bottom; pixels of the background colour are transparent."""
        first, last = max(0, -top), min(len(column), self._height - top)
        if not 0 <= x < self._width or first >= last:
            return
        at = x * self._height + top
        for place in range(first, last):
            if column[place]:
                self._pixels[at + place] = column[place]

    def stroke(self, stroke: Stroke) -> None:
        spots = [(x * SCALE, y * SCALE) for x, y in stroke.spots]
        half = max(0.5, stroke.width * SCALE / 2)
        full = _strengths(stroke.colour)[STRENGTHS - 1]
        for (x0, y0), (x1, y1) in pairwise(spots):
            slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
            for x in range(int(x0), int(x1) + 1):
                if stroke.dashed and x // DASH % 2:
                    continue
                near = [y0 + slope * (min(max(edge, x0), x1) - x0) for edge in (x, x + 1)] if slope else [y0, y1]
                self._span(x, min(near) - half, max(near) + half, full)

    def fill(self, band: Band) -> None:
        full = _strengths("band")[STRENGTHS - 1]
        edges = [(x * SCALE, top * SCALE, bottom * SCALE) for x, top, bottom in band.edges]
        for (x0, top0, bottom0), (x1, top1, bottom1) in pairwise(edges):
            for x in range(int(x0), int(x1) + 1):
                share = min(1.0, max(0.0, (x - x0) / (x1 - x0))) if x1 > x0 else 0.0
                self._span(x, top0 + share * (top1 - top0), bottom0 + share * (bottom1 - bottom0), full)

    def _span(self, x: int, top: float, bottom: float, full: int) -> None:
        """Fill a column between two heights; pixels that are only partly inside are paler."""
        if not 0 <= x < self._width:
            return
        top, bottom = max(0.0, top), min(self._height - 1.0, bottom)
        first, last = int(top), int(bottom)
        at = x * self._height
        for place, inside in ((first, first + 1 - top), (last, bottom - last)):
            weak = full - (STRENGTHS - 1) + round(inside * (STRENGTHS - 1))
            now = self._pixels[at + place]
            of_line = full - STRENGTHS < now <= full
            if weak > full - (STRENGTHS - 1) and not (of_line and now > weak):
                self._pixels[at + place] = weak
        if last > first + 1:
            self._pixels[at + first + 1 : at + last] = bytes([full]) * (last - first - 1)

    def as_png(self) -> bytes:
        used = bytes(sorted({0, *self._pixels}))
        bits = 4 if len(used) <= 16 else 8
        table = bytes(max(0, used.find(number)) for number in range(256))
        pixels = self._pixels.translate(table)
        rows = b"".join(b"\0" + _packed(pixels[y :: self._height], bits) for y in range(self._height))
        header = struct.pack(">IIBBBBB", self._width, self._height, bits, 3, 0, 0, 0)
        colours, opacities = _palette()
        chunks = (
            (b"IHDR", header),
            (b"PLTE", b"".join(colours[3 * number : 3 * number + 3] for number in used)),
            (b"tRNS", bytes(opacities[number] for number in used)),
            (b"IDAT", zlib.compress(rows, 9)),
            (b"IEND", b""),
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _packed(row: bytearray, bits: int) -> bytes:
    """Return a row of pixels with this number of bits for each: two share a byte where few colours are used."""
    if bits == 8:
        return bytes(row)
    return bytes(left << 4 | right for left, right in zip(row[::2], row[1::2] + b"\0" * (len(row) % 2), strict=True))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _of_hex(colour: str) -> tuple[int, int, int, int]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue, 255


def _palette() -> tuple[bytes, bytes]:
    """Return red, green and blue of each palette index, and the opacities: nothing, then the colours from pale to
    strong."""
    colours, opacities = bytearray(3), bytearray(1)
    for *colour, opacity in (*COLOURS.values(), *map(_of_hex, _OTHERS)):
        for strength in range(1, STRENGTHS):
            colours += bytes(colour)
            opacities.append(round(opacity * strength / (STRENGTHS - 1)))
    return bytes(colours), bytes(opacities)


@cache
def _strengths(colour: str) -> bytes:
    """Return the index of each strength of a colour, a name or `#c2569b`, as a table for `bytes.translate`."""
    if colour not in COLOURS and colour not in _OTHERS:
        _OTHERS.append(colour)
    first = 1 + [*COLOURS, *_OTHERS].index(colour) * (STRENGTHS - 1)
    return bytes([0, *range(first, first + STRENGTHS - 1), *[0] * (256 - STRENGTHS)])


@cache
def _glyph(character: str) -> tuple[bytes, ...]:
    """Return the columns of a character; a question mark for one that has no glyph here."""
    number = ord(character) - 32 if " " <= character <= "~" else ord("?") - 32
    size = GLYPH_WIDTH * GLYPH_HEIGHT
    packed = _glyphs()[number * size // 4 : (number + 1) * size // 4]
    pixels = bytes(byte >> shift & 3 for byte in packed for shift in (0, 2, 4, 6))
    return tuple(pixels[at : at + GLYPH_HEIGHT] for at in range(0, size, GLYPH_HEIGHT))


@cache
def _glyphs() -> bytes:
    """Return the printable characters of ASCII, each as columns from top to bottom with two bits per pixel."""
    return zlib.decompress(Path(__file__).with_name("glyphs.bin").read_bytes())
