"""What the core is asked for, one typed tuple for each verb; native/bindings/requests.cpp unpacks them.

A field that is added here is added there, at the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvxfer.arguments import check_kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from kvxfer._native import After


class Part(NamedTuple):
    """Which part of the blocks moves; None for all that both ends hold. `Agent.write` says what they are."""

    layers: Iterable[int] | None
    heads: Iterable[int] | None
    tokens: Iterable[int] | None


#: Compared by identity: most transfers are of whole blocks in all layers.
WHOLE: Final = Part(None, None, None)


class Terms(NamedTuple):
    """What most transfers leave as it is; `Agent.write` says what the fields mean.

    Attributes
    ----------
    lease
        The number of the peer's lease; None for any.
    hold
        What holds its layers back; True for ``Handle.layers_ready``.
    """

    priority: int
    integrity: bool | None
    lease: int | None
    hold: bool | After


#: Of priorities. By identity: what only equals it, as False does, is for native code to judge.
FIRST: Final = 0
#: Made once: a tuple for each transfer would take 0.2 us of the 2 that a post takes.
USUAL: Final = Terms(0, None, None, False)


def terms_of(priority: int, integrity: bool | None, lease: int | None, hold: bool | After) -> Terms:
    """Returns what is not `USUAL`.

    Raises
    ------
    UsageError
        ``invalid-argument``: `integrity` is no bool. Native code looks at the others.
    """
    if integrity is not None:
        check_kind(integrity, "integrity", bool, "True, False or None")
    return Terms(priority, integrity, lease, hold)


class Expected(NamedTuple):
    """What an expectation lets in, and what has to come.

    Attributes
    ----------
    blocks
        Of region `region`, uint32.
    first_layer, num_layers
        In the region's numbers.
    block_tokens, first_token, end_token, num_heads
        Every head of the tokens from `first_token` to before `end_token`, counted over the blocks as they are
        named.
    peer
        Whose writes; None for any peer's.
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
    """A lease that is to be.

    Attributes
    ----------
    peer
        Who holds it; None for the bearer's, which is one to read and not renewable.
    holder
        Of a bearer's: the name of the agents that may use it, or with ``/*`` at its end the beginning of
        their names; empty for any.
    number
        Of a bearer's: as it was drawn; None draws one.
    blocks
        Of region `region`, uint32; None for all.
    allow
        Of a bearer's: a pattern of certificates' identities; empty for any.
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
    """A copy program of a session; kvxfer/plan/program.py has what the arrays hold."""

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
