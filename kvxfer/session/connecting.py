"""Connects to an address: the result is a session, or no session at either end."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from kvxfer._native import CODES, AgentCore, NativeError
from kvxfer.arguments import check_kind, seconds
from kvxfer.directory.entry import Entry
from kvxfer.errors import PeerError, invalid, translate
from kvxfer.naming import check_name
from kvxfer.region import RegionDescriptor
from kvxfer.threads import start_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kvxfer.peer import Peer
    from kvxfer.session.completion import Completions
    from kvxfer.session.name_lookup import NameLookup
    from kvxfer.session.peer_table import PeerTable
    from kvxfer.session.region_table import RegionTable

# Native code has the same deadline and better error messages, so Python waits this much longer for them.
_LAST_WORD_S: Final = 0.25


class Connecting:
    """One attempt to connect. Call `wait` or `wait_blocking` within its ``with`` block.

    An exception that leaves the block, including cancellation and interrupts, ends the session at both ends.

    Parameters
    ----------
    core, completions, peers, regions, names
        The agent's.
    target, timeout_s
        As in ``agent.connect``.
    default_s
        The option ``connect_timeout_s``.

    Raises
    ------
    UsageError
        `target` is not valid or is this agent itself, or `timeout_s` is not a valid time.
    """

    def __init__(
        self,
        core: AgentCore,
        completions: Completions,
        peers: PeerTable,
        regions: RegionTable,
        names: NameLookup,
        target: str | Entry | RegionDescriptor,
        timeout_s: float | None,
        default_s: float,
    ) -> None:
        if isinstance(target, RegionDescriptor):
            target = target.owner
        what = 'an address ("tcp://host:port"), a name to look up, an Entry, or a RegionDescriptor'
        check_kind(target, "target", str | Entry, what)
        self._limit = "option connect_timeout_s" if timeout_s is None else "timeout_s"
        self._timeout_s = seconds(default_s if timeout_s is None else timeout_s, "timeout_s")
        completions.check()
        self._core = core
        self._completions = completions
        self._peers = peers
        self._regions = regions
        self._names = names
        # The expected agent, if known; the caller's text for it; the address to dial, "" for a name.
        self._owner = target if isinstance(target, Entry) else None
        self._target = target.name if isinstance(target, Entry) else target
        self._address = target.address if isinstance(target, Entry) else target if "://" in target else ""
        self._shares_session = self._owner is not None
        self._ends_at = time.monotonic() + self._timeout_s
        self._dialled: Future[int] | None = None
        self._is_given_up = threading.Event()
        if self._owner is not None and self._owner.incarnation == core.incarnation:
            raise invalid(f"{self._target} is this agent itself: connect to another")

    def __enter__(self) -> Connecting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        self._is_given_up.set()
        if self._dialled is not None:
            self._dialled.add_done_callback(self._abandon)
        if isinstance(error, NativeError):
            raise translate(error, peer=self._target) from None

    async def wait(self) -> Peer:
        """Returns the peer once the session is open, its rails are up and its regions are known."""
        import asyncio

        if (peer := self._known()) is not None:
            return peer
        with contextlib.suppress(asyncio.TimeoutError):  # _opened raises, with the details
            async with asyncio.timeout(self._left_s() + _LAST_WORD_S):
                peer_id = await asyncio.wrap_future(self._dial())
                await self._completions.until(("peer", peer_id), lambda: self._peers.settled(peer_id))
        return self._opened()

    def wait_blocking(self) -> Peer:
        """Returns the same: the blocking twin of `wait`."""
        if (peer := self._known()) is not None:
            return peer
        with contextlib.suppress(TimeoutError):
            peer_id = self._dial().result(self._left_s() + _LAST_WORD_S)
            self._completions.block_until(lambda: self._peers.settled(peer_id), self._left_s() + _LAST_WORD_S)
        return self._opened()

    # ---- inside -----------------------------------------------------------------------------

    def _left_s(self) -> float:
        return max(self._ends_at - time.monotonic(), 0.0)

    def _known(self) -> Peer | None:
        """Returns the peer if a session with this incarnation of the agent is open already."""
        return None if self._owner is None else self._peers.oldest_of(self._owner.incarnation)

    def _dial(self) -> Future[int]:
        """Returns a future with the session's number, at once; a directory or a name server may take long."""
        from concurrent.futures import Future

        self._dialled = dialled = Future[int]()
        dialled.set_running_or_notify_cancel()
        if not self._address:
            self._names.check(check_name(self._target, "target, a name to look up,"))
        if _is_literal(self._address):
            self._begin(dialled)
        else:
            start_thread(self._begin, "kvxfer-dial", dialled)
        return dialled

    def _begin(self, dialled: Future[int]) -> None:
        try:
            if not self._address:
                self._owner = self._found()
                self._address = self._owner.address
            if self._is_given_up.is_set():
                raise self._too_late("the caller gave up")
            dialled.set_result(self._core.begin_connect(self._address, self._left_s()))
        except BaseException as error:
            dialled.set_exception(error)

    def _found(self) -> Entry:
        """Returns the target's directory entry, if it is the agent that the caller means."""
        try:
            entry = self._names.look_up(self._target, self._left_s, self._is_given_up.is_set)
        except PeerError as error:
            if self._left_s():
                raise
            raise self._too_late(str(error.args[0])) from None
        if self._owner is not None and entry.incarnation != self._owner.incarnation:
            raise self._restarted("the directory has")
        if not entry.address:
            raise PeerError(f"{self._target} does not accept peers", code="unreachable", peer=self._target)
        return entry

    def _abandon(self, dialled: Future[int]) -> None:
        if dialled.exception() is None:
            with contextlib.suppress(NativeError):  # the agent is closed and has no session
                self._core.disconnect(dialled.result(), CODES["cancelled"], "the caller of connect() gave up")

    def _opened(self) -> Peer:
        """Returns the peer of a session that has settled, or raises the reason why there is none."""
        assert self._dialled is not None
        if not self._dialled.done():
            raise self._too_late("its name is still being looked up")
        peer_id = self._dialled.result()
        info = self._core.peer(peer_id)
        if info["state"] == "connecting":
            raise self._too_late(_progress_of(info))
        peer = self._peers.opened(peer_id, self._target, self._address)
        if self._owner is not None:
            peer = self._of_owner(peer)
        self._regions.end_if_unlike(peer)
        return peer

    def _of_owner(self, peer: Peer) -> Peer:
        """Returns the one session with the meant agent, or raises if another agent answered."""
        assert self._owner is not None
        if peer.incarnation != self._owner.incarnation:
            error = self._restarted(f"{self._address} is {peer.name} with")
            self._end(peer, "peer-restarted", str(error.args[0]))
            raise error
        # One host can be written in many ways, and the other end may have called meanwhile.
        before = self._known() if self._shares_session else None
        if before is None or before.id >= peer.id:
            return peer
        self._end(peer, "cancelled", "another session with the same agent is open already")
        return before

    def _end(self, peer: Peer, code: str, words: str) -> None:
        with contextlib.suppress(NativeError):  # the session was lost meanwhile
            self._core.disconnect(peer.id, CODES[code], words)

    def _restarted(self, why: str) -> PeerError:
        return PeerError(
            f"{why} another incarnation of {self._target} than the requested one: it was restarted, or "
            "another agent has its address; get a new descriptor, or connect by name",
            code="peer-restarted",
            peer=self._target,
        )

    def _too_late(self, why: str) -> PeerError:
        return PeerError(
            f"no session with {self._target} within {self._timeout_s:g} s ({self._limit}): {why}",
            code="unreachable",
            peer=self._target,
        )


def _is_literal(target: str) -> bool:
    host = target.partition("://")[2].rpartition(":")[0]
    return ":" in host or host.replace(".", "").isdigit()


def _progress_of(info: dict[str, Any]) -> str:
    if not info["name"]:
        return "the other end has not named itself"
    notes = "; ".join(info["notes"])
    return f"{info['name']} answered, but no rail to it is up{': ' + notes if notes else ''}"
