"""Writes one HTML file without references to other files, for a post-mortem."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from moc.cli_output import replacing

_STYLE = """\
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 1.5rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top; white-space: pre-line; }
th { opacity: .7; } div { overflow-x: auto; } img { max-width: 100%; }
"""

Section = tuple[str, Sequence[str], Iterable[Sequence[str]]]
"""Title of a table, titles of its columns, and its rows."""


def write_html(path: str, title: str, light: bytes, dark: bytes, sections: Iterable[Section]) -> None:
    """Writes a picture (PNG, light and dark) and tables to an HTML file; replaces it atomically.

    Tables without rows are left out.
    """
    urls = [f"data:image/png;base64,{base64.b64encode(picture).decode()}" for picture in (light, dark)]
    image = f'<img alt="progress, and uses of the wall clock" src="{urls[0]}">'
    image = f'<picture><source media="(prefers-color-scheme: dark)" srcset="{urls[1]}">{image}</picture>'
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = f"<h1>{escape(title)}</h1>{image}{''.join(_section(*section) for section in sections)}"
    with replacing(path) as name:
        Path(name).write_text(f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n')


def _section(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in titles)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{escape(title)}</h2><div><table><tr>{head}</tr>{body}</table></div>"
