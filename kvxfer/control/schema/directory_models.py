"""The directory that the daemon keeps: the addresses of agents, by name."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from kvxfer.control.schema.base import Name, RequestModel, ResponseModel, Seconds

Incarnation = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
# Bounds the form only; kvxfer/address.py parses it.
_ADDRESS: Final = r"^(tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5})?$"
# kvxfer/directory/entry.py bounds both together, and refuses with an explanation.
_Text = Annotated[str, StringConstraints(max_length=4096)]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=4096)], _Text], Field(max_length=32)
]


class Entry(RequestModel):
    """One life of an agent: its name, and the address at which others reach it."""

    name: Name
    address: Annotated[str, StringConstraints(max_length=300, pattern=_ADDRESS)] = Field(
        default="", description="`tcp://host:port`; empty if the agent does not accept peers"
    )
    incarnation: Incarnation
    metadata: Metadata = Field(default_factory=dict)


class EntryPublication(Entry):
    ttl_s: Seconds | None = Field(
        default=None, description="The entry is removed if it is not renewed for so long; null: never"
    )
    replace: bool = Field(default=True, description="Whether it replaces the entry of another incarnation")


class EntryPublished(ResponseModel):
    """Whether the name now belongs to this incarnation; events up to `index` include the change."""

    published: bool
    index: int


class EntryKept(RequestModel):
    name: Name
    incarnation: Incarnation


class EntriesKept(RequestModel):
    entries: Annotated[list[EntryKept], Field(min_length=1, max_length=256)]


class EntriesLost(ResponseModel):
    """The names whose entries are missing, or have expired: publish these entries again."""

    lost: list[str]


class DirectoryEntries(ResponseModel):
    """A part of the directory, by name; events above `index` report later changes."""

    items: list[Entry]
    next: str | None = None
    index: int
