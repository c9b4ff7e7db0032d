"""A region as other agents know it: its sendable form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvxfer.directory.entry import Entry
from kvxfer.errors import invalid
from kvxfer.layout.kv_layout import MAX_ENCODED_NBYTES, KVLayout
from kvxfer.layout.schema import Field, Schema, hexadecimal, integer, text

if TYPE_CHECKING:
    from kvxfer.peer import Peer

DESCRIPTOR_VERSION: Final = 3


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """Describes one agent's region to another agent. It grants no right to the region: a lease does.

    Attributes
    ----------
    agent, incarnation
        The agent that owns the region; a restarted agent has another incarnation.
    id
        The region's epoch: a region that is registered again under the same name has another.
    name
        As it was registered.
    nbytes
        Length from the region's first byte to the end of its last.
    num_blocks
        Ids are 0 to ``num_blocks - 1``.
    layout
        Where its elements lie.
    address
        The owner's address, for `Agent.connect`; ``""`` if the owner accepts no peers, or if it called this
        agent and gave no address.
    path
        The transport that will carry transfers with it, e.g. ``"shm"``; ``""`` when none can.
    notes
        Sentences about transports that were tried and are not used, with the reason.
    """

    agent: str
    incarnation: bytes
    id: int
    name: str
    nbytes: int
    num_blocks: int
    layout: KVLayout
    address: str = field(default="", compare=False)
    path: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    # The session over which this agent got it; None if it came by another way.
    _peer: Peer | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return (
            f"<RegionDescriptor {self.name!r} of {self.agent!r} id={self.id} num_blocks={self.num_blocks} "
            f"nbytes={self.nbytes} path={self.path!r}>"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # The copy may be in another process. As with to_bytes(), the agent that uses it looks up its own
        # session.
        values = self.agent, self.incarnation, self.id, self.name, self.nbytes, self.num_blocks, self.layout
        return RegionDescriptor, (*values, self.address, self.path, self.notes)

    @property
    def owner(self) -> Entry:
        """The owner's name, address and incarnation, as a directory entry."""
        return Entry(self.agent, self.address, self.incarnation)

    def to_bytes(self) -> bytes:
        """Returns the descriptor as versioned JSON, which a router or scheduler can carry."""
        return _SCHEMA.encode(self)

    @classmethod
    def from_bytes(cls, encoded: bytes) -> RegionDescriptor:
        """Reads what `to_bytes` of this or another version wrote. Untrusted bytes are safe to pass.

        Unknown fields of a newer version are ignored, unless the writer marked them as needed. The agent
        finds the peer by the incarnation when the descriptor is used.

        Raises
        ------
        UsageError
            ``invalid-argument``, naming the field.
        """
        values = _SCHEMA.decode(encoded, 2 * MAX_ENCODED_NBYTES)
        values["layout"] = KVLayout.from_bytes(values["layout"])
        if values["num_blocks"] != values["layout"].num_blocks or values["nbytes"] < values["layout"].nbytes:
            raise invalid("region descriptor contradicts its layout")
        if not 0 <= values["id"] < 1 << 64:
            raise invalid("region descriptor field id is not in 64 bits")
        found = cls(**values)
        found.owner  # noqa: B018  # which checks what it is made of
        return found


def _read_layout(value: Any) -> bytes:
    try:
        return text(value).encode()
    except UnicodeEncodeError:
        raise ValueError("is not a text") from None


_SCHEMA: Final = Schema(
    what="region descriptor",
    key="kvxfer_region",
    version=DESCRIPTOR_VERSION,
    fields=(
        Field("agent", text),
        Field("incarnation", hexadecimal, write=bytes.hex),
        Field("id", integer),
        Field("name", text),
        Field("nbytes", integer),
        Field("num_blocks", integer),
        # Since version 3. An agent that does not read this field connects by other means.
        Field("address", text, default=""),
        # A document of its own, with its own version and list of needed fields.
        Field("layout", _read_layout, write=lambda layout: layout.to_bytes().decode()),
    ),
)
