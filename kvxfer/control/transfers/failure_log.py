"""Lines of the daemon's log about failed transfers: one line for a lost peer, not one for each transfer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from kvxfer.control.state.transfer_table import End
from kvxfer.log import logger

# Agents report failures with a common cause within half a second.
_GATHER_S: Final = 1.0
#: Until the next line about the same two agents and the same code.
QUIET_S: Final = 60.0
# Pairs of agents with a code; further ones share one line.
_MOST_KEPT: Final = 1024
# Transfers whose other end may be reported in the same second.
_MOST_SEEN: Final = 8192

_Key = tuple[str, str, str]


@dataclass(slots=True)
class _Kept:
    count: int = 0
    transfer: str = ""
    context: str = ""
    message: str = ""
    quiet_until_s: float = 0.0


class FailureLog:
    """Gathers failed ends for a second, then writes one line for each pair of agents and code.

    A transfer counts once, with the end that is reported first. The next line about the same pair and code
    comes after a minute at the earliest, with the count of all failures meanwhile. Runs on the event loop.
    """

    def __init__(self) -> None:
        self._kept: dict[_Key, _Kept] = {}
        # Of this second, and of the one before.
        self._seen: set[str] = set()
        self._seen_before: set[str] = set()
        self._seen_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, transfer: str, end: End) -> None:
        """Adds an end that has ended; ignores ends that did not fail."""
        record = end.record
        now_s = time.monotonic()
        if now_s > self._seen_until_s:
            self._seen_before, self._seen = self._seen, set()
            self._seen_until_s = now_s + _GATHER_S
        if record.outcome != "failed" or transfer in self._seen or transfer in self._seen_before:
            return
        if len(self._seen) < _MOST_SEEN:
            self._seen.add(transfer)
        key = (end.agent_name, end.peer_name, record.code)
        if key not in self._kept and len(self._kept) >= _MOST_KEPT:
            key = ("other agents", "", "")
        kept = self._kept.setdefault(key, _Kept())
        if not kept.count:
            kept.transfer, kept.context, kept.message = transfer, record.context, record.message
        kept.count += 1
        self._tell_later(max(_GATHER_S, kept.quiet_until_s - now_s))

    def close(self) -> None:
        """Writes all gathered lines."""
        if self._timer is not None:
            self._timer.cancel()
        for key, kept in self._kept.items():
            _tell(key, kept)
        self._kept.clear()

    def tell(self) -> None:
        """Writes the lines that are due; the timer calls it."""
        self._timer = None
        now_s = time.monotonic()
        for key, kept in list(self._kept.items()):
            if kept.quiet_until_s > now_s:
                continue
            if not kept.count:
                del self._kept[key]
                continue
            _tell(key, kept)
            kept.count, kept.quiet_until_s = 0, now_s + QUIET_S
        if self._kept:
            # Also so that pairs without further failures are forgotten.
            self._tell_later(max(_GATHER_S, min(kept.quiet_until_s for kept in self._kept.values()) - now_s))

    def _tell_later(self, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() > loop.time() + after_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(after_s, self.tell)


def _tell(key: _Key, kept: _Kept) -> None:
    if not kept.count:
        return
    agent, peer, code = key
    logger().warning(
        "%s of %s%s failed%s: %s",
        "1 transfer" if kept.count == 1 else f"{kept.count} transfers",
        agent,
        f" with {peer}" if peer else "",
        f" [{code}]" if code else "",
        kept.message,
        extra={
            "fields": {
                "agent": agent,
                "peer": peer,
                "code": code,
                "transfers": kept.count,
                "transfer": kept.transfer,
                "context": kept.context,
            }
        },
    )
