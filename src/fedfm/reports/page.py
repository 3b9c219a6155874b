"""Make the parts of a page: its frame, sections, figures in two widths, and tables that scroll."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from fedfm.core import storage
from fedfm.errors import InputError, RunError
from fedfm.reports.svg import Series
from fedfm.reports.text import count, esc, shorten, width_of

WIDE, NARROW = 892, 358  # widths of a drawing in pixels, for screens of 1280 and of 390 pixels
MOST_ROWS = 2000  # largest number of rows of a table; of more rows it shows a sample, and the run's own files have all
# The page loads nothing and runs no script, even if a name in the run contains HTML.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(title: str, head: str, sections: Sequence[tuple[str, str, str]], foot: str, kind: str = "report") -> str:
    """One self-contained HTML document.

    Args:
        head, foot: HTML above and below the sections.
        sections: (id, heading, HTML) of each section.
        kind: CSS class of the body, for which the style sheet has rules (report or dossier).
    """
    policy = f"{_POLICY}; img-src data:" if any("<img " in html for _, _, html in sections) else _POLICY
    style = files("fedfm.reports").joinpath("style.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{i}">{esc(name)}</a>' for i, name, _ in sections)
    body = "".join(f'<section id="{i}"><h2>{esc(name)}</h2>{html}</section>\n' for i, name, html in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="robots" content="noindex">'
        f"<title>{esc(title)}</title><style>\n{style}</style></head>\n"
        f'<body class="{kind}"><header>{head}'
        f'<nav aria-label="Sections">{links}</nav></header>\n<main>{body}</main>\n'
        f"<footer>{foot}</footer></body></html>\n"
    )


def save(text: str, path: Path, *, chosen: bool = False) -> Path:
    """Write the file atomically.

    Args:
        chosen: whether the user can name another file by ``--out``; otherwise the page belongs into a run's folder.

    Raises:
        InputError: the path is a folder or cannot be written.
        RunError: the disk is full.
    """
    if path.is_dir():
        raise InputError(f"{path}: a folder; give the name of a file, e.g. {path / 'report.html'}")
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(
            missing_ok=True
        )  # a killed process may have left this file, and if it is a link, a write would follow it
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        if storage.full(error):
            raise RunError(f"{path}: cannot be written: the disk is full; free some space there") from error
        folder = path.parent
        other = "give a file elsewhere by --out" if chosen else f"copy {folder} to a folder of yours, and name the copy"
        raise InputError(f"{path}: cannot be written ({error.strerror}); make {folder} writable, or {other}") from error
    return path


def figure(draw: Callable[[int], str]) -> str:
    """The drawing in two widths. The style sheet shows the width that fits the screen, so that text keeps its size."""
    return f'<figure><div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div></figure>'


def grid(drawings: Sequence[tuple[str, str]]) -> str:
    """Small named drawings side by side."""
    items = (f"<figure><figcaption>{esc(shorten(name, 28))}</figcaption>{draw}</figure>" for name, draw in drawings)
    return f'<div class="grid">{"".join(items)}</div>'


def legend(series: Sequence[Series], values: Sequence[str], band: str = "") -> str:
    """A sample of each line with its name and last value."""
    items = []
    for s, value in zip(series, values, strict=True):
        line = f'<svg viewBox="0 0 30 12" aria-hidden="true"><path class="line s{s.colour}" d="M1 6L29 6"/></svg>'
        items.append(f"<li>{line}<span>{esc(s.name)} <b>{esc(value)}</b></span></li>")
    if band:
        box = '<svg viewBox="0 0 30 12" aria-hidden="true"><rect class="band" width="30" height="12" rx="2"/></svg>'
        items.append(f"<li>{box}<span>{esc(band)}</span></li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def swatches(names: Sequence[str]) -> str:
    """A filled sample of each colour with its name."""
    box = '<svg viewBox="0 0 30 12" aria-hidden="true"><rect class="s{}" width="30" height="12" rx="2"/></svg>'
    return f'<ul class="legend">{"".join(f"<li>{box.format(i + 1)}{esc(n)}</li>" for i, n in enumerate(names))}</ul>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], label: str, words: Sequence[int] = ()) -> str:
    """A table in a scrolling box.

    The first column names the row. ``words`` has the indices of further columns with text; all others have numbers.
    """
    start = ["" if j == 0 or j in words else ' class="n"' for j in range(len(head))]
    top = "".join(f'<th scope="col"{s}>{esc(h)}</th>' for s, h in zip(start, head, strict=True))
    body = []
    many = len(rows) > MOST_ROWS
    for row in [rows[k * (len(rows) - 1) // (MOST_ROWS - 1)] for k in range(MOST_ROWS)] if many else rows:
        cells = "".join(
            f"<td{_short(c) if j in words else start[j]}>{esc(c)}</td>" for j, c in enumerate(row[1:], start=1)
        )
        body.append(f'<tr><th scope="row"{_short(row[0])}>{esc(row[0])}</th>{cells}</tr>')
    box = f'<div class="box" tabindex="0" role="region" aria-label="{esc(label)}">'
    said = f"A sample of {count(MOST_ROWS)} of {count(len(rows))} rows, spread evenly over the table."
    rest = note(said) if many else ""
    return f"{box}<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{rest}"


def details(summary: str, html: str) -> str:
    """A folded section."""
    return f"<details><summary>{esc(summary)}</summary>{html}</details>"


def code(text: str, label: str) -> str:
    """Preformatted text in a scrolling box."""
    lines = "\n".join(map(esc, text.split("\n")))
    return f'<div class="box" tabindex="0" role="region" aria-label="{esc(label)}"><pre>{lines}</pre></div>'


def note(html: str) -> str:
    """A note, given as HTML that is escaped already."""
    return f'<p class="note">{html}</p>'


def aside(title: str, items: Sequence[str], attributes: str = "") -> str:
    """A highlighted box with a list of texts; "" if there are no texts."""
    listed = "".join(f"<li>{esc(text)}</li>" for text in items)
    box = f'<aside aria-label="{title}"{attributes}><strong>{title}</strong><ul>{listed}</ul></aside>'
    return box if items else ""


def _short(text: str) -> str:
    return ' class="one"' if width_of(text) <= 32 else ""
