"""Prefill's side at a worker: writes a request's layers to decode as the forward computes them.

Each write is posted before the forward of the step that computes its tokens. During the forward its layers
are released, an eighth at a time: when they are computed, or, where kernels run on a stream, when the stream
has computed them. If a reader registers late, the tokens that it missed are written at once.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any, Final

import kvxfer
from kvxfer.connectors.common.bounded_table import remember
from kvxfer.connectors.common.compute_stream import PASSED, ComputeStream, LayerMarks, Marks
from kvxfer.connectors.common.ending import quiesce
from kvxfer.connectors.common.handover import MAX_READERS
from kvxfer.connectors.common.mail import Mail
from kvxfer.connectors.common.notes import KEY_NBYTES, Leaving, Refusal, RegistrationPart, context_of
from kvxfer.connectors.common.paging import GroupTable, counted, pair_pages
from kvxfer.connectors.common.push_reader import Reader
from kvxfer.connectors.common.push_registration import Registration, Share
from kvxfer.connectors.common.regions import CacheRegions, remote_region
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.statistics import Recorder
from kvxfer.connectors.common.step import Chunk, News, Remainder
from kvxfer.connectors.common.waiting_registrations import Arrival, Registrations
from kvxfer.connectors.common.worker_rank import engine_of

_log = logging.getLogger("kvxfer")

# How long a step waits for pending writes from pages that it is about to overwrite, before it cancels them.
_SETTLE_S: Final = 1.0
# Releases of each write in one forward. Each release costs a frame and wakes the other end; with 8, an eighth
# of the write is left for the end of the forward.
_NUM_RELEASES: Final = 8


@dataclass(slots=True)
class _Push:
    """The push of one request."""

    chunk: Chunk  # the newest
    engines: dict[str, int] = field(default_factory=dict)  # each reader engine's workers; 0 until one came
    # Tokens of which every layer is certainly computed. Tokens from the prefix cache do not count at first:
    # another request may compute them in the same forward, so they are written in it, layer by layer.
    ready: int = 0
    readers: dict[tuple[str, int], Reader] = field(default_factory=dict)  # by engine and worker
    may_be_shared: bool = False  # other engines may come
    expires_at: float = 0.0  # 0 until its request has finished
    is_read: bool = False  # all known readers have everything; others may come while it is kept
    gives_way: bool = False

    def may_be_pushed_to(self, engine: str) -> bool:
        """Whether the router names this engine as a reader, or names no reader."""
        return not self.chunk.readers or engine in self.chunk.readers

    @property
    def is_returning(self) -> bool:
        """Whether its request has finished and all readers have registered: they get it within moments."""
        return bool(self.expires_at) and self._are_all_here

    @property
    def has_ended(self) -> bool:
        """Whether every reader has registered and has ended."""
        return self._are_all_here and all(reader.has_ended for reader in self.readers.values())

    @property
    def _are_all_here(self) -> bool:
        return (
            bool(self.engines)
            and all(self.engines.values())
            and len(self.readers) == sum(self.engines.values())
        )


class Pushes:
    """All pushes of this worker.

    Parameters
    ----------
    agent, regions, mail
        Of this worker.
    settings
        Its deadlines.
    statistics
        Counts readers that have everything, and requests that expired or gave way.
    stream
        The stream of the engine's kernels, if there is one.
    """

    def __init__(
        self,
        agent: kvxfer.Agent,
        regions: CacheRegions,
        mail: Mail,
        settings: Settings,
        statistics: Recorder,
        stream: ComputeStream | None = None,
    ) -> None:
        self._agent = agent
        self._regions = regions
        self._mail = mail
        self._settings = settings
        # How long to wait for a reader to let go; by then its session is lost as silent, or is ended here.
        self._patience_s = settings.silent_timeout_s + _SETTLE_S
        self._statistics = statistics
        self._registrations = Registrations(max(settings.lease_ttl_s, settings.push_timeout_s))
        self._pushes: dict[bytes, _Push] = {}
        self._keys: dict[str, bytes] = {}  # by request id
        self._ended: dict[bytes, str] = {}  # the reason, by key; bounded
        self._claimed: dict[bytes, set[str]] = {}  # engines that claimed a push before its request; bounded
        # Requests whose pushes ended in sleep: their blocks go back now, or when the requests have finished.
        self._due: set[str] = set()
        self._owed: set[str] = set()
        self._news = News()
        self._read: set[str] = set()  # fully read and perhaps shared; not yet reported to the scheduler half
        self._leaving: list[Reader] = []  # readers of pages that this step takes away
        # The running step: the pushes that it computes, their held writes, and the layers that are done.
        self._computing: set[bytes] = set()
        self._held: list[tuple[int, kvxfer.Transfer]] = []
        self._done: list[set[int]] = [set() for _ in regions.groups]
        self._num_done = [0] * len(regions.groups)
        self._marks = Marks(agent, stream)
        self._computed = PASSED  # behind the last step's forward
        self._layer_marks: list[LayerMarks] | None = None
        if stream is not None:
            self._layer_marks = [LayerMarks(agent, stream, each.layout.layers) for each in regions.regions]

    def __len__(self) -> int:
        return len(self._pushes)

    # ---- before a forward -------------------------------------------------------------------

    def withdraw(self, request_id: str) -> None:
        """Ends the push of a request that loses its pages; see `settle`."""
        self._owed.discard(request_id)
        key = self._keys.pop(request_id, None)
        if key is None:
            return
        self._end(key, "its request ended before its prompt was computed")

    def preempt(self, request_id: str) -> None:
        """Resets the push of a preempted request, which loses its pages; see `settle`.

        Readers that register meanwhile are served when the prompt is computed again.
        """
        if (key := self._keys.get(request_id)) is not None:
            self._pushes[key].ready = 0
            self._leaving += self._pushes[key].readers.values()

    def shrink(self, remainder: Remainder) -> None:
        """Continues a push without the pages that left a window; see `settle`.

        A later reader that asks for one of them is refused.
        """
        if (key := self._keys.get(remainder.request_id)) is not None:
            push = self._pushes[key]
            push.chunk = replace(push.chunk, tables=remainder.tables)
            self._leaving += push.readers.values()

    def settle(self) -> None:
        """Returns when none of the pages is read that this step takes away.

        The time does not grow with the number of requests, readers or engines that lose pages in one step.
        """
        leaving, self._leaving = self._leaving, []
        deadline = time.monotonic() + _SETTLE_S
        late = [reader for reader in leaving if not reader.is_quiet_by(deadline)]
        for reader in late:
            self._fail(reader, "its pages were needed before they were fetched")
        deadline = time.monotonic() + self._patience_s
        if stuck := [reader for reader in late if not reader.is_quiet_by(deadline)]:
            quiesce(kvxfer.Group([each.writes for each in stuck]), {each.peer for each in stuck}, 0.0)

    def begin(self, chunk: Chunk) -> None:
        """Posts writes of the tokens that the forward will compute, and of earlier ones not yet written."""
        if (key := self._keys.get(chunk.request_id)) is None:
            key = self._keys[chunk.request_id] = self._free_key(chunk)
            self._ended.pop(key, None)
            engines = self._claimed.pop(key, ())
            self._pushes[key] = _Push(chunk, dict.fromkeys(chunk.readers or engines, 0))
            self._owed.discard(chunk.request_id)
        push = self._pushes[key]
        push.chunk = replace(chunk, key=key)
        self._computing.add(key)
        for reader in push.readers.values():
            self._serve(push, reader)
        self._admit(push)

    def _free_key(self, chunk: Chunk) -> bytes:
        if chunk.key not in self._pushes:
            return chunk.key
        _log.warning(
            "kvxfer: request %s is not pushed: a request whose blocks are still kept has the same key; the "
            "router must draw a key for each request",
            chunk.request_id,
        )
        return secrets.token_bytes(KEY_NBYTES)

    # ---- in a forward -----------------------------------------------------------------------

    @property
    def are_computed(self) -> bool:
        """Whether the running step computes tokens of a push."""
        return bool(self._computing)

    def layer_done(self, layer_name: str) -> None:
        """Counts one layer of this step as computed; releases an eighth of the layers at a time."""
        index, position = self._regions.position(layer_name)
        if index < 0 or not self._computing:
            return
        done = self._done[index]
        done.add(position)
        while self._num_done[index] in done:
            self._num_done[index] += 1
        every = max(len(self._regions.regions[index].layout.layers) // _NUM_RELEASES, 1)
        if self._num_done[index] % every:
            return
        if self._layer_marks is not None:
            self._layer_marks[index].computed(self._num_done[index])
        for group, write in self._held:
            if group == index:
                self._release(group, write)

    def step_done(self, whole: bool) -> None:
        """Releases all layers of this step; if the forward failed (not `whole`), ends its pushes instead."""
        # In every step: a prompt's cached beginning may come from a step that computed nothing for a push.
        self._computed = self._marks.set()
        if not self._computing:
            return
        # Also after a failed forward: the marks of this step must not release layers of the next one.
        for marks in self._layer_marks or ():
            marks.step_done()
        computing, self._computing = self._computing, set()
        if whole:
            for group, region in enumerate(self._regions.regions):
                self._num_done[group] = len(region.layout.layers)
            for group, write in self._held:
                self._release(group, write)
        for key in computing:
            push = self._pushes.get(key)
            if push is None:
                continue
            if not whole:
                self._end(key, "its forward failed")
                continue
            push.ready = push.chunk.stop_token
        self._held.clear()
        for group, done in enumerate(self._done):
            done.clear()
            self._num_done[group] = 0
        self.settle()

    def _release(self, group: int, write: kvxfer.Transfer) -> None:
        first = self._regions.regions[group].layout.layers[0]
        count = min(first + self._num_done[group] - write.layers.start, len(write.layers))
        if count > 0 and write.state is kvxfer.TransferState.PENDING:
            write.mark_ready(count)

    # ---- notes ------------------------------------------------------------------------------

    def claim(self, key: bytes, sender: str) -> None:
        """Processes a claim: the sender's engine knows a request and will register for it."""
        engine = engine_of(sender)
        if (push := self._pushes.get(key)) is None:
            claimed = self._claimed.get(key, set())
            if len(claimed) < MAX_READERS:
                remember(self._claimed, key, claimed | {engine})  # its request may come later
            return
        if not push.may_be_pushed_to(engine):
            return
        if len(push.engines) < MAX_READERS:
            push.engines.setdefault(engine, 0)
        if push.expires_at:
            self._keep_longer(push)
            self._tell_of(push)

    def _keep_longer(self, push: _Push) -> None:
        push.is_read = False
        self._read.discard(push.chunk.request_id)
        push.expires_at = time.monotonic() + self._settings.lease_ttl_s

    def give_way(self, request_id: str) -> None:
        """Stops keeping a finished request, because other requests need its blocks."""
        if (key := self._keys.get(request_id)) is not None and not self._pushes[key].gives_way:
            self._pushes[key].gives_way = True
            if not self._pushes[key].is_read:
                self._statistics.gave_way()

    def take_news(self) -> News:
        """Returns the news from readers and their engines since the last call."""
        news = replace(self._news, read=tuple(sorted(self._read)))
        self._news = News()
        self._read.clear()
        return news

    def note(self, peer: kvxfer.Peer, note: RegistrationPart | Leaving) -> None:
        """Processes a registration or a leaving of a reader."""
        try:
            for arrival in self._registrations.add(peer, note):
                # Without a refusal, the forgotten reader would wait until its deadline.
                self._refuse(
                    arrival.peer, arrival.registration, "too many registrations of its engine wait at prefill"
                )
        except ValueError as error:
            _log.warning("kvxfer: %s: %s", peer.name, error)
        if (push := self._pushes.get(note.key)) is not None:
            self._admit(push)
        elif (why := self._ended.get(note.key)) is not None:
            for arrival in self._registrations.take(note.key):
                self._refuse(arrival.peer, arrival.registration, why)

    def _admit(self, push: _Push) -> None:
        for arrival in self._registrations.take(push.chunk.key):
            engine = engine_of(arrival.peer.name)
            num_readers = push.engines.get(engine) or arrival.num_readers
            if not push.may_be_pushed_to(engine):
                self._refuse(
                    arrival.peer, arrival.registration, "the router named other engines as its readers"
                )
                continue
            if arrival.num_readers != num_readers:
                self._refuse(arrival.peer, arrival.registration, "its readers do not agree on their number")
                continue
            push.engines[engine] = num_readers
            push.may_be_shared = push.may_be_shared or (arrival.may_be_shared and not push.chunk.readers)
            known = push.readers.get((engine, arrival.reader))
            if known is None:
                reader = push.readers[engine, arrival.reader] = self._reader(push, arrival)
                self._serve(push, reader)
                if push.is_read:
                    self._keep_longer(push)
                self._tell_of(push)
            elif known.peer.id != arrival.peer.id:
                self._refuse(
                    arrival.peer,
                    arrival.registration,
                    "prefill already pushes it to another worker of this name",
                )
            elif arrival.registration is None:
                known.fail("it left")
            else:
                self._refuse(arrival.peer, arrival.registration, "another request has the same key")

    def _reader(self, push: _Push, arrival: Arrival) -> Reader:
        registration = arrival.registration
        reader = Reader(arrival.peer, registration)
        if registration is None:
            return reader
        num_groups = len(self._regions.groups)
        reader.posted = [registration.first_token] * num_groups
        asks, has = registration.num_tokens, push.chunk.num_tokens
        # A state exists only for all tokens of the prompt, not for fewer.
        is_too_short = asks < has and any(group.is_state for group in self._regions.groups)
        if registration.prompt != push.chunk.prompt or asks > has or is_too_short:
            self._fail(
                reader,
                f"decode has another prompt (it asks for {asks} tokens, prefill's has {has}): the router "
                "must send both engines the same request",
            )
        elif len(registration.tables) != num_groups:
            self._fail(
                reader, f"decode has {len(registration.tables)} cache groups, prefill has {num_groups}"
            )
        return reader

    # ---- writes -----------------------------------------------------------------------------

    def _serve(self, push: _Push, reader: Reader) -> None:
        """Posts writes of all tokens that this reader lacks and that are, or are being, computed."""
        self._look_after(reader)
        if reader.registration is None or reader.failure:
            return
        try:
            self._post(push, reader, reader.registration, push.ready, False)
            if push.chunk.key in self._computing:
                self._post(push, reader, reader.registration, push.chunk.stop_token, True)
        except kvxfer.KvxferError as error:
            self._fail(reader, str(error))
        except Exception as error:
            # Unexpected input from another engine must not end this engine.
            _log.exception("kvxfer: request %s: cannot be pushed", push.chunk.request_id)
            self._fail(reader, f"{type(error).__name__}: {error}")

    def _post(
        self, push: _Push, reader: Reader, registration: Registration, stop_token: int, computing: bool
    ) -> None:
        chunk = push.chunk
        is_last = stop_token >= registration.num_tokens
        # A partly filled page waits until it is full, or until the last token.
        stops = [
            registration.num_tokens if is_last else self._whole(chunk, group, stop_token)
            for group in range(len(self._regions.groups))
        ]
        writes: list[kvxfer.Transfer] = []
        try:
            for share in registration.shares:
                first, stop = reader.posted[share.group], stops[share.group]
                write = self._write(push, reader, share, first, stop, computing) if first < stop else None
                if write is None:
                    continue
                writes.append(write)
                if computing and self._layer_marks is None:
                    self._held.append((share.group, write))
                    self._release(share.group, write)
        finally:
            reader.took(writes)
        reader.posted = [max(posted, stop) for posted, stop in zip(reader.posted, stops, strict=True)]

    def _write(
        self, push: _Push, reader: Reader, share: Share, first: int, stop: int, computing: bool
    ) -> kvxfer.Transfer | None:
        """Posts the write of some tokens of one group; None if no page of them is to move."""
        assert reader.registration is not None
        chunk, registration, group = push.chunk, reader.registration, share.group
        region = self._regions.regions[group]
        src, dst = self._table(chunk, group), registration.table(group)
        pairs = pair_pages(src, dst, first, stop)
        if pairs.num_lacking:
            raise kvxfer.UsageError(
                f"prefill has given back {pairs.num_lacking} pages of {region.name} that decode asks for",
                code="out-of-range",
            )
        if not len(pairs.dst):
            return None
        remote = remote_region(reader.peer, region.name)
        return self._agent.write(
            region,
            remote,
            counted(pairs.src, region.layout, src.pages_per_block),
            counted(pairs.dst, remote.layout, dst.pages_per_block),
            layers=range(*share.layers),
            heads=range(*share.heads),
            tokens=pairs.tokens,
            notify=registration.tag_of(group),
            timeout_s=self._settings.load_timeout_s,
            context=context_of(chunk.request_id, chunk.trace),
            **self._order(group, share.layers[0], computing),
        )

    def _order(self, group: int, first_layer: int, computing: bool) -> dict[str, Any]:
        """Returns the arguments that make a write wait until its tokens are computed."""
        if self._layer_marks is None:
            return {"hold": computing}
        return {"after": self._layer_marks[group].after(first_layer) if computing else self._computed.after}

    def _whole(self, chunk: Chunk, group: int, stop_token: int) -> int:
        """Returns how many tokens of an unfinished prompt fill whole pages; 0 for states."""
        table = self._table(chunk, group)
        return 0 if table.is_state else stop_token - stop_token % table.page_size

    def _table(self, chunk: Chunk, group: int) -> GroupTable:
        return self._regions.table(group, chunk.tables[self._regions.groups[group].table])

    # ---- the end ----------------------------------------------------------------------------

    def collect(self, finished_request_ids: set[str]) -> set[str]:
        """Returns the requests whose blocks the engine may reuse; each once."""
        self._registrations.expire()
        now = time.monotonic()
        for request_id in finished_request_ids & self._keys.keys():
            push = self._pushes[self._keys[request_id]]
            push.expires_at = push.expires_at or now + self._settings.lease_ttl_s
            self._tell_of(push)
        given_back = self._due | (finished_request_ids & self._owed)
        self._due = set()
        self._owed -= given_back
        for key, push in list(self._pushes.items()):
            if not push.expires_at:
                continue
            for reader in push.readers.values():
                self._look_after(reader)
            has_ended = push.has_ended  # read once: a write that ends meanwhile counts in the next call
            if has_ended and push.may_be_shared and not push.gives_way:
                if not push.is_read:
                    push.is_read = True
                    self._read.add(push.chunk.request_id)
                if push.expires_at > now:
                    continue
            is_late = (push.gives_way or push.expires_at <= now) and not has_ended
            if is_late:
                why = f"it took more than {self._settings.lease_ttl_s:g} s (lease_ttl_s)"
                for reader in push.readers.values():
                    self._fail(
                        reader, "prefill needed its blocks for other requests" if push.gives_way else why
                    )
                if any(not reader.has_ended for reader in push.readers.values()):
                    continue
            elif not has_ended:
                continue
            if not push.has_ended and not push.gives_way:
                _log.warning(
                    "kvxfer: request %s: not all of its readers finished within %g s; its blocks are "
                    "given back",
                    push.chunk.request_id,
                    self._settings.lease_ttl_s,
                )
            for reader in push.readers.values():
                if reader.registration is not None and not reader.failure:
                    self._statistics.received()
            if is_late and not push.gives_way:
                self._statistics.expired()
            del self._pushes[key], self._keys[push.chunk.request_id]
            remember(self._ended, key, "prefill has given its blocks back")
            given_back.add(push.chunk.request_id)
        return given_back

    def _tell_of(self, push: _Push) -> None:
        if push.expires_at and push.engines:
            names = frozenset({push.chunk.request_id})
            self._news |= News(names, names if push.is_returning else frozenset())

    def let_go(self) -> None:
        """Ends every push, because its pages lose their bytes; `collect` returns the requests as usual."""
        for key, push in list(self._pushes.items()):
            (self._due if push.expires_at else self._owed).add(push.chunk.request_id)
            self._end(key, "its engine sleeps")
        self.settle()

    def close(self) -> None:
        """Ends every push."""
        for key in list(self._pushes):
            self._end(key, "the engine shuts down")
        self.settle()
        self._keys.clear()

    def _look_after(self, reader: Reader) -> None:
        """Fails a reader if a write to it failed or its session is lost."""
        if (error := reader.writes.error) is not None:
            self._fail(reader, str(error))
        elif not reader.has_ended and reader.peer.state is kvxfer.PeerState.LOST:
            reader.failure = reader.failure or "its engine is gone"

    def _end(self, key: bytes, why: str) -> None:
        """Ends a push; its pages may be read until `settle` has returned."""
        push = self._pushes.pop(key)
        self._keys.pop(push.chunk.request_id, None)
        self._computing.discard(key)
        remember(self._ended, key, why)
        for reader in push.readers.values():
            self._fail(reader, why)
        self._leaving += push.readers.values()

    def _fail(self, reader: Reader, why: str) -> None:
        """Stops writing to a reader and tells it why; the first reason stays."""
        if reader.failure or reader.has_ended:
            return
        reader.fail(why)
        self._refuse(reader.peer, reader.registration, why)
        reader.registration = None  # its tables may be long

    def _refuse(self, peer: kvxfer.Peer, registration: Registration | None, why: str) -> None:
        if registration is not None:
            self._mail.send(peer, Refusal(bytes.fromhex(registration.tag), why))
