"""Connecting: from an address to a session, or to no session at either end."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, cast

from kvxfer._native import CODES, AgentCore, NativeError
from kvxfer.arguments import seconds
from kvxfer.errors import AgentError, PeerError, UsageError, translate

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kvxfer.directory import Directory
    from kvxfer.peer import Peer
    from kvxfer.session.completion import Completions
    from kvxfer.session.peer_table import PeerTable
    from kvxfer.session.region_table import RegionTable

# Native code has the same deadline, and ends an attempt in better words: it is given so long to say them.
_LAST_WORD_S: Final = 0.25


class Connecting:
    """One attempt to connect: `wait` or `wait_blocking`, in a ``with`` block that returns the peer.

    An exception that leaves the block, cancellation and interrupts too, ends the session at both ends.

    Parameters
    ----------
    core, completions, peers, regions, directory
        The agent's.
    target, timeout_s
        As in ``agent.connect``.
    default_s
        The option ``connect_timeout_s``.

    Raises
    ------
    UsageError
        `target` is no text, or `timeout_s` no time.
    """

    def __init__(
        self,
        core: AgentCore,
        completions: Completions,
        peers: PeerTable,
        regions: RegionTable,
        directory: Directory | None,
        target: str,
        timeout_s: float | None,
        default_s: float,
    ) -> None:
        if not isinstance(cast(object, target), str):
            raise UsageError(
                f'target is "tcp://host:port", as Agent.address has it, or a name to look up, not {target!r}',
                code="invalid-argument",
            )
        self._limit = "option connect_timeout_s" if timeout_s is None else "timeout_s"
        self._timeout_s = seconds(default_s if timeout_s is None else timeout_s, "timeout_s")
        completions.check()
        self._core = core
        self._completions = completions
        self._peers = peers
        self._regions = regions
        self._directory = directory
        self._target = target
        self._ends_at = time.monotonic() + self._timeout_s
        self._dialled: Future[int] | None = None

    def __enter__(self) -> Connecting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self._dialled is not None:
            self._dialled.add_done_callback(self._abandon)
        if isinstance(error, NativeError):
            raise translate(error, peer=self._target) from None

    async def wait(self) -> Peer:
        """Returns the peer once the session is open, its rails are up and its regions are known."""
        import asyncio

        if "://" not in self._target:
            self._target = await self._known_directory().resolve(self._target, self._left_s())
        with contextlib.suppress(asyncio.TimeoutError):  # said by _opened, with what there is
            async with asyncio.timeout(self._left_s() + _LAST_WORD_S):
                peer_id = await asyncio.wrap_future(self._dial())
                await self._completions.until(("peer", peer_id), lambda: self._peers.settled(peer_id))
        return self._opened()

    def wait_blocking(self) -> Peer:
        """Returns the same: the blocking twin of `wait`."""
        if "://" not in self._target:
            self._target = self._known_directory().resolve_blocking(self._target, self._left_s())
        with contextlib.suppress(TimeoutError):
            peer_id = self._dial().result(self._left_s() + _LAST_WORD_S)
            self._completions.block_until(lambda: self._peers.settled(peer_id), self._left_s() + _LAST_WORD_S)
        return self._opened()

    # ---- inside -----------------------------------------------------------------------------

    def _left_s(self) -> float:
        return max(self._ends_at - time.monotonic(), 0.0)

    def _known_directory(self) -> Directory:
        if self._directory is None:
            raise UsageError(
                f"{self._target!r} is a name, and this agent has no directory to look it up in: "
                'pass Agent(..., directory=...), or connect to an address ("tcp://host:port")',
                code="invalid-argument",
            )
        return self._directory

    def _dial(self) -> Future[int]:
        """Returns the session's number, soon: a name server may take longer than the caller would wait."""
        from concurrent.futures import Future

        self._dialled = dialled = Future[int]()
        dialled.set_running_or_notify_cancel()
        if _is_literal(self._target):
            self._begin(dialled)
        else:
            import threading

            threading.Thread(target=self._begin, args=(dialled,), name="kvxfer-dial", daemon=True).start()
        return dialled

    def _begin(self, dialled: Future[int]) -> None:
        try:
            dialled.set_result(self._core.begin_connect(self._target, self._left_s()))
        except BaseException as error:
            dialled.set_exception(error)

    def _abandon(self, dialled: Future[int]) -> None:
        if dialled.exception() is None:
            with contextlib.suppress(NativeError):  # closed: there is none any more
                self._core.disconnect(dialled.result(), CODES["cancelled"], "connect() was given up")

    def _opened(self) -> Peer:
        """Returns the peer of a session that has settled, or raises why there is or can be none."""
        assert self._dialled is not None
        if not self._dialled.done():
            raise self._too_late("its name is still being looked up")
        peer_id = self._dialled.result()
        info = self._core.peer(peer_id)
        if info["state"] == "connecting":
            raise self._too_late(_progress_of(info))
        try:
            peer = self._peers.opened(peer_id, self._target)
        except PeerError as error:
            if error.code == "closed":
                raise AgentError(str(error.args[0]), code="closed") from None
            raise
        return self._regions.admit(peer)

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
        return "nothing there has said who it is"
    notes = "; ".join(info["notes"])
    return f"{info['name']} answered, but no rail to it is up{': ' + notes if notes else ''}"
