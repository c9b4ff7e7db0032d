"""The orders that the scheduler half gives the worker halves in each step, and the news that come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import kvxfer
from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.handover import Handover
from kvxfer.directory import Entry


@dataclass(frozen=True, slots=True)
class OwnRank:
    """A worker's agent; the scheduler half names it in the handover of each finished request.

    Attributes
    ----------
    agent
        The agent's identity, and the address at which other engines reach it.
    pages_per_block
        For each cache group, pages of its region in a block of the engine.
    """

    agent: Entry
    pages_per_block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Grants leases on the blocks of a prompt whose last token is computed in this step.

    Attributes
    ----------
    leases
        Tokens, one for each cache group. The scheduler half draws them, because the response carries them
        before the workers report back.
    tables
        For each cache group its blocks; 0 for none.
    readers
        The engines that will read, by `engine_name`. If empty, any engine with a token may read.
    is_return
        Whether the request was decoded here, and is kept for the next turn's prefill.
    """

    request_id: str
    leases: tuple[kvxfer.LeaseToken, ...]
    tables: tuple[tuple[int, ...], ...]
    readers: tuple[str, ...] = ()
    is_return: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a pushed prompt that are computed in this step.

    Attributes
    ----------
    key
        The key of the push, as the router drew it.
    prompt
        `prompt_digest` of the request.
    tables
        For each cache group its blocks up to the chunk's last token; 0 for none.
    first_token, stop_token, num_tokens
        The chunk's range, and the length of the prompt.
    readers
        The engines that the router names as readers; empty if it names none.
    trace
        The request's trace, as in `EngineRequest`.
    """

    request_id: str
    key: bytes
    prompt: str
    tables: tuple[tuple[int, ...], ...]
    first_token: int
    stop_token: int
    num_tokens: int
    readers: tuple[str, ...] = ()
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Remainder:
    """The prompt blocks that a pushed request still has: blocks that left a window are 0.

    Attributes
    ----------
    tables
        For each cache group, the blocks of the last chunk, without those that left a window.
    """

    request_id: str
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Unfetchable:
    """Why nothing can be fetched of a prompt that another engine was to compute: in words, and in one."""

    why: str
    code: str = "bad-handover"
    ranks: ClassVar[tuple[Entry, ...]] = ()


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """The order to fetch a request whose prompt another engine computes.

    Attributes
    ----------
    source
        A handover: decode reads when prefill has ended. An expected push: prefill writes as it computes.
    tables
        For each cache group this engine's blocks of the whole prompt; 0 for none.
    first_token, num_tokens
        The tokens that are missing here: from `first_token` up to, and without, `num_tokens`.
    waits
        Whether this step's forward waits for it, layer by layer.
    trace
        The request's trace, as in `EngineRequest`.
    """

    request_id: str
    source: Handover | ExpectedPush | Unfetchable
    tables: tuple[tuple[int, ...], ...]
    first_token: int
    num_tokens: int
    waits: bool = False
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that waits here for its turn while another engine keeps its prompt."""

    request_id: str
    source: Handover | ExpectedPush


@dataclass(frozen=True, slots=True)
class News:
    """A worker's news about requests that are kept here, since the last call.

    Attributes
    ----------
    claimed
        Requests that a reader's engine has claimed.
    returning
        The claimed requests that are being read: their blocks come back within moments.
    read
        Requests that all known readers have read, while unknown readers may still come. Each is listed once
        for each worker that reports it.
    """

    claimed: frozenset[str] = frozenset()
    returning: frozenset[str] = frozenset()
    read: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.claimed or self.read)

    def __or__(self, other: News) -> News:
        return News(self.claimed | other.claimed, self.returning | other.returning, self.read + other.read)


@dataclass(slots=True)
class Step:
    """The orders for the workers in one step.

    Attributes
    ----------
    grants, chunks
        Prompts computed here: leases to grant, tokens to push.
    withdrawn
        Granted or pushed requests whose blocks are no longer theirs.
    preempted
        Pushed requests that have lost all their blocks and will be computed again.
    remainders
        Pushed requests that have lost some of their blocks.
    fetches, abandoned
        Prompts computed elsewhere: fetches to begin, fetches to stop.
    released
        Prompts computed elsewhere that this engine does not want: prefill need not keep them.
    claimed, unclaimed
        Prompts computed elsewhere: heartbeats to begin, and to end.
    given_way
        Kept requests that give way, because other requests need their blocks.
    num_running
        Requests that are computed in this step. If 0, the engine only asks what has ended.
    """

    grants: list[Grant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    remainders: list[Remainder] = field(default_factory=list)
    fetches: list[FetchOrder] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    released: list[Handover | ExpectedPush] = field(default_factory=list)
    claimed: list[Claimed] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)
    given_way: list[str] = field(default_factory=list)
    num_running: int = field(default=1, compare=False)  # a fact about the engine, not an order
