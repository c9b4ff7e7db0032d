"""Requests to the native core, one typed tuple for each verb; native/bindings/requests.cpp unpacks them.

If you add a field here, add it there at the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvxfer.arguments import check_kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvxfer._native import After
    from kvxfer.plan.program import CopyProgram


class Part(NamedTuple):
    """The part of the blocks that moves; None for all that both ends hold; see `Agent.write`."""

    layers: range | None
    heads: range | None
    tokens: range | None


#: Compared by identity, because most transfers move whole blocks in all layers.
WHOLE: Final = Part(None, None, None)


class Terms(NamedTuple):
    """Terms that most transfers leave at their defaults; `Agent.write` explains the fields.

    Attributes
    ----------
    lease
        The number of the peer's lease; None for any.
    hold
        The condition that delays its layers; True for ``Handle.layers_ready``.
    """

    priority: int
    integrity: bool | None
    lease: int | None
    hold: bool | After


#: The first priority. Compared by identity, so that native code checks values that are merely equal, such as
#: False.
FIRST: Final = 0
#: Made once, because a tuple for each transfer would take 0.2 of a post's 2 us.
USUAL: Final = Terms(0, None, None, False)


def terms_of(priority: int, integrity: bool | None, lease: int | None, hold: bool | After) -> Terms:
    """Returns the terms of a transfer that are not `USUAL`.

    Raises
    ------
    UsageError
        ``invalid-argument``: `integrity` is not a bool. Native code checks the others.
    """
    if integrity is not None:
        check_kind(integrity, "integrity", bool, "True, False or None")
    return Terms(priority, integrity, lease, hold)


class Expected(NamedTuple):
    """What an expectation permits, and what must arrive.

    Attributes
    ----------
    blocks
        Block ids of region `region`, uint32.
    first_layer, num_layers
        In the region's numbers.
    block_tokens, first_token, end_token, num_heads
        All heads of the tokens from `first_token` to before `end_token`, counted over the blocks in the given
        order.
    peer
        The peer that may write; None for any peer.
    """

    tag: bytes
    region: int
    blocks: NDArray[np.uint32]
    first_layer: int
    num_layers: int
    block_tokens: int
    first_token: int
    end_token: int
    num_heads: int
    peer: int | None
    timeout_s: float
    context: str | bytes


class Grant(NamedTuple):
    """A lease to grant.

    Attributes
    ----------
    peer
        The session that holds it; None for a bearer's lease, which is for reading and not renewable.
    holder
        For a bearer's lease: the name of the agents that may use it, or a prefix of names if it ends in
        ``/*``; empty for any.
    number
        For a bearer's lease: the drawn number; None draws one.
    blocks
        Block ids of region `region`, uint32; None for all.
    allow
        For a bearer's lease: a pattern of certificate identities; empty for any.
    """

    peer: int | None
    holder: str
    number: int | None
    region: int
    write: bool
    blocks: NDArray[np.uint32] | None
    ttl_s: float
    renewable: bool
    allow: str


class Program(NamedTuple):
    """A copy program of a session; kvxfer/plan/program.py explains the arrays."""

    peer: int
    write: bool
    src_region: int
    dst_region: int
    num_layers: int
    loops: NDArray[np.void]
    conversions: NDArray[np.void]
    scales: NDArray[np.float32]
    units: tuple[int, int, int, int]
    dst_heads: tuple[int, int, int]

    @classmethod
    def of(
        cls, program: CopyProgram, *, peer: int = 0, write: bool = False, src: int = 0, dst: int = 0
    ) -> Program:
        """Returns a compiled program between two regions, named by their ids."""
        import numpy as np  # loaded with the first layout

        return cls(
            peer=peer,
            write=write,
            src_region=src,
            dst_region=dst,
            num_layers=program.num_program_layers,
            loops=np.array(program.loops),
            conversions=np.array(program.conversions),
            scales=np.array(program.scales),
            units=program.units,
            dst_heads=program.dst_heads,
        )
