"""Decode's side at a worker: fetches of prompts that another engine computes.

With a handover, this worker reads the pages after prefill has ended. With an expected push, it tells prefill
where the pages go, and prefill writes them while it computes. In both cases the engine's own steps check
the progress.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future

import kvxfer
from kvxfer.connectors.common.compute_stream import ComputeStream, Marks
from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.failed_loads import FailedLoads
from kvxfer.connectors.common.fetch import Fetch
from kvxfer.connectors.common.fetch_posting import FetchPoster
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.heartbeats import heartbeat_of
from kvxfer.connectors.common.mail import Mail
from kvxfer.connectors.common.notes import Leaving, Note, Receipt, Refusal, digest_of
from kvxfer.connectors.common.pace import Pace, StepPace
from kvxfer.connectors.common.prefill_ranks import PrefillRanks
from kvxfer.connectors.common.regions import CacheRegions
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.statistics import NO_MODE, PULL, PUSH, RETURN, Recorder
from kvxfer.connectors.common.step import FetchOrder, Unfetchable
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.directory import Entry

_log = logging.getLogger("kvxfer")


class Fetches:
    """All fetches of this worker. No thread waits for a fetch.

    Parameters
    ----------
    agent, regions, mail, ranks, position
        Of this worker.
    settings
        Its deadlines.
    statistics
        Counts every fetch that ends.
    stream
        The stream of the engine's kernels, if there is one.
    """

    def __init__(
        self,
        agent: kvxfer.Agent,
        regions: CacheRegions,
        mail: Mail,
        ranks: PrefillRanks,
        position: WorkerRank,
        settings: Settings,
        statistics: Recorder,
        stream: ComputeStream | None = None,
    ) -> None:
        self._agent = agent
        self._regions = regions
        self._mail = mail
        self._reader = position.rank
        self._num_readers = position.num_ranks
        self._settings = settings
        self._statistics = statistics
        self._stream = stream
        self._marks = Marks(agent, stream)
        self._poster = FetchPoster(agent, regions, mail, position, settings)
        self._ranks = ranks
        self._fetches: dict[str, Fetch] = {}
        self._begun: list[Fetch] = []  # since the last step's end
        self._pace = Pace()
        self._steps = StepPace()

    def begin(self, order: FetchOrder) -> None:
        """Starts a fetch; it is posted at once if the sessions are open."""
        fetch = Fetch(order, self._marks.set())
        self._fetches[order.request_id] = fetch
        self._begun.append(fetch)
        if isinstance(order.source, Unfetchable):
            fetch.fail(order.source.why, order.source.code)
            return
        fetch.sessions = [self._ranks.session(rank, order.request_id) for rank in order.source.ranks]
        self._advance(fetch)

    def abandon(self, request_id: str) -> None:
        """Stops a fetch whose request has ended; `collect` returns it when no byte can land any more."""
        if (fetch := self._fetches.get(request_id)) is not None:
            fetch.fail("the request ended", "abandoned")

    def wait_for_layer(self, layer_name: str, timeout_s: float) -> bool:
        """Waits until a layer of every fetch that this step's forward needs is here; False if time is up.

        Where kernels run in a stream, the stream waits for reads and this method returns at once; `collect`
        evaluates the result.
        """
        waiting = [fetch for fetch in self._fetches.values() if fetch.order.waits]
        if not waiting:
            return True
        index, position = self._regions.position(layer_name)
        if index < 0:
            return True
        region = self._regions.regions[index]
        layer = region.layout.layers[position]
        deadline = time.monotonic() + timeout_s
        return all(self._has_layer(fetch, region.name, layer, deadline) for fetch in waiting)

    def _has_layer(self, fetch: Fetch, name: str, layer: int, deadline: float) -> bool:
        while not fetch.is_posted and not fetch.failure:
            self._advance(fetch)
            if time.monotonic() > deadline:
                return False
            fetch.wait_to_post(max(deadline - time.monotonic(), 0.0))
        part = fetch.parts.get(name)
        if part is None or layer not in part.layers or fetch.failure:
            return True
        try:
            # A read ends by itself. Prefill may refuse a push with a note, so this thread waits for pushes.
            if self._stream is None or not fetch.is_read or not self._stream.hold(part, layer):
                part.layer_blocking(layer, max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            self._advance(fetch)
            return bool(fetch.failure)
        except kvxfer.KvxferError as error:
            fetch.fail_as(error)
        return True

    def collect(self) -> tuple[set[str], dict[str, set[int]]]:
        """Returns the requests whose fetch has ended, and for each failed one the blocks that lack bytes.

        The blocks are those of the first cache group. Each request is returned once. A request whose forward
        waited for the fetch is already running, so it is returned only if it failed.
        """
        ended: set[str] = set()
        failed: dict[str, set[int]] = {}
        lines = FailedLoads()
        for request_id, fetch in list(self._fetches.items()):
            if fetch.order.waits:
                self._see_out(fetch)
            if not self._advance(fetch):
                continue
            del self._fetches[request_id]
            if not fetch.order.waits:
                ended.add(request_id)
            if fetch.failure:
                failed[request_id] = self._missing(fetch)
                if isinstance(fetch.order.source, Handover):
                    self._pace.forget(_name(fetch.order.source))
                self._statistics.failed(_mode(fetch.order.source), fetch.code)
                lines.add(request_id, _engine(fetch.order.source), fetch.code, fetch.failure)
            else:
                self._count(fetch)
            # After a complete push, prefill needs no note: it knows from its writes. After a refusal, a note
            # could be taken for another request with the same key.
            source = fetch.order.source
            has_left = fetch.failure and fetch.sessions and fetch.code != "refused"
            if isinstance(source, Handover) or (isinstance(source, ExpectedPush) and has_left):
                self._release(source, fetch.sessions)
        lines.tell()
        return ended, failed

    def _see_out(self, fetch: Fetch) -> None:
        """Waits for the end of a fetch whose layers are here: only the end proves that the leases held."""
        if not fetch.is_posted:
            fetch.fail("its forward did not wait for any of its layers", "abandoned")
        try:
            if (error := fetch.work.first_failure_blocking(self._settings.load_timeout_s)) is not None:
                fetch.fail_as(error)
        except TimeoutError:
            fetch.fail(f"not loaded within {self._settings.load_timeout_s:g} s (load_timeout_s)", "deadline")
        fetch.wait(self._settings.load_timeout_s)

    def linger(self, num_running: int) -> None:
        """Waits for reads that this step has begun, if they are expected in time and the wait pays off.

        The engine begins loads after a step's forward and asks at once what has ended. It would notice a read
        that takes a millisecond longer only one step later.

        Parameters
        ----------
        num_running
            Requests that run in this step; they wait as well.
        """
        began_s = time.monotonic()
        expected = sorted(
            (
                (self._pace.expected_s(_name(fetch.order.source), fetch.nbytes), fetch)
                for fetch in self._begun
                if isinstance(fetch.order.source, Handover) and fetch.is_posted and not fetch.order.waits
            ),
            key=lambda each: each[0],
        )
        self._begun.clear()
        count, limit_s = self._steps.worth(
            [seconds for seconds, _ in expected], num_running, self._settings.linger_s
        )
        for _, fetch in expected[:count]:
            fetch.wait(began_s + limit_s - time.monotonic())
        self._steps.ended(time.monotonic(), num_running)

    def rest(self, timeout_s: float) -> bool:
        """Waits for the oldest unfinished fetch without spinning; returns whether there is one."""
        for fetch in self._fetches.values():
            if fetch.work.state is kvxfer.TransferState.PENDING:
                fetch.wait(timeout_s)
                return True
            if not fetch.is_posted and not fetch.failure:
                fetch.wait_to_post(timeout_s)
                return True
        return False

    def refused(self, note: Refusal) -> None:
        """Fails the fetch of a request that prefill refuses to push."""
        for fetch in self._fetches.values():
            if fetch.tag and fetch.tag == note.tag:
                fetch.fail(f"prefill refused: {note.reason}", "refused")

    def release(self, source: Handover | ExpectedPush) -> Note:
        """Tells every prefill rank, except this agent itself, that this worker needs no blocks of it."""
        others = [rank for rank in source.ranks if rank.name != self._agent.name]
        name = source.request_id if isinstance(source, Handover) else source.key.hex()
        return self._release(source, [self._ranks.session(rank, f"unwanted {name}") for rank in others])

    def stop(self, why: str, code: str) -> None:
        """Stops every fetch; returns when no byte can land any more. `collect` still returns them."""
        for fetch in self._fetches.values():
            fetch.fail(why, code)
        # If this time is not enough, the end of its region or of the agent ends a fetch.
        deadline = time.monotonic() + self._settings.load_timeout_s
        for fetch in self._fetches.values():
            fetch.wait(deadline - time.monotonic())

    def close(self) -> None:
        """Stops and drops every fetch; returns when no byte can land any more."""
        self.stop("the engine shuts down", "closed")
        self._fetches.clear()

    def _count(self, fetch: Fetch) -> None:
        stages = fetch.work.stages
        if fetch.work.members and isinstance(fetch.order.source, Handover):
            took_s = (stages.ended_ns - stages.posted_ns) / 1e9
            self._pace.took(_name(fetch.order.source), fetch.nbytes, took_s)
        self._statistics.loaded(
            fetch.order.request_id,
            _mode(fetch.order.source),
            began_ns=fetch.begun_ns,
            noticed_ns=time.monotonic_ns(),
            stages=stages,
            rails=fetch.work.rails,
            nbytes=fetch.nbytes,
            num_pages=fetch.num_pages,
            num_ranks=len(fetch.sessions),
        )

    # ---- one fetch ----------------------------------------------------------------------------

    def _advance(self, fetch: Fetch) -> bool:
        """Advances a fetch as far as possible now; returns whether it has ended."""
        if not fetch.is_posted and not fetch.failure:
            # Prefill may write as soon as it is told where, so no kernel may still use these blocks.
            if isinstance(fetch.order.source, ExpectedPush) and not fetch.mark.has_passed:
                return False
            if not (silent := _silent(fetch)):
                try:
                    self._poster.post(fetch)
                    self._tell_of_reading(fetch)
                except kvxfer.KvxferError as error:
                    if error.code == "unknown-region" and self._may_come(fetch):
                        return False
                    fetch.fail_as(error)
                except Exception as error:
                    # Unexpected input from another engine must not end this engine.
                    _log.exception("kvxfer: request %s: cannot be fetched", fetch.order.request_id)
                    fetch.fail(f"{type(error).__name__}: {error}", "internal")
            elif fetch.age_s > self._settings.connect_timeout_s:
                others = f" and {len(silent) - 1} others" if silent[1:] else ""
                within = f"within {self._settings.connect_timeout_s:g} s (connect_timeout_s)"
                why = (
                    f"{silent[0].address}{others} did not answer {within}: stopped, starved of processor "
                    "time, or not running"
                )
                fetch.fail(why, "unreachable")
            else:
                return False
        return fetch.has_ended(self._settings.load_timeout_s)

    def _may_come(self, fetch: Fetch) -> bool:
        """Whether prefill may yet announce a region that a fetch lacks: it is waking, or its engine starts.

        Prefill is asked for a push at the same time, so its first step may take as long as connecting.
        """
        starts = (
            isinstance(fetch.order.source, ExpectedPush) and fetch.age_s < self._settings.connect_timeout_s
        )
        return not fetch.work.members and (fetch.is_early or starts)

    def _tell_of_reading(self, fetch: Fetch) -> None:
        """Tells prefill that a read has begun, so its blocks come back within moments."""
        source = fetch.order.source
        if isinstance(source, Handover) and (note := heartbeat_of(source, is_reading=True)) is not None:
            for session in fetch.sessions:
                self._mail.send_over(session, note)

    def _missing(self, fetch: Fetch) -> set[int]:
        """Returns the blocks of the first table that lack bytes."""
        order = fetch.order
        if fetch.is_posted:
            pages = {
                int(page)
                for group in self._regions.groups
                if group.table == 0 and group.name in fetch.parts
                for page in fetch.parts[group.name].failed_blocks
            }
            if pages:
                first = 1 if self._regions.regions[0].layout.null_block < 0 else 0  # `paging.counted`
                return {first + page // self._regions.pages_per_block[0] for page in pages}
        block_size = self._regions.groups[0].block_size
        return set(order.tables[0][order.first_token // block_size :]) - {0}

    def _release(self, source: Handover | ExpectedPush, sessions: list[Future[kvxfer.Peer]]) -> Note:
        note: Note
        if isinstance(source, Handover):
            request = digest_of(source.request_id)
            first_lease = digest_of(str(source.leases[0]))
            note = Receipt(request, first_lease, self._reader, self._num_readers, source.may_be_shared)
        else:
            note = Leaving(source.key, self._reader, self._num_readers, source.may_be_shared)
        for session in sessions:
            self._mail.send_over(session, note)
        return note


def _silent(fetch: Fetch) -> list[Entry]:
    """Returns the agents whose sessions are still being opened."""
    return [
        rank
        for rank, session in zip(fetch.order.source.ranks, fetch.sessions, strict=True)
        if not session.done()
    ]


def _mode(source: Handover | ExpectedPush | Unfetchable) -> str:
    """Returns the mode under which a request's fetch is counted."""
    if isinstance(source, Handover):
        return RETURN if source.comes_back else PULL
    return PUSH if isinstance(source, ExpectedPush) else NO_MODE


def _engine(source: Handover | ExpectedPush | Unfetchable) -> str:
    """Returns the engine that was to send a request's cache; `""` if none was named."""
    return source.ranks[0].name if source.ranks else ""


def _name(source: Handover) -> str:
    """Returns the name of the engine that computed a request; it differs after a restart."""
    return source.ranks[0].name
