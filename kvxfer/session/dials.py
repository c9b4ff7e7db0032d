"""Dials in progress: callers that ask for one agent at once share one attempt to open a session with it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvxfer._native import CODES, AgentCore, NativeError
from kvxfer.errors import PeerError
from kvxfer.threads import start_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kvxfer.peer import Peer
    from kvxfer.session.completion import Key
    from kvxfer.session.peer_table import PeerTable

_GAVE_UP: Final = ("cancelled", "the caller of connect() gave up")


class Dial:
    """One attempt. All but `session` belongs to `Dials`.

    Attributes
    ----------
    session
        The session's number, once the address has been resolved.
    ends_at
        When the attempt ends, by `time.monotonic`; a caller with more time then begins another.
    end
        Code and words for the peer, if no caller takes the session.
    """

    def __init__(self, incarnation: bytes | None, address: str, ends_at: float) -> None:
        from concurrent.futures import Future

        self.incarnation = incarnation
        self.address = address
        self.ends_at = ends_at
        self.end = _GAVE_UP
        self.session: Future[int] = Future()
        self.session.set_running_or_notify_cancel()  # so that one caller's cancellation leaves it as it is
        self.num_callers = 1
        self.is_taken = False

    def is_for(self, incarnation: bytes | None, address: str) -> bool:
        """Whether it calls this agent, or this address, whoever is there."""
        return self.address == address or (incarnation is not None and self.incarnation == incarnation)

    @property
    def has_failed(self) -> bool:
        """Whether it ended before it had a session."""
        return self.session.done() and self.session.exception() is not None

    @property
    def has_session(self) -> bool:
        """Whether `session` has a number."""
        return self.session.done() and self.session.exception() is None

    @property
    def key(self) -> Key:
        """Under which `Completions` tells of its session; that of no session if it has none."""
        return "peer", self.session.result() if self.has_session else 0

    def opens(self, peer: Peer) -> bool:
        """Whether `peer` is its session."""
        return self.has_session and self.session.result() == peer.id


class Dials:
    """The attempts of one agent that callers wait for.

    A session that an attempt opens is ended if every caller of the attempt has left without it. Once a caller
    has taken it, connecting ends it no more.
    """

    def __init__(self, core: AgentCore, peers: PeerTable) -> None:
        self._core = core
        self._peers = peers
        self._dials: list[Dial] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def joined(self, incarnation: bytes | None, address: str, ends_at: float) -> Iterator[Dial | Peer]:
        """Yields the open session with an agent, or else the attempt that the caller shares within the block.

        Parameters
        ----------
        incarnation
            The agent's; None for the agent at `address`.
        ends_at
            The end of an attempt that begins here.
        """
        with self._lock:
            peer = self._peers.first_with(incarnation, address)
            dial = self._find(peer, incarnation, address)
            begins = dial is None and peer is None
            if dial is not None:
                dial.num_callers += 1
            elif peer is None:
                dial = Dial(incarnation, address, ends_at)
                self._dials.append(dial)
        if dial is None:
            assert peer is not None
            yield peer
            return
        try:
            if begins:
                self._begin(dial)
            yield dial
        finally:
            self._leave(dial)

    def take(self, dial: Dial, peer: Peer) -> Peer:
        """Returns the one session with the agent that a dial has reached: `peer`, or another.

        Both ends may have called, or one end by two addresses. Either end may use the other session by now,
        so it stays.
        """
        with self._lock:
            dial.is_taken = True
            for other in self._peers.all_with(peer.incarnation):
                # Its own callers may still leave it.
                if not any(each.opens(other) and not each.is_taken for each in self._dials):
                    return other
        return peer

    def retire(self, dial: Dial) -> None:
        """No further caller joins an attempt that has failed."""
        with self._lock:
            if dial in self._dials:
                self._dials.remove(dial)

    # ---- inside -----------------------------------------------------------------------------

    def _find(self, peer: Peer | None, incarnation: bytes | None, address: str) -> Dial | None:
        """Returns the attempt that has opened `peer` and may still end it, or one that is under way."""
        for dial in self._dials:
            if dial.is_for(incarnation, address) if peer is None else dial.opens(peer):
                return dial
        return None

    def _begin(self, dial: Dial) -> None:
        try:
            if _is_literal(dial.address):
                self._call(dial)
            else:  # a name server may take long
                start_thread(self._call, "kvxfer-dial", dial)
        except BaseException:  # an interrupt of this caller, or no thread can be started
            self._fail(dial, PeerError(f"{dial.address} could not be dialled: try again", code="unreachable"))
            raise

    def _call(self, dial: Dial) -> None:
        try:
            session = self._core.begin_connect(dial.address, max(dial.ends_at - time.monotonic(), 0.0))
        except Exception as error:
            self._fail(dial, error)
            return
        with self._lock:
            dial.session.set_result(session)
            if not dial.num_callers:
                self._hang_up(dial)

    def _fail(self, dial: Dial, error: Exception) -> None:
        self.retire(dial)
        dial.session.set_exception(error)

    def _leave(self, dial: Dial) -> None:
        with self._lock:
            dial.num_callers -= 1
            if dial.num_callers:
                return
            if dial in self._dials:
                self._dials.remove(dial)
            if not dial.is_taken and dial.has_session:
                self._hang_up(dial)

    def _hang_up(self, dial: Dial) -> None:
        """Ends the session under the lock, so that no later caller finds it open."""
        code, words = dial.end
        with contextlib.suppress(NativeError):  # it was lost meanwhile, or the agent is closed
            self._core.disconnect(dial.session.result(), CODES[code], words)


def _is_literal(address: str) -> bool:
    host = address.partition("://")[2].rpartition(":")[0]
    return ":" in host or host.replace(".", "").isdigit()
