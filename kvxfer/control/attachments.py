"""The daemon's side of the attachment: accepts agents, keeps what they told, and calls them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.session.records import Record


class CallRefused(Exception):
    """An agent, or `Attachments` for it, did not do what was asked.

    Attributes
    ----------
    code
        Of docs/errors.md: ``not-permitted`` where the agent's ``daemon_may`` has it not, ``unsupported`` for
        a verb that it does not know, ``exhausted`` where too much is under way, and what its verbs raise.
    words
        What happened, for people.
    """

    def __init__(self, code: str, words: str) -> None:
        super().__init__(f"{words} [{code}]")
        self.code = code
        self.words = words


class AgentGone(Exception):
    """The agent is not attached, or went while a call was under way, which may have been done or not."""


@dataclass(slots=True)
class Attached:
    """An agent that is attached, as it told last. One object from its attachment to its going; read only.

    Attributes
    ----------
    name, incarnation, address
        As in directories; the incarnation in hexadecimal digits.
    pid, uid
        Of its process, as the kernel told them.
    host, version
        As it told them.
    may
        What it does for the daemon (`AgentOptions.daemon_may`).
    options
        Its `AgentOptions` as a JSON object, without the secret.
    attached_at
        Seconds since 1970.
    regions
        Objects with ``id``, ``name``, ``kind`` ("pool", "foreign", "gpu"), ``num_blocks``, ``nbytes``,
        ``layout`` (`KVLayout` as its JSON document) and ``notes``.
    peers
        One for each session: ``session`` (number), ``name``, ``incarnation``, ``address``, ``is_ours``,
        ``rails``, ``paths``, ``notes``, ``regions`` (names), ``budget``.
    leases
        As ``AgentCore.leases`` has them.
    stats
        `Agent.stats` without the peers.
    draining, draining_until_ns
        Whether it was asked to drain, and until when, by CLOCK_MONOTONIC.
    num_regions, num_peers, num_leases
        How many there are: of very many the first are told.
    clock_offset_ns
        What to add to its CLOCK_MONOTONIC for nanoseconds since 1970.
    records_dropped
        Records of transfers that it did not tell, since its making: they came faster than they were read.
    """

    name: str
    incarnation: str
    address: str
    pid: int
    uid: int
    host: str
    version: str
    may: tuple[str, ...]
    options: Mapping[str, Any]
    attached_at: float
    regions: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    leases: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    draining: bool = False
    draining_until_ns: int | None = None
    num_regions: int = 0
    num_peers: int = 0
    num_leases: int = 0
    clock_offset_ns: int = 0
    records_dropped: int = 0


class Attachments:
    """Accepts agents on ``agents.sock`` of a folder, keeps what they told, and calls them.

    All on one event loop, whose own methods these are; callbacks are called on it, must not block, and end
    the connection that made them raise. 256 agents may be attached; each may hold 4 MiB of buffers. One that
    is slow, or says what no agent says, loses its connection alone, and comes back if it is one.

    Parameters
    ----------
    folder
        The daemon's runtime folder; made (0700) where it is not there.
    on_records
        Called with the agent and records of transfers and expectations that have ended, oldest first.
    on_change
        Called with the agent and the names of what has changed: ``"attached"`` (all of it), ``"gone"``
        (it is in `agents` no more), or some of ``"regions"``, ``"peers"``, ``"leases"``, ``"stats"``,
        ``"draining"``.
    allowed_uids
        Users whose agents may attach; None for the daemon's own and root.
    """

    def __init__(
        self,
        folder: Path,
        *,
        on_records: Callable[[Attached, list[Record]], None],
        on_change: Callable[[Attached, frozenset[str]], None],
        allowed_uids: Collection[int] | None = None,
    ) -> None:
        self._folder = folder
        self._on_records = on_records
        self._on_change = on_change
        self._allowed_uids = allowed_uids
        #: Those that are attached, by incarnation (hexadecimal digits). Read only.
        self.agents: dict[str, Attached] = {}

    async def start(self) -> None:
        """Listens.

        Raises
        ------
        OSError
            The folder or socket cannot be made. ``BlockingIOError``: another daemon has the folder.
        PermissionError
            The folder belongs to another user, or others may write to it.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """Ends all connections, which agents take for the daemon's end, and the socket. Idempotent."""
        raise NotImplementedError

    async def call(
        self, incarnation: str, verb: str, args: Mapping[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Has an agent do something, and returns what it answers.

        Parameters
        ----------
        verb, args
            One of:

            - ``show.state`` {}: sections as `Attached` has them, of now.
            - ``show.transfers`` {most}: ``{"records": [...]}``: those that are open, as `Record` fields.
            - ``drain`` {deadline_s}: a number of seconds; None takes it back. ``{}``
            - ``move.read``, ``move.write`` {region, remote_agent, remote_region, src_blocks, dst_blocks,
              layers, lease, notify, timeout_s, priority, context}: all after `dst_blocks` may be left out.
              `remote_agent` is a name, an incarnation or an address, which is connected to; `layers` is
              [first, stop], `lease` a token's text, `notify` text. Returns when it is posted:
              ``{"session", "transfer", "is_source"}``; its record tells the end.
            - ``move.cancel`` {session, transfer, is_source}: ``{"found": bool}``
            - ``grant.grant`` {region, holder, blocks, mode, ttl_s}: `holder` is a name or None, a session's
              number to write; ``{"lease": number, "token": text}``
            - ``grant.revoke`` {lease}: a number; returns when the fence is complete. ``{"state": word}``
            - ``grant.extend`` {lease, ttl_s}.
            - ``settings.set`` {log_level}: ``{}``
        timeout_s
            How long the answer may take.

        Raises
        ------
        CallRefused
            The agent refused, or failed: nothing was done, unless the words say otherwise.
        AgentGone
            It is not attached, or went.
        TimeoutError
            No answer in time; what was asked may be done yet.
        """
        raise NotImplementedError
