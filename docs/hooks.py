"""What the site adds to mkdocs: pages that lie beside the code, and links as they stand in the repository.

Documents link to files of the repository, so that they can be read there. On the site a link to a document
leads to its page, and a link to a source file to a copy of its text. A link to a folder without a README is
shown without the link.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: Documents outside of docs/ that are pages; README.md is the first page.
BESIDE = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kvxfer/LAYOUTS.md", "tests/native/EMULATION.md"),
    *("bench/data/*.md", "connectors/README.md", "connectors/*/README.md", "deploy/README.md"),
    "native/**/*.md",
)
#: Where source files are that pages link to; a browser shows them as text.
SOURCE = "source"
FENCE = re.compile(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def pages() -> dict[str, str]:
    """Returns each document's place on the site by its path in the repository."""
    found = [str(path.relative_to(ROOT)) for glob in BESIDE for path in sorted(ROOT.glob(glob))]
    places = {path: "index.md" if path == "README.md" else path for path in found}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        place = str(path.relative_to(ROOT / "docs"))
        places[f"docs/{place}"] = place
    return places


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """Returns the text with what is around its blocks of code changed."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def target_of(link: str, document: str) -> str | None:
    """Returns the path in the repository that a link leads to; None for the web, and for the page itself."""
    path = link.partition("#")[0]
    if not path or ":" in path:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), path))


def links(text: str) -> list[str]:
    """Returns where the links of a document lead, as they stand."""
    found: list[str] = []

    def collect(part: str) -> str:
        found.extend(link for _, link in LINK.findall(part))
        return part

    outside_of_code(text, collect)
    return found


def sources() -> Iterator[str]:
    """Yields the source files that documents link to."""
    places = pages()
    for document in places:
        for link in links((ROOT / document).read_text()):
            target = target_of(link, document)
            if target is None or target in places or target.startswith("docs/"):
                continue
            if (ROOT / target).is_file():
                yield target


def rewritten(text: str, document: str) -> str:
    """Returns a document with its links as the site has them."""
    places = pages()
    here = posixpath.dirname(places[document])

    def leads(found: re.Match[str]) -> str:
        words, link = found.groups()
        target, anchor = target_of(link, document), link.partition("#")[2]
        # Pictures that are links hold a link of their own.
        words = LINK.sub(leads, words)
        if target is None:
            return f"[{words}]({link})"
        if (ROOT / target).is_dir():
            target = posixpath.join(target, "README.md")
            if target not in places:
                return words
        if target in places:
            place = places[target]
        elif target.startswith("docs/"):
            place = target.removeprefix("docs/")
        else:
            place = f"{SOURCE}/{target}.txt"
        return f"[{words}]({posixpath.relpath(place, here or '.')}{'#' + anchor if anchor else ''})"

    return outside_of_code(text, lambda part: LINK.sub(leads, part))


# -- What mkdocs calls ------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Puts in the place of each star in nav the pages that it stands for."""
    places = sorted(pages().values())
    placed: set[str] = set()

    def expanded(entries: list[Any]) -> list[Any]:
        out: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                out += [{title: expanded(of) if isinstance(of, list) else of} for title, of in entry.items()]
            elif "*" in entry:
                found = [place for place in places if fnmatch(place, entry) and place not in placed]
                placed.update(found)
                out += found
            else:
                placed.add(entry)
                out.append(entry)
        return out

    config.nav = expanded(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie beside the code, and the sources that pages link to."""
    for document, place in pages().items():
        if not document.startswith("docs/"):
            files.append(File.generated(config, place, content=(ROOT / document).read_text()))
    for source in dict.fromkeys(sources()):
        files.append(File.generated(config, f"{SOURCE}/{source}.txt", abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Gives each page its links."""
    documents = {place: document for document, place in pages().items()}
    return rewritten(markdown, documents[page.file.src_uri])
