"""The documentation's site builds without a warning, has every page, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="what builds the site is not installed: make docs")

ROOT = Path(__file__).parents[2]
BOUND_S = 200.0
#: Elements that a browser fetches by itself, and the attribute with the address.
FETCHED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors: links, headings, nav and docstrings among them."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Tags(HTMLParser):
    """Collects what the browser fetches for a page, the targets of its links, and its ids."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "a" and (link := named.get("href")):
            self.links.append(link)
        if (fetched := named.get(FETCHED.get(tag, ""))) and named.get("rel") != "canonical":
            self.fetched.append(fetched)
        self.ids |= {name for key in ("id", "name") if (name := named.get(key))}


def pages(site: Path) -> Iterator[tuple[Path, Tags]]:
    for page in sorted(site.rglob("*.html")):
        yield page, Tags(page)


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_document_is_a_page_and_in_the_navigation(site: Path) -> None:
    places = hooks().pages()
    assert {"README.md", "docs/concepts.md", "native/DESIGN.md", "connectors/vllm/README.md"} < set(places)
    named = (site / "index.html").read_text()
    for document, place in places.items():
        page = re.sub(r"(?:README|index)\.md$", "index.html", place)
        page = re.sub(r"\.md$", ".html", page)
        assert (site / page).exists(), f"{document} is no page"
        assert f'href="{page}"' in named or page == "index.html", f"{document} is not in mkdocs.yml's nav"


@pytest.mark.smoke
def test_links_lead_to_pages_and_headings(site: Path) -> None:
    found = dict(pages(site))
    for page, tags in found.items():
        for link in tags.links:
            path, _, anchor = link.partition("#")
            if "://" in path or page.name == "404.html":
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link} leads nowhere"
            if anchor and target in found:
                assert anchor in found[target].ids, f"{page.name}: {link} is no heading"


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page, tags in pages(site):
        assert [name for name in tags.fetched if re.match(r"(?:https?:)?//", name)] == [], page
    for sheet in (*site.rglob("*.css"), *site.rglob("*.svg")):
        assert not re.search(r"(?:url\(|@import|href=)\W*https?://", sheet.read_text()), sheet


def test_names_of_the_package_are_on_the_page_of_the_api(site: Path) -> None:
    import kvxfer

    ids = Tags(site / "api.html").ids
    missing = [name for name in kvxfer.__all__ if not any(one.endswith(f".{name}") for one in ids)]
    assert missing == []
    # And the names that their classes inherit.
    kinds = (kvxfer.Agent, kvxfer.Group, kvxfer.Incoming, kvxfer.Lease, kvxfer.Peer, kvxfer.Region)
    for kind in (*kinds, kvxfer.Transfer):
        names = {name for name in dir(kind) if not name.startswith("_")}
        there = {one.rpartition(".")[2] for one in ids if f".{kind.__name__}." in one}
        assert names - there == set(), kind
