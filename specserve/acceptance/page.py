"""A result as one HTML file that needs nothing else: verdicts, plots as inline SVG, and every table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from specserve.acceptance.records import OFF
from specserve.acceptance.report import Table, tables
from specserve.loadgen.plot import GRID, INK
from specserve.tables import cell

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 260, 56, 44, 28
# distinct in grey as well; one drafter is the plots' blue
COLORS = ("#1e64c8", "#e08214", "#2a8c5a", "#b03a70", "#6a51a3", "#7f6a3a", "#222222", "#61b0d8")
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0 1.5em;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{border-bottom:1px solid #ddd;padding:.2em .7em;text-align:right;white-space:nowrap}
th{border-bottom:2px solid #888}td.name,th.name{text-align:left}
figure{margin:1em 0}figcaption{font-weight:600}svg{max-width:100%;height:auto}
.wrong{color:#b00020;font-weight:700}small{color:#666}
"""

Series = Sequence[tuple[str, Sequence[float | None]]]
"""(name, one value for every place on the x axis, None where there is none)."""


def page(result: Mapping[str, Any]) -> str:
    """The whole file; `result` is what `--json` writes."""
    about = result["provenance"]
    drafting = {label: side for label, side in result["sides"].items() if label != OFF}
    head = f"{escape(str(result['model']))}, temperature {result['temperature']:g}, seed {about['seed']}"
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>",
        f"<title>specserve acceptance</title><style>{STYLE}</style><h1>Acceptance</h1><p>{head}<br>",
        f"<small>{escape(about['environment'])}<br>{escape(about['date'])}, commit {escape(about['commit'])}</small>",
        *(_verdict(label, side) for label, side in drafting.items()),
        *_plots(drafting),
        *map(_table, tables(result, detail=True)),
    ]
    return "\n".join(parts) + "\n"


def _verdict(label: str, side: Mapping[str, Any]) -> str:
    categories = "".join(
        f"<h4>{escape(name)}</h4>{_sentences(found['verdict'])}" for name, found in side["categories"].items()
    )
    return (
        f"<h2>{escape(label)}</h2>{_sentences(side['overall']['verdict'])}"
        f"<details><summary>by category</summary>{categories}</details>"
    )


def _sentences(sentences: Sequence[str]) -> str:
    items = "".join(
        f"<li{' class=wrong' if sentence.startswith('WRONG') else ''}>{escape(sentence)}" for sentence in sentences
    )
    return f"<ul>{items}</ul>"


def _table(shown: Table) -> str:
    names = [any(isinstance(row[i], str) for row in shown.rows) for i in range(len(shown.columns))]

    def line(tag: str, values: Sequence[object]) -> str:
        return "<tr>" + "".join(
            f"<{tag}{' class=name' if name else ''}>{escape(cell(value))}</{tag}>"
            for value, name in zip(values, names, strict=True)
        )

    rows = "".join(line("td", row) for row in shown.rows)
    note = f"<p><small>{escape(shown.note)}</small>" if shown.note else ""
    return f"<h3>{escape(shown.title)}</h3><table>{line('th', shown.columns)}{rows}</table>{note}"


def _plots(sides: Mapping[str, Any]) -> list[str]:
    overall = {label: side["overall"] for label, side in sides.items()}
    categories = list(dict.fromkeys(name for side in sides.values() for name in side["categories"]))
    depth = max((len(f["positions"]) for f in overall.values()), default=0)
    most = max((len(f["steps_by_tokens"]) for f in overall.values()), default=0)
    places = {
        "Acceptance length by category": _bars(
            categories,
            [
                (label, [side["categories"].get(name, {}).get("acceptance_length") for name in categories])
                for label, side in sides.items()
            ],
        ),
        "Accepted ÷ drafted at each position": _lines(
            range(1, depth + 1),
            [(label, [p["rate"] for p in f["positions"]]) for label, f in overall.items()],
        ),
        "Share of steps by the tokens they committed": _bars(
            [str(i) for i in range(1, most + 1)],
            [(label, [n / f["num_steps"] for n in f["steps_by_tokens"]]) for label, f in overall.items()],
        ),
        "Tokens a second by fixed draft length (estimate)": _lines(
            range(max((len(f["fixed"]) for f in overall.values()), default=0)),
            [(label, [point["tokens_per_second"] for point in f["fixed"]]) for label, f in overall.items()],
        ),
    }
    return [f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in places.items() if svg]


def _bars(names: Sequence[str], series: Series) -> str:
    """Grouped bars, one group a name; "" if there is nothing to draw."""
    if not any(values for _, values in series):
        return ""
    high = _high(series)
    group = (WIDTH - LEFT) / len(names)
    width = 0.8 * group / len(series)
    shapes = [_text(LEFT + group * (i + 0.5), name) for i, name in enumerate(names)]
    for number, (label, values) in enumerate(series):
        for i, value in enumerate(values):
            if value is not None:
                x, y = LEFT + group * (i + 0.1) + width * number, _y(value, high)
                shapes.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
                    f' fill="{_color(number)}"><title>{escape(label)}: {value:.3g}</title></rect>'
                )
    return _svg(shapes, high, series)


def _lines(places: Sequence[int], series: Series) -> str:
    """A line a series over whole numbers; "" if there is nothing to draw."""
    if not any(values for _, values in series):
        return ""
    high = _high(series)
    step = (WIDTH - LEFT - 16) / max(len(places) - 1, 1)
    every = max(1, len(places) // 16)
    shapes = [_text(LEFT + 8 + step * i, str(place)) for i, place in enumerate(places) if i % every == 0]
    for number, (label, values) in enumerate(series):
        dots = [(LEFT + 8 + step * i, _y(value, high), value) for i, value in enumerate(values) if value is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in dots)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{_color(number)}" stroke-width="2"/>')
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_color(number)}">'
            f"<title>{escape(label)}: {value:.3g}</title></circle>"
            for x, y, value in dots
        ]
    return _svg(shapes, high, series)


def _svg(shapes: Sequence[str], high: float, series: Series) -> str:
    """Shapes over a grid, with a legend."""
    grid = []
    for share in (0.0, 0.5, 1.0):
        y = _y(high * share, high)
        grid.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH}" y2="{y:.1f}" stroke="rgb{GRID}"/>')
        grid.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{high * share:.3g}</text>')
    legend, x = [], float(LEFT)
    for number, (label, _) in enumerate(series):
        legend.append(f'<rect x="{x:.0f}" y="6" width="10" height="10" fill="{_color(number)}"/>')
        legend.append(f'<text x="{x + 14:.0f}" y="15">{escape(label)}</text>')
        x += 30 + 7 * len(label)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-size="12" fill="rgb{INK}">'
        + "".join((*grid, *shapes, *legend))
        + "</svg>"
    )


def _text(x: float, words: str) -> str:
    """Words below the x axis."""
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(words)}</text>'


def _high(series: Series) -> float:
    """The top of the y axis: the next round number."""
    most = max((value for _, values in series for value in values if value is not None), default=0.0)
    if most <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most))
    return next(top * unit for top in (1, 2, 3, 4, 5, 6, 8, 10) if top * unit >= most)


def _y(value: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / high


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
