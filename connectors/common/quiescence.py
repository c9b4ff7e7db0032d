"""Waiting until nothing moves any more: before blocks are used for something else."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

import kvxfer

_log = logging.getLogger("kvxfer")


def is_quiet_by(work: kvxfer.Group, deadline: float) -> bool:
    """Waits until all of `work` has ended, well or not, and returns whether that came in time.

    `deadline` is of `time.monotonic`; `math.inf` waits without bound.
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

    Sessions with `peers` end where they do not let go in time.
    """
    if is_quiet_by(work, time.monotonic() + patience_s):
        return
    for peer in peers:
        _log.warning("kvxfer: %s does not let go of a transfer that was cancelled", peer.name)
        try:
            peer.disconnect()
        except kvxfer.KvxferError:
            pass  # it is gone by itself
    # What a GPU has begun to read ends as it ends, whoever has gone.
    is_quiet_by(work, math.inf)
