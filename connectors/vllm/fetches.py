"""Decode's side at a worker: prompts that are computed elsewhere, on their way into this cache.

From a handover the pages are read when prefill has ended; for an appointment prefill is told where they
go and writes them as it computes. Either way the engine's own steps ask how far it has come.
"""

from __future__ import annotations

import logging
import secrets
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final

import kvxfer
from kvxfer import plan
from kvxfer.connectors.vllm.appointment import Appointment
from kvxfer.connectors.vllm.compute_stream import ComputeStream, Mark, Marks
from kvxfer.connectors.vllm.handover import Handover
from kvxfer.connectors.vllm.mail import send
from kvxfer.connectors.vllm.notes import (
    KEY_NBYTES,
    Leaving,
    Note,
    Receipt,
    Refusal,
    RegistrationPart,
    digest_of,
)
from kvxfer.connectors.vllm.pace import Pace, StepPace
from kvxfer.connectors.vllm.paging import GroupTable, pair_pages
from kvxfer.connectors.vllm.place import Place
from kvxfer.connectors.vllm.prefill_ranks import PrefillRanks, is_open
from kvxfer.connectors.vllm.push_registration import Registration, Share, tag_of
from kvxfer.connectors.vllm.regions import CacheRegions, remote_region
from kvxfer.connectors.vllm.settings import Settings
from kvxfer.connectors.vllm.statistics import Recorder
from kvxfer.connectors.vllm.step import FetchOrder

_log = logging.getLogger("kvxfer")

_MAX_KNOWN_SHARES: Final = 1024
_EARLY_S: Final = 1.0
# A stream's kernels take about as long.
_LOOK_AGAIN_S: Final = 0.0005


@dataclass(slots=True)
class _Fetch:
    order: FetchOrder
    # Kernels before it may still write to these blocks, for a request that had them before.
    mark: Mark
    begun_ns: int = field(default_factory=time.monotonic_ns)
    sessions: list[Future[kvxfer.Peer]] = field(default_factory=list)
    # Reads that were posted, or writes that are expected; with their group.
    work: list[tuple[int, kvxfer.Transfer | kvxfer.Incoming]] = field(default_factory=list)
    # Of each read: whose region it is of, and which.
    sources: list[tuple[kvxfer.Peer, kvxfer.RegionDescriptor]] = field(default_factory=list)
    is_posted: bool = False  # all of its work is
    is_second: bool = False  # its regions had been replaced when it was read first
    tag: bytes = b""  # that its writes carry
    failure: str = ""
    code: str = ""  # of the failure
    nbytes: int = 0
    num_pages: int = 0

    @property
    def age_s(self) -> float:
        """How long ago it was ordered."""
        return (time.monotonic_ns() - self.begun_ns) / 1e9

    def post_again(self) -> None:
        """Forgets work that has ended in vain."""
        self.is_posted = False
        self.work.clear()
        self.sources.clear()
        self.nbytes = self.num_pages = 0

    def fail(self, why: str, code: str) -> None:
        """Ends what is under way; the first reason stays."""
        if not self.failure:
            self.failure, self.code = why, code
        for _, each in self.work:
            if each.state is kvxfer.TransferState.PENDING:
                each.cancel()


