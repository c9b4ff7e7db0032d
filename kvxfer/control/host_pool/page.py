"""A page, its key, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from kvxfer.errors import invalid

#: The longest that each text of a key may be.
MAX_KEY_NBYTES: Final = 512


class Salt(NamedTuple):
    """The parts of a page's key besides its layout and name: see `PageKey`."""

    tenant: str
    model: str
    revision: str


class PageKey(NamedTuple):
    """The key of a page. Another tenant, model, revision or layout makes it another page.

    Attributes
    ----------
    layout
        `page_layout.layout_digest` of the page's contents.
    key
        The caller's own name for the page, e.g. a hash of the tokens up to its end.
    """

    tenant: str
    model: str
    revision: str
    layout: str
    key: str

    def digest(self) -> bytes:
        """Returns 16 bytes that stand for the key wherever it outlives the process."""
        # No part contains a NUL (kvxfer.control.schema), so no two keys have one text.
        return blake2b("\0".join(self).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class PageState(StrEnum):
    """The state of a page. Each member's text is the word that users see."""

    PARKING = "parking"  # it is being read, and cannot be found yet
    PARKED = "parked"
    DROPPED = "dropped"  # it can no longer be found, but a reader still reads it


@dataclass(slots=True, eq=False)
class Page:
    """A page that has a place. Only `PageIndex` changes it.

    Attributes
    ----------
    key
        The key by which it is found.
    slab
        The number of the slab in which it lies.
    block
        Its block in the region of its layout; that region spans the whole pool.
    nbytes
        The bytes of the pool that it takes.
    serial
        The number of its parking: ascending, and never reused.
    num_holds
        How many leases and transfers read it now.
    parked_at, used_at
        Times, from the `now` of the calls.
    num_fetches
        How often a reader has held it.
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
        """Whether it may be evicted."""
        return self.state is PageState.PARKED and not self.is_pinned and not self.num_holds

    def document(self) -> dict[str, Any]:
        """Returns what users are shown of it, as a JSON object."""
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
    """Raises ``invalid-argument`` for keys that cannot belong to pages that are parked together."""
    if len({key[:4] for key in keys}) > 1:
        raise invalid("pages that are parked together must have one tenant, model, revision and layout")
    if len(set(keys)) != len(keys):
        raise invalid("the pages to park contain a key twice")
    texts = [*keys[0][:4], *(key.key for key in keys)]
    if not all(texts[4:]) or any(len(text.encode(errors="surrogatepass")) > MAX_KEY_NBYTES for text in texts):
        raise invalid(
            f"a page's key must have 1 to {MAX_KEY_NBYTES} bytes, and its tenant, model and revision at "
            "most as many"
        )
