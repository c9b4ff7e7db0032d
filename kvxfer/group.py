"""One handle for several transfers that belong together, such as those of one request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.arguments import check_kind, seconds_or_none
from kvxfer.errors import KvxferError, UsageError, invalid, largest_loss, listed
from kvxfer.handle import Handle, Stages, TransferState
from kvxfer.session.completion import ALL_LAYERS
from kvxfer.session.watch import Watch
from kvxfer.transfer import Incoming, Transfer

if TYPE_CHECKING:
    from kvxfer.region import Region
    from kvxfer.session.completion import Completions, Key

# Members that an error's message names; `Group.errors` has all.
_MOST_NAMED: Final = 4


class Group(Handle):
    """Transfers and expectations that belong together, such as those of one request from several ranks.

    A group ends when all of its members have ended. If one fails, the others are cancelled: a call that waits
    for the group, at that time or later, cancels them. The pages stay in use until the group has ended.
    Members can still be used as handles of their own.

    Parameters
    ----------
    works
        Transfers, expectations and groups, of one agent or of several in this process. A group among them
        stands for its members. Each member counts once. An empty group is done.
    cancel_on_failure
        Whether one member's failure or cancellation cancels the others.

    Raises
    ------
    UsageError
        ``invalid-argument``: one of `works` is not such a handle.

    Notes
    -----
    The cost of waiting grows with the number of members, but no member needs a thread or a task. Reading
    `state` asks the members one by one until one is pending.
    """

    __slots__ = ("_cancels", "_members")

    def __init__(
        self, works: Iterable[Transfer | Incoming | Group], *, cancel_on_failure: bool = True
    ) -> None:
        members: dict[Transfer | Incoming, None] = {}
        check_kind(works, "works", Iterable, "transfers, expectations and groups")
        for work in works:
            if isinstance(work, Group):
                members.update(dict.fromkeys(work.members))
            elif isinstance(work, Transfer | Incoming):
                members[work] = None
            else:
                raise invalid(f"a group is made of transfers, expectations and groups, not of {work!r:.200}")
        self._members = tuple(members)
        self._cancels = bool(cancel_on_failure)

    def __repr__(self) -> str:
        return f"<Group of {len(self._members)} {self.state}>"

    # ---- state ------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Transfer | Incoming, ...]:
        """Its transfers and expectations, in the order in which they were named."""
        return self._members

    @property
    def state(self) -> TransferState:
        """``PENDING`` until all members have ended, and then their worst state.

        ``FAILED`` where one failed, else ``CANCELLED`` where one was cancelled, else ``DONE``.
        """
        found = set()
        for work in self._members:
            if (state := work.state) is TransferState.PENDING:
                return state
            found.add(state)
        for state in (TransferState.FAILED, TransferState.CANCELLED):
            if state in found:
                return state
        return TransferState.DONE

    @property
    def errors(self) -> dict[Transfer | Incoming, KvxferError]:
        """The errors of members that have failed or were cancelled so far."""
        return {work: error for work in self._members if (error := work.error) is not None}

    @property
    def error(self) -> KvxferError | None:
        """The failure so far, also while other members are pending; None if no member has failed.

        Its class, code, peer and rail are those of the largest loss among the members (`PeerError` before
        `TransferError`); the message names the members and their peers. ``failed_blocks`` has the blocks of
        all members if they share a region. Otherwise it is empty, and the message counts them for each
        region.
        """
        errors = self.errors
        if not errors:
            return None
        failed = {work: error for work, error in errors.items() if work.state is TransferState.FAILED}
        what = "failed" if failed else "were cancelled"
        failed = failed or errors
        largest = largest_loss(failed.values())
        if len(self._members) == 1:
            return largest
        blocks = {region: self.failed_blocks_of(region) for region in self._regions}
        # The code and peer of a single failed member already stand at the end of the whole text.
        told = [
            f"{_named(work)}: {error.args[0] if len(failed) == 1 else error}"
            for work, error in list(failed.items())[:_MOST_NAMED]
        ]
        if (more := len(failed) - len(told)) > 0:
            told.append(f"and {more} more")
        if (cancelled := len(errors) - len(failed)) > 0:
            told.append(f"{cancelled} cancelled")
        if len(blocks) > 1:
            each = (f"{len(ids)} of region {region.name!r}" for region, ids in blocks.items())
            counts = listed(each, "none")
            told.append(f"failed blocks: {counts} (failed_blocks_of)")
        return type(largest)(
            f"{len(failed)} of {len(self._members)} transfers {what}: {'; '.join(told)}",
            code=largest.code,
            peer=largest.peer,
            rail=largest.rail,
            failed_blocks=next(iter(blocks.values())) if len(blocks) == 1 else None,
        )

    @property
    def failed_blocks(self) -> NDArray[np.uint32]:
        """Block ids of the members' region whose bytes cannot be relied on, ascending, each once.

        Raises
        ------
        UsageError
            ``unsupported``: members belong to several regions, so ids alone are ambiguous. Use
            `failed_blocks_of`, or ask the members.
        """
        regions = self._regions
        if len(regions) > 1:
            names = listed((repr(region.name) for region in regions), "none")
            raise UsageError(
                f"the group moves blocks of regions {names}: ask failed_blocks_of(region) for each",
                code="unsupported",
            )
        return self.failed_blocks_of(regions[0]) if regions else np.empty(0, np.uint32)

    def failed_blocks_of(self, region: Region) -> NDArray[np.uint32]:
        """Returns block ids of one region whose bytes cannot be relied on, ascending, each once."""
        found = [work.failed_blocks for work in self._members if work.region is region]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.uint32)

    @property
    def layers(self) -> range:
        """Range from the first to the last layer that any member moves, numbered model-wide."""
        if not self._members:
            return range(0)
        return range(
            min(work.layers.start for work in self._members), max(work.layers.stop for work in self._members)
        )

    @property
    def rails(self) -> tuple[str, ...]:
        """Transports that moved bytes of any member, as seen at this end; each once."""
        return tuple(dict.fromkeys(rail for work in self._members for rail in work.rails))

    @property
    def stages(self) -> Stages:
        """When the first member was posted and had its first piece, and when the last one ended."""
        each = [work.stages for work in self._members]
        ended = [stages.ended_ns for stages in each]
        return Stages(
            min((stages.posted_ns for stages in each), default=0),
            min((stages.first_piece_ns for stages in each if stages.first_piece_ns), default=0),
            max(ended) if ended and all(ended) else 0,
        )

    # ---- the end ----------------------------------------------------------------------------

    def cancel(self) -> None:
        """Requests the end of all members that have not ended; see `Transfer.cancel`."""
        self._check()
        for work in self._members:
            if not work._is_final():
                work._handle.cancel()

    async def first_failure(self) -> KvxferError | None:
        """Waits until a member fails and returns `error` at once, or None when all are done.

        Other members may still be pending and their pages in use. Wait for the group before you reuse them.
        """
        await self._until(_Waiting(self, self._members, stops_early=True))
        return self.error

    def first_failure_blocking(self, timeout_s: float | None = None) -> KvxferError | None:
        """Blocks until a member fails, or all are done: the twin of `first_failure`.

        Raises
        ------
        TimeoutError
            The time is over, and no member has failed, but not all are done.
        """
        if not self._by(_Waiting(self, self._members, stops_early=True), timeout_s):
            raise TimeoutError(f"{self!r} is still pending after {timeout_s} s")
        return self.error

    # ---- layers -----------------------------------------------------------------------------

    async def layer(self, layer: int) -> None:
        """Waits until one layer is in place for all members that move it.

        Parameters
        ----------
        layer
            Numbered model-wide.

        Raises
        ------
        KvxferError
            `error`, as soon as a member failed before this layer arrived; others may be pending.
        UsageError
            ``out-of-range`` for a layer that no member moves; ``unsupported`` where the other end receives.
        """
        waiting = self._for_layer(layer)
        await self._until(waiting)
        self._raise_if_lost(waiting)

    def layer_blocking(self, layer: int, timeout_s: float | None = None) -> None:
        waiting = self._for_layer(layer)
        if not self._by(waiting, timeout_s):
            raise TimeoutError(f"layer {layer} of {self!r} has not arrived after {timeout_s} s")
        self._raise_if_lost(waiting)

    def layer_arrived(self, layer: int) -> bool:
        return all(work.layer_arrived(layer) for work in self._with(layer))

    def _with(self, layer: int) -> list[Transfer | Incoming]:
        found = [work for work in self._members if layer in work.layers]
        if not found:
            raise UsageError(
                f"no transfer of {self!r} moves layer {layer}: they move layers within {self.layers} "
                "(numbered model-wide)",
                code="out-of-range",
            )
        return found

    # ---- inside -----------------------------------------------------------------------------

    @property
    def _regions(self) -> tuple[Region, ...]:
        return tuple(dict.fromkeys(work.region for work in self._members))

    def _for_layer(self, layer: int) -> _Waiting:
        works = self._with(layer)
        return _Waiting(self, works, [work._index(layer) for work in works])

    def _raise_if_lost(self, waiting: _Waiting) -> None:
        if waiting.lost:
            self._raise_if_failed()

    def _check(self) -> None:
        """Raises `AgentError` where a member cannot end any more: in the child of a fork."""
        for work in self._members:
            if not work._is_final():
                work._scope.completions.check()

    def _failed(self) -> None:
        """Cancels pending members, if the group was made so."""
        if self._cancels:
            self.cancel()

    async def _until_final(self) -> None:
        await self._until(_Waiting(self, self._members))

    def _final_by(self, timeout_s: float | None) -> bool:
        return self._by(_Waiting(self, self._members), timeout_s)

    async def _until(self, waiting: _Waiting) -> None:
        if waiting.is_over():
            return
        self._check()
        with Watch(waiting.places) as watch:
            while not waiting.is_over():
                waiting.look(await watch.news())

    def _by(self, waiting: _Waiting, timeout_s: float | None) -> bool:
        limit_s = seconds_or_none(timeout_s, "timeout_s")
        deadline = None if limit_s is None else time.monotonic() + limit_s
        if waiting.is_over():
            return True
        self._check()
        with Watch(waiting.places) as watch:
            while not waiting.is_over():
                if waiting.num_pending == 1:
                    return waiting.last_by(deadline)
                news = watch.news_blocking(deadline)
                if not news:
                    return False
                waiting.look(news)
        return True


class _Waiting:
    """The members that one waiter still waits for.

    Attributes
    ----------
    lost
        Whether a member that it waited for has failed.
    """

    def __init__(
        self,
        group: Group,
        works: Sequence[Transfer | Incoming],
        layers: Sequence[int] | None = None,
        *,
        stops_early: bool = False,
    ) -> None:
        self._group = group
        self._works = works
        self._layers = layers
        self._stops_early = stops_early or layers is not None
        self._pending = set(range(len(works)))  # indexes of `works`
        self.lost = False
        self.look(range(len(works)))

    @property
    def places(self) -> list[tuple[Completions, Key, int]]:
        """Where to watch for each member's events, in the order of the members."""
        parts = [ALL_LAYERS] * len(self._works) if self._layers is None else self._layers
        return [
            (work._scope.completions, work._key, part) for work, part in zip(self._works, parts, strict=True)
        ]

    def look(self, news: Iterable[int]) -> None:
        """Checks the members that have events."""
        for at in news:
            if at not in self._pending or not self._has_come(at):
                continue
            self._pending.discard(at)
            if not self.lost and not self._is_there(at):
                self.lost = True
                self._group._failed()

    def is_over(self) -> bool:
        """Whether the wait is over."""
        return not self._pending or (self.lost and self._stops_early)

    @property
    def num_pending(self) -> int:
        """How many members it still waits for."""
        return len(self._pending)

    def last_by(self, deadline: float | None) -> bool:
        """Blocks for the only member that is left; returns whether it came in time.

        This wait drives progress of the member's agent. A wait for several members sleeps until there are
        events.
        """
        (at,) = self._pending
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        work = self._works[at]
        if self._layers is not None:
            work._layer_by(self._layers[at], left_s)
        else:
            work._final_by(left_s)
        self.look((at,))
        return self.is_over()

    def _has_come(self, at: int) -> bool:
        work = self._works[at]
        if self._layers is not None and work._handle.watch_layer(self._layers[at]):
            return True
        return work._is_final()

    def _is_there(self, at: int) -> bool:
        work = self._works[at]
        return work.succeeded if self._layers is None else work._handle.layer_arrived(self._layers[at])


def _named(work: Transfer | Incoming) -> str:
    return f"{type(work).__name__.lower()} {work._handle.id}"
