"""Tables as text: Markdown, so that what a terminal shows can go into a document as it is."""

from __future__ import annotations

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table: names to the left, numbers to the right with three significant digits."""
    cells = [list(columns), *([cell(value) for value in row] for row in rows)]
    widths = [max(2, *(len(row[i]) for row in cells)) for i in range(len(columns))]  # a rule needs a dash
    numeric = [bool(rows) and all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    lines = []
    for row in cells:
        padded = (
            text.rjust(w) if right else text.ljust(w) for text, w, right in zip(row, widths, numeric, strict=True)
        )
        lines.append(f"| {' | '.join(padded)} |")
    marks = (f"{'-' * (w - 1)}{':' if right else '-'}" for w, right in zip(widths, numeric, strict=True))
    lines.insert(1, f"| {' | '.join(marks)} |")
    return "\n".join(lines)


def cell(value: object) -> str:
    """A value as a table shows it; None is a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
