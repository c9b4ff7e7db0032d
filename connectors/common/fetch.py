"""One prompt that is computed elsewhere, on its way into this worker's cache."""

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

# Word of what prefill does may be so much later than what a router hands over.
_EARLY_S: Final = 1.0
# A stream's kernels take about as long.
_LOOK_AGAIN_S: Final = 0.0005

Work = kvxfer.Transfer | kvxfer.Incoming


@dataclass(slots=True)
class Fetch:
    """What became of an order.

    Attributes
    ----------
    order
        Which blocks are to hold which tokens.
    mark
        Kernels before it may still write to these blocks, for a request that had them before.
    begun_ns
        When it was ordered.
    sessions
        With the ranks that it comes from.
    parts
        By the name of the region here: reads that were posted, or writes that are expected.
    work
        All of them. None is cancelled for another: reads may have failed for being early.
    sources
        Of each read: whose region it is of, and which.
    is_posted
        Whether all of its work is.
    is_second
        Whether its regions had been replaced when it was read first.
    tag
        What its writes carry, where it is pushed.
    failure, code
        Why it failed, in words and in one; "" until then.
    nbytes, num_pages
        Of its work.
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
        """Whether what it fails for may be what prefill has not told yet."""
        return self.age_s < _EARLY_S

    @property
    def is_read(self) -> bool:
        """Whether it is read from a handover."""
        return isinstance(self.order.source, Handover)

    def took(self, parts: dict[str, list[Work]]) -> None:
        """Takes in what was posted of it, by the name of the region."""
        self.parts = {name: kvxfer.Group(works, cancel_on_failure=False) for name, works in parts.items()}
        self.work = kvxfer.Group(self.parts.values(), cancel_on_failure=False)

    def fail(self, why: str, code: str) -> None:
        """Ends what is under way; the first reason stays."""
        if not self.failure:
            self.failure, self.code = why, code
        self.work.cancel()

    def fail_as(self, error: kvxfer.KvxferError) -> None:
        """Ends what is under way, for an error."""
        self.fail(str(error), error.code)

    def wait(self, timeout_s: float) -> None:
        """Waits for the end of its work, as far as it comes in time; `has_ended` sees what became of it."""
        try:
            self.work.wait(max(timeout_s, 0.0))
        except (TimeoutError, kvxfer.KvxferError):
            pass

    def wait_to_post(self, timeout_s: float) -> None:
        """Waits for what it cannot be posted without."""
        _, missing = wait(self.sessions, timeout_s)
        if not missing and not self.mark.has_passed:
            time.sleep(min(timeout_s, _LOOK_AGAIN_S))

    def has_ended(self, load_timeout_s: float) -> bool:
        """Looks at its work, and returns whether no byte of it can land any more, nor is posted again."""
        # In this order: what fails between the two looks would be neither pending nor failed.
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
        # Only what was looked at: what has failed since is looked at the next time.
        if errors and (error := self.work.error) is not None:
            self.fail_as(error)
        is_over = state is not kvxfer.TransferState.PENDING
        # Expected writes are anybody's, so no lost session ends them.
        if self.tag and not is_over and not all(is_open(session) for session in self.sessions):
            self.fail("prefill was lost before it had pushed all", "peer-lost")
        return is_over

    # ---- inside -------------------------------------------------------------------------------

    def _post_again(self) -> None:
        """Forgets work that has ended in vain."""
        self.is_posted = False
        self.took({})
        self.sources.clear()
        self.nbytes = self.num_pages = 0

    def _was_early(self, errors: dict[Work, kvxfer.KvxferError]) -> bool:
        """Whether all of it failed for leases that may be in force the next time we ask.

        A response that brings a request back tells them one step before decode's workers hear of them.
        """
        return (
            isinstance(self.order.source, Handover)
            and self.order.source.comes_back
            and self.is_early
            and len(errors) == len(self.work.members)
            and all(error.code == "lease-ended" for error in errors.values())
        )

    def _was_of_old(self, errors: dict[Work, kvxfer.KvxferError], load_timeout_s: float) -> bool:
        """Whether all of it that failed was read from regions that are no more, for the first time.

        A prefill that has just woken hands over before its new regions are heard of here. Layers that
        a forward waits for may be in use by now, and are not brought twice.
        """
        return (
            self.is_read
            and not self.order.waits
            and not self.is_second
            and self.age_s < load_timeout_s
            and all(error.code == "region-gone" for error in errors.values())
        )

    def _are_replaced(self, errors: dict[Work, kvxfer.KvxferError]) -> bool:
        """Whether all regions that it was read from in vain have others in their place by now."""
        try:
            return all(
                (told := peer.regions.get(gone.name)) is not None and told.id != gone.id
                for peer, gone in map(self.sources.__getitem__, errors)
            )
        except kvxfer.KvxferError:
            return False  # nobody is left to ask
