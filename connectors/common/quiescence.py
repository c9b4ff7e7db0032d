"""Waits until transfers no longer touch their blocks, before the blocks are reused."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

import kvxfer

_log = logging.getLogger("kvxfer")


def is_quiet_by(work: kvxfer.Group, deadline: float) -> bool:
    """Waits until all of `work` has ended, with or without success; returns whether that came in time.

    `deadline` is a time of `time.monotonic`; `math.inf` waits without bound.
    """
    try:
        work.wait(None if deadline == math.inf else max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        return False
    except kvxfer.KvxferError:
        pass  # it ended
    return True


def quiesce(work: kvxfer.Group, peers: Iterable[kvxfer.Peer], patience_s: float) -> None:
    """Returns when no byte of `work`, which was cancelled, moves any more.

    If `peers` do not let go in time, their sessions are ended.
    """
    if is_quiet_by(work, time.monotonic() + patience_s):
        return
    for peer in peers:
        _log.warning("kvxfer: a cancelled transfer with %s does not end: its session is closed", peer.name)
        try:
            peer.disconnect()
        except kvxfer.KvxferError:
            pass  # the session has ended already
    # A read that a GPU has begun ends by itself, even if the peer is gone.
    is_quiet_by(work, math.inf)
