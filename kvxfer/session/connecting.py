"""Connects to an address: the result is a session, or no session at either end."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from kvxfer._native import AgentCore, NativeError
from kvxfer.arguments import check_kind, seconds
from kvxfer.directory.entry import Entry
from kvxfer.errors import KvxferError, NoAnswerError, PeerError, invalid, translate
from kvxfer.naming import check_name
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.session.dials import Dial
from kvxfer.threads import start_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kvxfer.peer import Peer
    from kvxfer.session.completion import Completions
    from kvxfer.session.dials import Dials
    from kvxfer.session.name_lookup import NameLookup
    from kvxfer.session.peer_table import PeerTable
    from kvxfer.session.region_table import RegionTable

# Native code has the same deadline and better error messages, so Python waits this much longer for them.
_LAST_WORD_S: Final = 0.25


class Connecting:
    """One caller of ``connect``. Call `wait` or `wait_blocking` within its ``with`` block.

    Callers that ask for one agent at once share a dial (`Dials`). An exception that leaves the block,
    including cancellation and interrupts, ends this caller's part in it; with the last caller the session
    ends at both ends.

    Parameters
    ----------
    core, completions, peers, dials, regions, names
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
        dials: Dials,
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
        self._dials = dials
        self._regions = regions
        self._names = names
        # The expected agent, if known; the caller's text for it; the address to dial, "" for a name.
        self._owner = target if isinstance(target, Entry) else None
        self._target = target.name if isinstance(target, Entry) else target
        self._address = target.address if isinstance(target, Entry) else target if "://" in target else ""
        self._ends_at = time.monotonic() + self._timeout_s
        self._is_given_up = threading.Event()
        if self._owner is not None and self._owner.incarnation == core.incarnation:
            raise invalid(f"{self._target} is this agent itself: connect to another")

    def __enter__(self) -> Connecting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_given_up.set()
        if isinstance(error, NativeError):
            raise translate(error, peer=self._target) from None

    async def wait(self) -> Peer:
        """Returns the peer once the session is open, its rails are up and its regions are known."""
        import asyncio

        if self._must_look_up():
            looked_up = self._looking_up()
            with contextlib.suppress(Exception):  # _look_up_ended raises, with the details
                async with asyncio.timeout(self._left_s() + _LAST_WORD_S):
                    await asyncio.wrap_future(looked_up)
            self._look_up_ended(looked_up)
        while True:
            with self._dials.joined(self._incarnation, self._address, self._ends_at) as dial:
                if not isinstance(dial, Dial):
                    return dial
                with contextlib.suppress(asyncio.TimeoutError):  # _opened raises, with the details
                    async with asyncio.timeout(self._left_s() + _LAST_WORD_S):
                        with contextlib.suppress(Exception):  # likewise
                            await asyncio.wrap_future(dial.session)
                        await self._completions.until(dial.key, partial(self._is_settled, dial))
                if (peer := self._opened(dial)) is not None:
                    return peer

    def wait_blocking(self) -> Peer:
        """Returns the same: the blocking twin of `wait`."""
        if self._must_look_up():
            looked_up = self._looking_up()
            with contextlib.suppress(TimeoutError):
                looked_up.exception(self._left_s() + _LAST_WORD_S)
            self._look_up_ended(looked_up)
        while True:
            with self._dials.joined(self._incarnation, self._address, self._ends_at) as dial:
                if not isinstance(dial, Dial):
                    return dial
                with contextlib.suppress(TimeoutError):
                    dial.session.exception(self._left_s() + _LAST_WORD_S)
                    self._completions.block_until(
                        partial(self._is_settled, dial), self._left_s() + _LAST_WORD_S
                    )
                if (peer := self._opened(dial)) is not None:
                    return peer

    # ---- the name ---------------------------------------------------------------------------

    def _must_look_up(self) -> bool:
        """Whether there is nothing to dial yet: a name, or an entry whose agent accepts nobody."""
        return not self._address and (
            self._owner is None or self._peers.first_with(self._owner.incarnation, "") is None
        )

    def _looking_up(self) -> Future[Entry]:
        """Returns a future with the target's entry, at once; a directory may take long."""
        from concurrent.futures import Future

        self._names.check(check_name(self._target, "target, a name to look up,"))
        looked_up = Future[Entry]()
        looked_up.set_running_or_notify_cancel()

        def look_up() -> None:
            try:
                looked_up.set_result(self._found())
            except BaseException as error:
                looked_up.set_exception(error)

        start_thread(look_up, "kvxfer-dial")
        return looked_up

    def _look_up_ended(self, looked_up: Future[Entry]) -> None:
        if not looked_up.done():
            raise self._too_late("its name is still being looked up")
        self._owner = looked_up.result()
        self._address = self._owner.address

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

    # ---- the dial ---------------------------------------------------------------------------

    @property
    def _incarnation(self) -> bytes | None:
        return None if self._owner is None else self._owner.incarnation

    def _left_s(self) -> float:
        return max(self._ends_at - time.monotonic(), 0.0)

    def _is_settled(self, dial: Dial) -> bool:
        return dial.has_failed or self._peers.settled(dial.session.result())

    def _opened(self, dial: Dial) -> Peer | None:
        """Returns the peer of a dial that has ended, or raises the reason why there is none.

        None: the dial had less time than this caller, who begins another.
        """
        try:
            if not dial.session.done():
                raise self._too_late("its name is still being looked up")
            peer_id = dial.session.result()
            info = self._core.peer(peer_id)
            if info["state"] == "connecting":
                raise self._too_late(_progress_of(info))
            peer = self._peers.opened(peer_id, self._target, dial.address)
        except (KvxferError, NativeError):
            if dial.ends_at < self._ends_at and time.monotonic() >= dial.ends_at and self._left_s():
                self._dials.retire(dial)
                return None
            raise
        if self._incarnation not in (None, peer.incarnation):
            error = self._restarted(f"{self._address} is {peer.name} with")
            dial.end = "peer-restarted", str(error.args[0])
            raise error
        taken = self._dials.take(dial, peer)
        if taken is peer:
            self._regions.end_if_unlike(peer)
        return taken

    def _restarted(self, why: str) -> PeerError:
        return PeerError(
            f"{why} another incarnation of {self._target} than the requested one: it was restarted, or "
            "another agent has its address; get a new descriptor, or connect by name",
            code="peer-restarted",
            peer=self._target,
        )

    def _too_late(self, why: str) -> PeerError:
        return NoAnswerError(
            f"no session with {self._target} within {self._timeout_s:g} s ({self._limit}): {why}",
            code="no-answer",
            peer=self._target,
        )


def _progress_of(info: dict[str, Any]) -> str:
    if not info["name"]:
        return "the other end has not named itself"
    notes = "; ".join(info["notes"])
    return f"{info['name']} answered, but no rail to it is up{': ' + notes if notes else ''}"
