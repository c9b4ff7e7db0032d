"""A page, by what it is found, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from kvxfer.errors import invalid

#: Of each text of a key.
MAX_KEY_NBYTES: Final = 512


class Salt(NamedTuple):
    """What a page's key is salted by, beside its layout: see `PageKey`."""

    tenant: str
    model: str
    revision: str


class PageKey(NamedTuple):
    """By what a page is found. Another tenant, model, revision or layout is another page.

    Attributes
    ----------
    layout
        `page_layout.layout_digest` what the page holds.
    key
        The caller's own name of it, e.g. a hash of the tokens up to its end.
    """

    tenant: str
    model: str
    revision: str
    layout: str
    key: str


class PageState(StrEnum):
    """Where a page stands. Members equal the words they show."""

    PARKING = "parking"  # it is being read, and nobody finds it yet
    PARKED = "parked"
    DROPPED = "dropped"  # nobody finds it any more, and somebody still reads it


@dataclass(slots=True, eq=False)
class Page:
    """A page that has a place. Read only outside of `PageIndex`.

    Attributes
    ----------
    key
        By what it is found.
    slab
        The number of the slab that it takes room of.
    block
        Its block in the region of its layout, which has all of the pool.
    nbytes
        What it takes of the pool.
    serial
        Of its parking, ascending; never reused.
    num_holds
        Who reads it now: leases and transfers.
    parked_at, used_at
        As `now` was told.
    num_fetches
        How often it was held to be read.
    """

    key: PageKey
    slab: int
    block: int
    nbytes: int
    serial: int
    state: PageState = PageState.PARKING
    is_pinned: bool = False
    num_holds: int = 0
    parked_at: float = 0.0
    used_at: float = 0.0
    num_fetches: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether it may give way to others."""
        return self.state is PageState.PARKED and not self.is_pinned and not self.num_holds

    def document(self) -> dict[str, Any]:
        """Returns what is told of it, as a JSON object."""
        return {
            **self.key._asdict(),
            "nbytes": self.nbytes,
            "state": str(self.state),
            "pinned": self.is_pinned,
            "holds": self.num_holds,
            "fetches": self.num_fetches,
            "serial": self.serial,
            "parked_at": self.parked_at,
            "used_at": self.used_at,
        }


def check_keys(keys: Sequence[PageKey]) -> None:
    """Raises ``invalid-argument`` where keys cannot be those of pages that are parked together."""
    if len({key[:4] for key in keys}) > 1:
        raise invalid("pages that are parked together are of one tenant, model, revision and layout")
    if len(set(keys)) != len(keys):
        raise invalid("a key is named twice among pages that are to be parked")
    texts = [*keys[0][:4], *(key.key for key in keys)]
    if not all(texts[4:]) or any(len(text.encode(errors="surrogatepass")) > MAX_KEY_NBYTES for text in texts):
        raise invalid(f"a page's key has 1 to {MAX_KEY_NBYTES} bytes, as its tenant, model and revision")
