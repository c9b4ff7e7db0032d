"""Waits until transfers and leases no longer touch their blocks, before the blocks are reused.

Every wait has an end. A session that does not let go is closed. A copy that a GPU has begun goes on after
that and ends by itself; if even that does not happen, an `AgentError` says so, because blocks that may still
be read or written must not be reused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Final

import kvxfer

_log = logging.getLogger("kvxfer")

# How long a copy may take that a GPU has begun: it may be queued behind the kernels of a whole forward.
_GPU_S: Final = 60.0


def is_quiet_by(work: kvxfer.Group, deadline: float) -> bool:
    """Waits until all of `work` has ended, with or without success; returns whether that came in time.

    `deadline` is a time of `time.monotonic`.
    """
    try:
        work.wait(max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        return False
    except kvxfer.KvxferError:
        pass  # it ended
    return True


def quiesce(work: kvxfer.Group, peers: Iterable[kvxfer.Peer], patience_s: float) -> None:
    """Returns when no byte of `work`, which was cancelled, moves any more.

    If `peers` do not let go in time, their sessions are ended.

    Raises
    ------
    AgentError
        ``system``: it moves even after the end of the sessions, for a minute.
    """
    if is_quiet_by(work, time.monotonic() + patience_s):
        return
    for peer in peers:
        _log.warning("kvxfer: a cancelled transfer with %s does not end: its session is closed", peer.name)
        try:
            peer.disconnect()
        except kvxfer.KvxferError:
            pass  # the session has ended already
    if not is_quiet_by(work, time.monotonic() + _GPU_S):
        raise _stuck(f"{work!r} does not end")


def has_ended(lease: kvxfer.Lease) -> bool:
    """Revokes a lease without waiting; returns whether its blocks may be reused. May be called again."""
    try:
        lease.revoke_blocking(0.0)
    except TimeoutError:
        return False  # a device still copies
    except kvxfer.KvxferError:
        pass  # the agent is closed, and no lease is left
    return True


def revoke(leases: Iterable[kvxfer.Lease]) -> None:
    """Revokes leases; returns when their blocks may be reused.

    Raises
    ------
    AgentError
        ``system``: a device still copies after a minute.
    """
    ending = [lease for lease in leases if not has_ended(lease)]
    deadline = time.monotonic() + _GPU_S
    for lease in ending:
        try:
            lease.revoke_blocking(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            raise _stuck(f"{lease!r} does not end") from None
        except kvxfer.KvxferError:
            pass  # the agent is closed


def deregister(regions: Iterable[kvxfer.Region]) -> None:
    """Deregisters regions; returns when no peer touches a byte of them any more.

    Raises
    ------
    AgentError
        ``system``: a device still copies after a minute.
    """
    for region in regions:
        try:
            region.deregister_blocking(_GPU_S)
        except TimeoutError:
            raise _stuck(f"a copy to or from {region!r} does not end") from None


def _stuck(what: str) -> kvxfer.AgentError:
    return kvxfer.AgentError(
        f"{what} within {_GPU_S:g} s although nothing at this end permits it any more: a GPU hangs, and "
        "blocks of the cache may still be read or written. Restart this engine",
        code="system",
    )
