"""One fetch: the transfers that bring a prompt from another engine into this worker's cache."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final

import kvxfer
from kvxfer.connectors.common.compute_stream import Mark
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.prefill_ranks import is_open
from kvxfer.connectors.common.step import FetchOrder

# Prefill's news (new leases, new regions) may arrive so much later than the router's handover.
_EARLY_S: Final = 1.0
# About as long as a stream's kernels take.
_LOOK_AGAIN_S: Final = 0.0005

Work = kvxfer.Transfer | kvxfer.Incoming


@dataclass(slots=True)
class Fetch:
    """The state of one fetch order.

    Attributes
    ----------
    order
        Which blocks are to hold which tokens.
    mark
        A mark in the stream: kernels before it may still write to these blocks, for their previous request.
    begun_ns
        When it was ordered.
    sessions
        The sessions with prefill's ranks.
    parts
        The posted reads or the expected writes, by the name of the region here.
    work
        All reads or writes. One failure does not cancel the others: reads may have failed for being early.
    sources
        The peer and the remote region of each read.
    is_posted
        Whether all reads or expectations are posted.
    is_second
        Whether this is the second attempt, because prefill had replaced its regions.
    tag
        The tag of its writes, if it is pushed.
    failure, code
        Why it failed: a message, and one word; "" until then.
    nbytes, num_pages
        Bytes and pages of all its work.
    """

    order: FetchOrder
    mark: Mark
    begun_ns: int = field(default_factory=time.monotonic_ns)
    sessions: list[Future[kvxfer.Peer]] = field(default_factory=list)
    parts: dict[str, kvxfer.Group] = field(default_factory=dict)
    work: kvxfer.Group = field(default_factory=lambda: kvxfer.Group([]))
    sources: dict[Work, tuple[kvxfer.Peer, kvxfer.RegionDescriptor]] = field(default_factory=dict)
    is_posted: bool = False
    is_second: bool = False
    tag: bytes = b""
    failure: str = ""
    code: str = ""
    nbytes: int = 0
    num_pages: int = 0

    @property
    def age_s(self) -> float:
        """How long ago it was ordered."""
        return (time.monotonic_ns() - self.begun_ns) / 1e9

    @property
    def is_early(self) -> bool:
        """Whether a failure may have its cause in news of prefill's that has not arrived yet."""
        return self.age_s < _EARLY_S

    @property
    def is_read(self) -> bool:
        """Whether it is read from a handover."""
        return isinstance(self.order.source, Handover)

    def took(self, parts: dict[str, list[Work]]) -> None:
        """Stores the posted work, by the name of the region."""
        self.parts = {name: kvxfer.Group(works, cancel_on_failure=False) for name, works in parts.items()}
        self.work = kvxfer.Group(self.parts.values(), cancel_on_failure=False)

    def fail(self, why: str, code: str) -> None:
        """Marks the fetch as failed and cancels its work; the first reason stays."""
        if not self.failure:
            self.failure, self.code = why, code
        self.work.cancel()

    def fail_as(self, error: kvxfer.KvxferError) -> None:
        """Marks the fetch as failed with an error, and cancels its work."""
        self.fail(str(error), error.code)

    def wait(self, timeout_s: float) -> None:
        """Waits until its work ends or time is up; `has_ended` evaluates the result."""
        try:
            self.work.wait(max(timeout_s, 0.0))
        except (TimeoutError, kvxfer.KvxferError):
            pass

    def wait_to_post(self, timeout_s: float) -> None:
        """Waits for the sessions, or a moment for the mark or the regions that must precede posting."""
        if all(session.done() for session in self.sessions):
            time.sleep(min(timeout_s, _LOOK_AGAIN_S))
        else:
            wait(self.sessions, timeout_s)

    def has_ended(self, load_timeout_s: float) -> bool:
        """Checks its work; returns whether no byte can land any more and nothing will be posted again."""
        # State before errors: otherwise work that fails in between would look neither pending nor failed.
        state = self.work.state
        errors = self.work.errors
        if errors and not self.failure:
            if self._was_early(errors):
                self._post_again()
                return False
            if self._was_of_old(errors, load_timeout_s):
                are_replaced = self._are_replaced(errors)
                if are_replaced and state is not kvxfer.TransferState.PENDING:
                    self._post_again()
                    self.is_second = True
                if are_replaced or self.is_early:
                    return False
        # Only if errors were seen above: a later failure is handled by the next call.
        if errors and (error := self.work.error) is not None:
            self.fail_as(error)
        is_over = state is not kvxfer.TransferState.PENDING
        # Any peer may satisfy an expectation, so the loss of a session does not end it.
        if self.tag and not is_over and not all(is_open(session) for session in self.sessions):
            self.fail("the session with prefill was lost before all pages were pushed", "peer-lost")
        return is_over

    # ---- inside -------------------------------------------------------------------------------

    def _post_again(self) -> None:
        """Drops failed work, so that the fetch is posted again."""
        self.is_posted = False
        self.took({})
        self.sources.clear()
        self.nbytes = self.num_pages = 0

    def _was_early(self, errors: dict[Work, kvxfer.KvxferError]) -> bool:
        """Whether all of it failed because the leases are not in force yet; they may be at the next call.

        In a return, the response carries the leases one step before decode's workers grant them.
        """
        return (
            isinstance(self.order.source, Handover)
            and self.order.source.comes_back
            and self.is_early
            and len(errors) == len(self.work.members)
            and all(error.code == "lease-ended" for error in errors.values())
        )

    def _was_of_old(self, errors: dict[Work, kvxfer.KvxferError], load_timeout_s: float) -> bool:
        """Whether all failed reads named regions that no longer exist, in the first attempt.

        A prefill engine that has just woken may hand over a request before its new regions are known here.
        Layers that a forward waits for are not fetched twice, because they may be in use by now.
        """
        return (
            self.is_read
            and not self.order.waits
            and not self.is_second
            and self.age_s < load_timeout_s
            and all(error.code == "region-gone" for error in errors.values())
        )

    def _are_replaced(self, errors: dict[Work, kvxfer.KvxferError]) -> bool:
        """Whether prefill has replaced all regions from which the reads failed."""
        try:
            return all(
                (told := peer.regions.get(gone.name)) is not None and told.id != gone.id
                for peer, gone in map(self.sources.__getitem__, errors)
            )
        except kvxfer.KvxferError:
            return False  # the session is lost
