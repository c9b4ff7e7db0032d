"""One self-contained HTML page: text, tables, inline plots; nothing is fetched when it is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from kvxfer.bench.errors import BenchError

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #667; --line: #d5d9e0; --paper: #fff;
  --good: #12805c; --bad: #b3261e; --mark: #2f6fde; --a: #2f6fde; --b: #c77700; --c: #12805c; --d: #8a4fbf; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e7ec; --dim: #98a; --line: #3a404a; --paper: #14171c;
  --good: #4cc29a; --bad: #ff8a80; --mark: #7aa7ff; --a: #7aa7ff; --b: #f0b04f; --c: #4cc29a; --d: #c79bf2;
} }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; margin: .6rem 0; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: left;
  vertical-align: middle; }
td.number, th.number { text-align: right; }
.dim { color: var(--dim); } .good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
figure { margin: 1rem 0; } figcaption { color: var(--dim); font-size: .85rem; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg text.dim { fill: var(--dim); }
"""


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that is safe as it is; every other text is escaped where it enters a page."""

    text: str


Content = str | Markup


def render(content: Content) -> str:
    """Returns the content as HTML."""
    return content.text if isinstance(content, Markup) else escape(content)


def element(tag: str, content: Content, kind: str = "") -> Markup:
    """Returns one element, with a class where ``kind`` is named."""
    opening = f'{tag} class="{escape(kind)}"' if kind else tag
    return Markup(f"<{opening}>{render(content)}</{tag}>")


def paragraph(*contents: Content, kind: str = "") -> Markup:
    """Returns a paragraph of the contents, one after the other."""
    return element("p", Markup("".join(render(content) for content in contents)), kind)


def figure(plot: Markup, caption: str) -> Markup:
    """Returns a plot with the words that explain it."""
    return Markup(f"<figure>{plot.text}<figcaption>{escape(caption)}</figcaption></figure>")


def table(
    head: Sequence[Content], rows: Iterable[Sequence[Content]], numbers: frozenset[int] = frozenset()
) -> Markup:
    """Returns a table; the columns in ``numbers`` stand to the right."""

    def line(cells: Sequence[Content], tag: str) -> str:
        return "".join(
            element(tag, cell, "number" if column in numbers else "").text
            for column, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return Markup(f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>")


def page(title: str, parts: Iterable[Content]) -> str:
    """Returns the whole document."""
    body = "\n".join(render(part) for part in parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def check(path: Path | None) -> None:
    """Raises before a run whose page could not be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise BenchError(f"--html {path}: no file can be written there; name one in a folder that exists")


def write(path: Path, document: str) -> None:
    """Writes a page; one that cannot be written is an error in words."""
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise BenchError(
            f"{path}: the page cannot be written: {error.strerror}; name another file"
        ) from error