class Fetches:
    """What this worker fetches. No thread waits for anything.

    Parameters
    ----------
    agent, regions, place
        Of this worker.
    settings
        Its deadlines.
    statistics
        Told of every fetch that ends.
    stream
        Of the engine's kernels, where there is one.
    """

    def __init__(
        self,
        agent: kvxfer.Agent,
        regions: CacheRegions,
        place: Place,
        settings: Settings,
        statistics: Recorder,
        stream: ComputeStream | None = None,
    ) -> None:
        self._agent = agent
        self._regions = regions
        self._reader = place.rank
        self._num_readers = place.num_ranks
        self._settings = settings
        self._statistics = statistics
        self._stream = stream
        self._marks = Marks(agent, stream)
        self._ranks = PrefillRanks(agent, settings.connect_timeout_s)
        self._fetches: dict[str, _Fetch] = {}
        self._begun: list[_Fetch] = []  # since the last step's end
        self._pace = Pace()
        self._steps = StepPace()
        self._shares: dict[tuple[int, tuple[tuple[bytes, int], ...]], tuple[plan.Share, ...]] = {}

    def begin(self, order: FetchOrder) -> None:
        """Starts one; a session that is open already is read from at once."""
        fetch = _Fetch(order, self._marks.set())
        self._fetches[order.request_id] = fetch
        self._begun.append(fetch)
        if isinstance(order.source, str):
            fetch.fail(order.source, "bad-handover")
            return
        fetch.sessions = [self._ranks.session(rank) for rank in order.source.ranks]
        self._advance(fetch)

    def abandon(self, request_id: str) -> None:
        """Stops one whose request has ended; it is still collected, when nothing can land any more."""
        if (fetch := self._fetches.get(request_id)) is not None:
            fetch.fail("the request ended", "abandoned")

    def wait_for_layer(self, layer_name: str, timeout_s: float) -> bool:
        """Waits for a layer of all that this step's forward needs; returns whether it need not wait more.

        Where kernels run in a stream it is the stream that waits for what is read, and this returns at once:
        `collect` sees how it ended.
        """
        waiting = [fetch for fetch in self._fetches.values() if fetch.order.waits]
        if not waiting:
            return True
        index, position = self._regions.position(layer_name)
        deadline = time.monotonic() + timeout_s
        return all(self._has_layer(fetch, index, position, deadline) for fetch in waiting)

    def _has_layer(self, fetch: _Fetch, index: int, position: int, deadline: float) -> bool:
        while not fetch.is_posted and not fetch.failure:
            self._advance(fetch)
            if time.monotonic() > deadline:
                return False
            _wait_to_post(fetch, max(deadline - time.monotonic(), 0.0))
        layer = self._regions.regions[index].layout.layers[position] if index >= 0 else -1
        for group, each in fetch.work:
            if group != index or layer not in each.layers or fetch.failure:
                continue
            try:
                # What is read tells its end itself; what is pushed may be refused, by a note to this worker.
                is_read = isinstance(fetch.order.source, Handover)
                if self._stream is not None and is_read and self._stream.hold(each, layer):
                    continue
                each.layer_blocking(layer, max(deadline - time.monotonic(), 0.0))
            except TimeoutError:
                self._advance(fetch)
                return bool(fetch.failure)
            except kvxfer.KvxferError as error:
                fetch.fail(str(error), error.code)
        return True

    def collect(self) -> tuple[set[str], dict[str, set[int]]]:
        """Returns requests whose fetch has ended, and of those that failed the blocks that lack bytes.

        Blocks of failed requests are of the first cache group. Each request is returned once; one that
        its forward waited for only if it failed, since it runs.
        """
        ended: set[str] = set()
        failed: dict[str, set[int]] = {}
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
                self._statistics.failed(fetch.code)
                _log.warning("kvxfer: request %s: cache not loaded: %s", request_id, fetch.failure)
            else:
                self._count(fetch)
            # A push that came whole needs no word: who wrote it knows. Nor one that was refused, and by its
            # key the word might be taken for another request's.
            source = fetch.order.source
            has_left = fetch.failure and fetch.sessions and fetch.code != "refused"
            if isinstance(source, Handover) or (isinstance(source, Appointment) and has_left):
                self._release(source, fetch.sessions)
        return ended, failed

    def _see_out(self, fetch: _Fetch) -> None:
        """Waits for the end of one whose layers are here: only then it is known to be what was granted."""
        if not fetch.is_posted:
            fetch.fail("no layer of its forward waited for it", "abandoned")
        for _, each in fetch.work:
            try:
                each.wait(self._settings.load_timeout_s)
            except TimeoutError:
                why = f"not loaded within {self._settings.load_timeout_s:g} s (load_timeout_s)"
                fetch.fail(why, "deadline")
            except kvxfer.KvxferError as error:
                fetch.fail(str(error), error.code)

    def linger(self, num_running: int) -> None:
        """Waits for what this step has begun to read, as far as it is worth it and expected in time.

        An engine begins to load behind a step's forward and asks what has ended right after: what takes
        a millisecond more is seen a whole step later.

        Parameters
        ----------
        num_running
            Requests that are computed in this step, and wait as well.
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
            for _, each in fetch.work:
                try:
                    each.wait(max(began_s + limit_s - time.monotonic(), 0.0))
                except (TimeoutError, kvxfer.KvxferError):
                    pass  # `collect` sees what became of it
        self._steps.ended(time.monotonic(), num_running)

    def rest(self, timeout_s: float) -> bool:
        """Waits for news of the oldest, without turning; returns whether there is any to wait for."""
        for fetch in self._fetches.values():
            for _, each in fetch.work:
                if each.state is kvxfer.TransferState.PENDING:
                    try:
                        each.wait(timeout_s)
                    except (TimeoutError, kvxfer.KvxferError):
                        pass  # `collect` sees what became of it
                    return True
            if not fetch.is_posted and not fetch.failure:
                _wait_to_post(fetch, timeout_s)
                return True
        return False

    def refused(self, note: Refusal) -> None:
        """Takes in that prefill does not push a request."""
        for fetch in self._fetches.values():
            if fetch.tag and fetch.tag == note.tag:
                fetch.fail(f"prefill refused: {note.reason}", "refused")

    def release(self, source: Handover | Appointment) -> Note:
        """Tells every prefill rank but itself that this worker does not need a request's blocks."""
        others = [rank for rank in source.ranks if rank.name != self._agent.name]
        return self._release(source, [self._ranks.session(rank) for rank in others])

    def stop(self, why: str, code: str) -> None:
        """Stops every fetch; returns when nothing can land any more. They are still to be collected."""
        for fetch in self._fetches.values():
            fetch.fail(why, code)
            for _, each in fetch.work:
                try:
                    each.wait(self._settings.load_timeout_s)
                except (kvxfer.KvxferError, TimeoutError):
                    pass  # it ended, or the end of its region or of the agent ends it

    def close(self) -> None:
        """Stops everything; returns when nothing can land any more."""
        self.stop("the engine shuts down", "closed")
        self._fetches.clear()
        self._ranks.close()

    def _count(self, fetch: _Fetch) -> None:
        stages = [each.stages for _, each in fetch.work]
        if stages and isinstance(fetch.order.source, Handover):
            took_ns = max(each.ended_ns for each in stages) - min(each.posted_ns for each in stages)
            self._pace.took(_name(fetch.order.source), fetch.nbytes, took_ns / 1e9)
        self._statistics.loaded(
            fetch.order.request_id,
            began_ns=fetch.begun_ns,
            noticed_ns=time.monotonic_ns(),
            stages=[(each.posted_ns, each.ended_ns) for each in stages],
            rails=[rail for _, each in fetch.work for rail in each.rails],
            nbytes=fetch.nbytes,
            num_pages=fetch.num_pages,
            num_ranks=len(fetch.sessions),
        )

    # ---- one fetch ----------------------------------------------------------------------------

    def _advance(self, fetch: _Fetch) -> bool:
        """Takes a fetch as far as it goes now; returns whether it has ended."""
        if not fetch.is_posted and not fetch.failure:
            # Prefill writes as soon as it hears where to: these blocks have to be this request's alone.
            if isinstance(fetch.order.source, Appointment) and not fetch.mark.has_passed:
                return False
            if all(session.done() for session in fetch.sessions):
                try:
                    self._post(fetch)
                    fetch.is_posted = True
                except kvxfer.KvxferError as error:
                    # Prefill is waking: what its caches are called now is on its way.
                    if error.code == "unknown-region" and not fetch.work and fetch.age_s < _EARLY_S:
                        return False
                    fetch.fail(str(error), error.code)
                except Exception as error:
                    # What came from outside may surprise us; it must not end the engine.
                    _log.exception("kvxfer: request %s: cannot be fetched", fetch.order.request_id)
                    fetch.fail(f"{type(error).__name__}: {error}", "internal")
            elif fetch.age_s > self._settings.connect_timeout_s:
                why = f"no session within {self._settings.connect_timeout_s:g} s (connect_timeout_s)"
                fetch.fail(why, "unreachable")
            else:
                return False
        # Looked at once: what fails between two looks would be neither failed nor under way.
        states = [each.state for _, each in fetch.work]
        failed = [
            each.error
            for (_, each), state in zip(fetch.work, states, strict=True)
            if state in (kvxfer.TransferState.FAILED, kvxfer.TransferState.CANCELLED)
        ]
        if failed and not fetch.failure:
            if self._was_early(fetch, failed):
                fetch.post_again()
                return False
            if self._was_of_old(fetch, failed):
                are_replaced = _are_replaced(fetch, states)
                if are_replaced and kvxfer.TransferState.PENDING not in states:
                    fetch.post_again()
                    fetch.is_second = True
                if are_replaced or fetch.age_s < _EARLY_S:
                    return False
        for lost in failed:
            fetch.fail(str(lost), "internal" if lost is None else lost.code)
        is_over = kvxfer.TransferState.PENDING not in states
        # Expected writes are anybody's, so no lost session ends them.
        if fetch.tag and not is_over and not all(is_open(session) for session in fetch.sessions):
            fetch.fail("prefill was lost before it had pushed all", "peer-lost")
        return is_over

    def _was_early(self, fetch: _Fetch, errors: list[kvxfer.KvxferError | None]) -> bool:
        """Whether all of it failed for leases that may be in force the next time we ask.

        A response that brings a request back tells them one step before decode's workers hear of them.
        """
        return (
            isinstance(fetch.order.source, Handover)
            and fetch.order.source.comes_back
            and fetch.age_s < _EARLY_S
            and len(errors) == len(fetch.work)
            and all(error is not None and error.code == "lease-ended" for error in errors)
        )

    def _was_of_old(self, fetch: _Fetch, errors: list[kvxfer.KvxferError | None]) -> bool:
        """Whether all of it that failed was read from regions that are no more, for the first time.

        A prefill that has just woken hands over before its new regions are heard of here. Layers that
        a forward waits for may be in use by now, and are not brought twice.
        """
        return (
            isinstance(fetch.order.source, Handover)
            and not fetch.order.waits
            and not fetch.is_second
            and fetch.age_s < self._settings.load_timeout_s
            and all(error is not None and error.code == "region-gone" for error in errors)
        )

    def _post(self, fetch: _Fetch) -> None:
        peers = [session.result() for session in fetch.sessions]
        # Before anything is under way: one may not be told yet.
        remotes = [[remote_region(peer, region.name) for peer in peers] for region in self._regions.regions]
        if isinstance(fetch.order.source, Handover):
            self._read(fetch, fetch.order.source, peers, remotes)
        elif isinstance(fetch.order.source, Appointment):
            self._expect(fetch, fetch.order.source, peers, remotes)

    def _read(
        self,
        fetch: _Fetch,
        handover: Handover,
        peers: list[kvxfer.Peer],
        remotes: list[list[kvxfer.RegionDescriptor]],
    ) -> None:
        order = fetch.order
        spent_s = fetch.age_s if fetch.is_second else 0.0
        timeout_s = max(self._settings.load_timeout_s - spent_s, 0.001)
        for group, region in enumerate(self._regions.regions):
            own = self._regions.groups[group]
            src = GroupTable(
                handover.tables[own.table],
                handover.block_sizes[own.table],
                handover.pages_per_block[own.table],
            )
            pairs = pair_pages(src, self._table(order, group), order.first_token, order.num_tokens)
            if not len(pairs.dst):
                continue
            fetch.num_pages += len(pairs.dst)
            fetch.nbytes += len(pairs.dst) * region.layout.block_nbytes
            for share in self._shares_of(group, region, remotes[group]):
                transfer = self._agent.read(
                    region,
                    remotes[group][share.src],
                    pairs.src,
                    pairs.dst,
                    layers=share.layers,
                    heads=share.heads,
                    tokens=pairs.tokens,
                    after=fetch.mark.after,
                    timeout_s=timeout_s,
                    lease=own.lease(handover.leases[own.table]),
                )
                fetch.work.append((group, transfer))
                fetch.sources.append((peers[share.src], remotes[group][share.src]))

    def _expect(
        self,
        fetch: _Fetch,
        appointment: Appointment,
        peers: list[kvxfer.Peer],
        remotes: list[list[kvxfer.RegionDescriptor]],
    ) -> None:
        """Lets prefill write, and tells each of its ranks where to."""
        order = fetch.order
        tables = [self._table(order, group) for group in range(len(self._regions.groups))]
        shares: list[list[Share]] = [[] for _ in peers]
        fetch.tag = secrets.token_bytes(KEY_NBYTES)
        for group, region in enumerate(self._regions.regions):
            page_size = tables[group].page_size
            first_page = order.first_token // page_size
            pages = tables[group].pages[first_page : -(-order.num_tokens // page_size)]
            if not pages.any():
                continue
            # Pages of one size are written whole, others token by token.
            are_unlike = any(
                each.layout.block_tokens != region.layout.block_tokens for each in remotes[group]
            )
            before = first_page * page_size
            tokens = range(order.first_token - before, order.num_tokens - before) if are_unlike else None
            for share in self._shares_of(group, region, remotes[group]):
                layers, heads = (
                    (share.layers.start, share.layers.stop),
                    (share.heads.start, share.heads.stop),
                )
                shares[share.src].append(Share(group=group, layers=layers, heads=heads))
            incoming = self._agent.expect(
                tag_of(fetch.tag, group),
                pages,
                region,
                tokens=tokens,
                timeout_s=self._settings.push_timeout_s,
            )
            fetch.work.append((group, incoming))
            num_pages = int((pages != 0).sum())
            fetch.num_pages += num_pages
            fetch.nbytes += num_pages * region.layout.block_nbytes
        for peer, wanted in zip(peers, shares, strict=True):
            registration = Registration(
                tag=fetch.tag.hex(),
                prompt=appointment.prompt,
                first_token=order.first_token,
                num_tokens=order.num_tokens,
                tables=tuple(table.blocks for table in tables),
                block_sizes=tuple(table.block_size for table in tables),
                pages_per_block=tuple(table.pages_per_block for table in tables),
                shares=tuple(wanted),
            )
            content = registration.model_dump_json().encode()
            for part in RegistrationPart.split(appointment.key, self._reader, self._num_readers, content):
                send(self._agent, self._regions, peer, part)

    def _table(self, order: FetchOrder, group: int) -> GroupTable:
        return self._regions.table(group, order.tables[self._regions.groups[group].table])

    def _shares_of(
        self, group: int, region: kvxfer.Region, remotes: list[kvxfer.RegionDescriptor]
    ) -> tuple[plan.Share, ...]:
        """Returns which ranks serve this one; what several hold is spread over this engine's workers."""
        key = group, tuple((remote.incarnation, remote.id) for remote in remotes)
        shares = self._shares.get(key)
        if shares is None:
            load = [float((at - self._reader) % len(remotes)) for at in range(len(remotes))]
            shares = plan.route([remote.layout for remote in remotes], [region.layout], load)
            if len(self._shares) >= _MAX_KNOWN_SHARES:
                self._shares.clear()  # of engines that came and went
            self._shares[key] = shares
        return shares

    def _missing(self, fetch: _Fetch) -> set[int]:
        order = fetch.order
        if fetch.is_posted:
            ratio = self._regions.pages_per_block[0]
            pages = [
                int(page)
                for group, each in fetch.work
                if self._regions.groups[group].table == 0 and each.state is not kvxfer.TransferState.DONE
                for page in each.failed_blocks
            ]
            if pages:
                return {page // ratio for page in pages}
        block_size = self._regions.groups[0].block_size
        return set(order.tables[0][order.first_token // block_size :]) - {0}

    def _release(self, source: Handover | Appointment, sessions: list[Future[kvxfer.Peer]]) -> Note:
        note: Note
        if isinstance(source, Handover):
            request = digest_of(source.request_id)
            first_lease = digest_of(str(source.leases[0]))
            note = Receipt(request, first_lease, self._reader, self._num_readers)
        else:
            note = Leaving(source.key, self._reader, self._num_readers)
        for session in sessions:
            # Called at once where the session is there, else by who dials: the engine may step no more.
            session.add_done_callback(lambda session: self._send(session, note))
        return note

    def _send(self, session: Future[kvxfer.Peer], note: Note) -> None:
        if not session.cancelled() and session.exception() is None:
            send(self._agent, self._regions, session.result(), note)


def _wait_to_post(fetch: _Fetch, timeout_s: float) -> None:
    """Waits for what a fetch cannot be posted without."""
    _, missing = wait(fetch.sessions, timeout_s)
    if not missing and not fetch.mark.has_passed:
        time.sleep(min(timeout_s, _LOOK_AGAIN_S))


def _name(source: Handover) -> str:
    """Returns which engine, and which start of it, computed a request."""
    return source.ranks[0].name


def _are_replaced(fetch: _Fetch, states: list[kvxfer.TransferState]) -> bool:
    """Whether all regions that it was read from in vain have others in their place by now."""
    try:
        return all(
            (told := peer.regions.get(gone.name)) is not None and told.id != gone.id
            for (peer, gone), state in zip(fetch.sources, states, strict=True)
            if state is kvxfer.TransferState.FAILED
        )
    except kvxfer.KvxferError:
        return False  # nobody is left to ask
