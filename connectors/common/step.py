"""What the scheduler half tells the worker halves in each step of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import kvxfer
from kvxfer.connectors.common.appointment import Appointment
from kvxfer.connectors.common.handover import Handover
from kvxfer.directory import Entry


@dataclass(frozen=True, slots=True)
class OwnRank:
    """Where a worker's agent is; its scheduler half tells it with each finished request.

    Attributes
    ----------
    agent
        Who it is, and where other engines reach it.
    pages_per_block
        For each cache group, pages of its region in a block of the engine.
    """

    agent: Entry
    pages_per_block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks of a prompt whose last token is computed in this step: they may be read by the leases' tokens.

    Attributes
    ----------
    leases
        Tokens, one for each cache group, drawn by the scheduler half: it has to tell them before it
        hears of the workers again.
    tables
        For each cache group its blocks; 0 for none.
    readers
        Engines that will read, by `engine_name`, and each of them; none where any may that has a token.
    is_return
        Whether it was decoded here, and is kept for the next turn's prefill.
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
        The push's, as the router drew it.
    prompt
        `prompt_digest` of the request.
    tables
        For each cache group its blocks up to the chunk's last token; 0 for none.
    first_token, stop_token, num_tokens
        The chunk, and how long the prompt is.
    readers
        Engines that it is pushed to, and each of them; none where the router names none.
    trace
        The request's, as `EngineRequest` has it.
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
    """What a pushed request still has of its prompt's blocks: those that left a window are 0.

    Attributes
    ----------
    tables
        For each cache group, as its last chunk told them.
    """

    request_id: str
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """A request whose prompt is computed elsewhere.

    Attributes
    ----------
    source
        A handover, where decode reads when prefill has ended; an appointment, where prefill writes as
        it computes; or why nothing can be brought.
    tables
        For each cache group this engine's blocks of the whole prompt; 0 for none.
    first_token, num_tokens
        Which tokens of the prompt are missing here, from the first to before the last number.
    waits
        Whether this step's forward waits for it, layer by layer.
    code
        Where nothing can be brought, why in one word.
    trace
        The request's, as `EngineRequest` has it.
    """

    request_id: str
    source: Handover | Appointment | str
    tables: tuple[tuple[int, ...], ...]
    first_token: int
    num_tokens: int
    waits: bool = False
    code: str = "bad-handover"
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that waits here for its turn, whose prompt another engine keeps for it."""

    request_id: str
    source: Handover | Appointment


@dataclass(frozen=True, slots=True)
class News:
    """What a worker has heard of requests that are kept here, since it was asked last.

    Attributes
    ----------
    claimed
        Of which a reader's engine has said that it knows them.
    returning
        Of these, ones that are being read: their blocks come back within moments.
    read
        That were read by all who are known to come, and may be shared by others: each as often as workers
        say so.
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
    """What a step asks of the workers.

    Attributes
    ----------
    grants, chunks
        Of prompts that are computed here: to let be read, to push.
    withdrawn
        Of these, requests whose blocks are not theirs any more.
    preempted
        Pushed requests that have lost all their blocks and will be computed again.
    remainders
        Pushed requests that have lost some.
    fetches, abandoned
        Prompts that are computed elsewhere: to bring here, to stop bringing.
    released
        Prompts that are computed elsewhere and not wanted: prefill need not keep them.
    claimed, unclaimed
        Prompts that are computed elsewhere: to be kept there until this engine comes to them, and no more.
    given_way
        Requests that are kept here, and are not any more: others need their blocks.
    num_running
        Requests that are computed in this step; where there is none, the engine asks only what has ended.
    """

    grants: list[Grant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    remainders: list[Remainder] = field(default_factory=list)
    fetches: list[FetchOrder] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    released: list[Handover | Appointment] = field(default_factory=list)
    claimed: list[Claimed] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)
    given_way: list[str] = field(default_factory=list)
    num_running: int = field(default=1, compare=False)  # of the engine, and no order
