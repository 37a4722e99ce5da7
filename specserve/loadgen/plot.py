"""A picture of a run as a PNG: how times to the first token and per token are spread, and tokens over time.

Drawn into a bytearray and packed with zlib: three panels do not need a plotting library. The font has 3 × 5 dots a
letter, each row of dots one octal digit.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from specserve.loadgen.drive import Run
from specserve.loadgen.report import tokens_by_second

FONT = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71111",
    "8": "75757", "9": "75717", "A": "25755", "B": "65656", "C": "34443", "D": "65556", "E": "74647", "F": "74644",
    "G": "34553", "H": "55755", "I": "72227", "J": "11152", "K": "55655", "L": "44447", "M": "57755", "N": "65555",
    "O": "25552", "P": "65644", "Q": "25563", "R": "65655", "S": "34216", "T": "72222", "U": "55557", "V": "55552",
    "W": "55775", "X": "55255", "Y": "55222", "Z": "71247", ".": "00002", "%": "51245", "/": "11244", " ": "00000",
}  # fmt: skip
SCALE = 2
WIDTH, PANEL, MARGIN = 640, 200, 48
INK, GRID, LINE = (40, 40, 40), (220, 220, 220), (30, 100, 200)
Color = tuple[int, int, int]


class Canvas:
    """RGB pixels, white at first."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.data = bytearray(b"\xff" * (3 * width * height))

    def dot(self, x: int, y: int, color: Color) -> None:
        if 0 <= x < self.width and 0 <= y < self.height:
            at = 3 * (y * self.width + x)
            self.data[at : at + 3] = bytes(color)

    def line(self, x0: float, y0: float, x1: float, y1: float, color: Color) -> None:
        steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for i in range(steps + 1):
            self.dot(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps), color)

    def text(self, x: int, y: int, text: str) -> None:
        for number, letter in enumerate(text.upper()):
            for row, digit in enumerate(FONT.get(letter, FONT[" "])):
                for column in range(3):
                    if int(digit) >> (2 - column) & 1:
                        self._block(x + (4 * number + column) * SCALE, y + row * SCALE)

    def _block(self, x: int, y: int) -> None:
        for i in range(SCALE * SCALE):
            self.dot(x + i % SCALE, y + i // SCALE, INK)

    def png(self) -> bytes:
        stride = 3 * self.width
        rows = b"".join(b"\0" + self.data[y * stride : (y + 1) * stride] for y in range(self.height))
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_part(kind, data) for kind, data in parts)


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def draw(run: Run, path: Path) -> None:
    """Write the picture of a run."""
    done = [outcome for outcome in run.outcomes if outcome.error is None]
    canvas = Canvas(WIDTH, 3 * PANEL)
    _spread(canvas, 0, "% of requests over time to first token ms", [1e3 * o.ttft for o in done])
    times = [1e3 * o.tpot for o in done if o.output_tokens > 1]
    _spread(canvas, PANEL, "% of requests over time per token ms", times)
    rates = [float(count) for count in tokens_by_second(done, run.begin)]
    _panel(canvas, 2 * PANEL, "tokens in each second over seconds", list(enumerate(rates)), max(rates, default=1.0))
    path.write_bytes(canvas.png())


def _spread(canvas: Canvas, top: int, title: str, values: Sequence[float]) -> None:
    points = [(value, 100.0 * (i + 1) / len(values)) for i, value in enumerate(sorted(values))]
    _panel(canvas, top, title, points, 100.0)


def _panel(canvas: Canvas, top: int, title: str, points: Sequence[tuple[float, float]], high: float) -> None:
    """A line through points with x from 0, and y from 0 to `high`."""
    left, right, bottom, head = MARGIN, WIDTH - 16, top + PANEL - 24, top + 24
    wide = max((x for x, _ in points), default=0.0) or 1.0
    high = high or 1.0
    for share in (0.0, 0.5, 1.0):
        x, y = round(left + (right - left) * share), round(bottom - (bottom - head) * share)
        canvas.line(left, y, right, y, GRID)
        canvas.line(x, head, x, bottom, GRID)
        canvas.text(4, y - 5, f"{high * share:.4g}")
        label = f"{wide * share:.4g}"
        canvas.text(min(x, WIDTH - 8 * len(label) - 4), bottom + 6, label)
    canvas.text(left, top + 6, title)
    places = [(left + (right - left) * x / wide, bottom - (bottom - head) * y / high) for x, y in points]
    if len(places) == 1:  # a lone point is a dash
        places.append((places[0][0] + 3, places[0][1]))
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        canvas.line(x0, y0, x1, y1, LINE)
