"""Directory entries: an agent's name, address and incarnation, in a form that can be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from kvxfer.address import Address
from kvxfer.errors import invalid
from kvxfer.layout.schema import Field, Schema, hexadecimal, mapping, text
from kvxfer.naming import check_name, is_text

ENTRY_VERSION: Final = 1
INCARNATION_NBYTES: Final = 16
#: Limit of keys and values together, enough for a role, a model, a zone. Do not put load or cache contents
#: here.
MAX_METADATA_NBYTES: Final = 4096
MAX_METADATA_ITEMS: Final = 32
# JSON needs at most six letters for a byte.
_MAX_NBYTES: Final = 8 * MAX_METADATA_NBYTES


@dataclass(frozen=True, slots=True)
class Entry:
    """One incarnation of an agent: its name, and the address where peers reach it. Grants no rights.

    Attributes
    ----------
    name
        The agent's name, 1 to 128 bytes in UTF-8.
    address
        ``"tcp://host:port"``; ``""`` if the agent accepts no peers, or its address is unknown.
    incarnation
        16 bytes: an agent that was restarted under the same name has different ones.
    metadata
        Its user's facts about the agent, read-only: at most 32 texts by name, 4096 bytes together.

    Raises
    ------
    UsageError
        ``invalid-argument``, naming the field.
    """

    name: str
    address: str
    incarnation: bytes
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_name(self.name, "an agent's name")
        if self.address != "" and Address.parse(self.address, "an agent's address").is_wildcard:
            raise invalid(
                f"an agent's address must be one address, not {self.address!r}, which stands for all "
                "addresses of a host"
            )
        if not isinstance(self.incarnation, bytes) or len(self.incarnation) != INCARNATION_NBYTES:
            raise invalid(
                f"an agent's incarnation must have {INCARNATION_NBYTES} bytes, not {self.incarnation!r:.300}"
            )
        items = dict(self.metadata) if isinstance(self.metadata, Mapping) else {"": None}
        if not all(is_text(part) and part for part in items) or not all(map(is_text, items.values())):
            raise invalid(
                "an agent's metadata must be a mapping of names to texts in UTF-8, not "
                f"{self.metadata!a:.300}"
            )
        nbytes = sum(len(key.encode()) + len(value.encode()) for key, value in items.items())
        if len(items) > MAX_METADATA_ITEMS or nbytes > MAX_METADATA_NBYTES:
            raise invalid(
                f"an agent's metadata may have at most {MAX_METADATA_ITEMS} items and {MAX_METADATA_NBYTES} "
                f"bytes, not {len(items)} and {nbytes}"
            )
        object.__setattr__(self, "metadata", MappingProxyType(items))

    def __reduce__(self) -> tuple[object, ...]:
        # Engines pickle entries for their workers, but the view of the metadata cannot be pickled.
        return Entry, (self.name, self.address, self.incarnation, dict(self.metadata))

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry as a versioned JSON object, e.g. as part of another document."""
        return _SCHEMA.document(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Entry:
        """Reads what `to_dict` of this or another version wrote. Untrusted objects are safe to pass.

        Raises
        ------
        UsageError
            ``invalid-argument``, naming the field.
        """
        return cls(**_SCHEMA.read(document))

    def to_bytes(self) -> bytes:
        """Returns the same as JSON."""
        return _SCHEMA.encode(self)

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Entry:
        """Reads what `to_bytes` of this or another version wrote, as `from_dict` does."""
        return cls(**_SCHEMA.decode(encoded, _MAX_NBYTES))


_SCHEMA: Final = Schema(
    what="agent entry",
    key="kvxfer_agent",
    version=ENTRY_VERSION,
    fields=(
        Field("name", text),
        Field("address", text, default=""),
        Field("incarnation", hexadecimal, write=bytes.hex),
        Field("metadata", mapping, default={}, write=dict),
    ),
)
