"""Replays what TensorRT-LLM's executor asks of its connector, on real buffers: no engine, no scheduler.

`contracts/` records the sequences: what an engine does with a request, word by word, beside the order of
calls in an iteration, and names the files and commits that they were read from. `Engine.iterate` makes the
calls of one iteration for all requests that it was given, in that order. Each call is made by the recorded
thread, and each iteration is compared with the recorded order.

| word | what the engine does |
| --- | --- |
| begin | gives the request blocks, and asks which of its tokens another engine has |
| load | computes nothing of it until the promised tokens have arrived |
| chunk | computes tokens once |
| compute | computes tokens until its last one is sampled |
| fail | computes it, and the forward raises: all running requests end |
| end | ends it, also before its last token |
| preempt, reset | takes its blocks, as older or newer releases tell the connector |
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tests.trtllm import fake_engine
from tests.trtllm.cache import BLOCK_SIZE, NUM_LAYERS, Cache, Options, blocks_of, prefix_hashes, sampled
from tests.trtllm.contract import interface
from tests.trtllm.fake_engine import COMPLETE, CONTEXT, GENERATION, LOADING, SAVING, LlmRequest

#: The bound of every wait; the tests assert nothing about durations.
BOUND_S: Final = 60.0

# What the connector holds of requests, by the names of its members.
_OF_WORKER: Final = "_steps", "_orders", "_started", "_received", "_through", "_aborted", "_parked"
_OF_SCHEDULER: Final = "_requests", "_promised", "_loading", "_blocks", "_reset", "_granting"
_OF_HALF: Final = "_prefills", "_sources", "_said", "_fetching", "_kept", "_claimed"


@dataclass
class Answer:
    """The outcome of a request: ``"done"`` with its tokens, ``"cancelled"`` or ``"failed"``."""

    what: str
    tokens: list[int]
    num_matched: int


class Request:
    """A request in the engine, and the words of its sequence that are left."""

    def __init__(self, own: list[LlmRequest], words: list[str], num_local: int) -> None:
        self.own = own  # each rank has its own object
        self.words = deque(words)
        self.num_local = num_local  # tokens at the beginning that its own prefix cache has
        self.num_matched = self.chunk = 0
        self.tables: list[list[int]] = []
        self.told_tables: list[int] = []  # how many blocks the connector knows
        self.num_told_tokens = 0
        self.id = own[0].request_id

    @property
    def position(self) -> int:
        (found,) = {each.context_current_position for each in self.own}
        return found

    @property
    def state(self) -> str:
        (found,) = {each.state for each in self.own}
        return found

    def set(self, **changes: Any) -> None:
        for each in self.own:
            vars(each).update(changes)

    @property
    def tokens(self) -> list[int]:
        return self.own[0].get_tokens(0)

    @property
    def is_whole(self) -> bool:
        return len(self.tokens) == self.own[0].prompt_len + self.own[0].max_new_tokens

    @property
    def hashes(self) -> list[int]:
        return prefix_hashes(self.tokens, self.own[0].cache_salt)


# ---- ranks ------------------------------------------------------------------------------------


class Ranks:
    """The messages between the ranks of an engine, which are threads; each receives copies."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[bytes]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._slots = barrier, slots

    def allgather(self, own: Any) -> list[Any]:
        self._slots[self.rank] = pickle.dumps(own)
        self._barrier.wait(BOUND_S)
        gathered = [pickle.loads(each) for each in self._slots]  # noqa: S301 - of this process
        self._barrier.wait(BOUND_S)
        return gathered

    def broadcast(self, own: Any) -> Any:
        return self.allgather(own)[0]


_local = threading.local()


class _Here:
    """The messages of the rank whose thread this is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_local.ranks, name)


def _enter(ranks: Ranks) -> None:
    _local.ranks = ranks


@contextmanager
def installed(release: str) -> Iterator[None]:
    """Puts a release where the connector looks for the engine."""
    fake_engine.install(release, _Here(), Manager)
    try:
        yield
    finally:
        fake_engine.uninstall()


@dataclass
class AsyncRequests:
    """Requests whose blocks move."""

    saving: dict[int, Any] = field(default_factory=dict)
    loading: dict[int, Any] = field(default_factory=dict)

    def take(self, other: AsyncRequests) -> None:
        self.saving |= other.saving
        self.loading |= other.loading
        other.saving, other.loading = {}, {}

    def extract(self, saving: Any, loading: Any) -> AsyncRequests:
        """Removes requests; one that is unknown, or was given back before, is an error."""
        return AsyncRequests(
            {each: self.saving.pop(each) for each in sorted(saving)},
            {each: self.loading.pop(each) for each in sorted(loading)},
        )


class Manager:
    """Stands between one rank's loop and its connector, and makes the ranks agree on what has ended."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.new_async_requests = AsyncRequests()
        self.pending_async_requests = AsyncRequests()
        self.local_finished_async_requests = AsyncRequests()

    def get_finished(self) -> list[int]:
        """Returns requests that every rank has saved; those that every rank has loaded go on."""
        new, local = self.new_async_requests, self.local_finished_async_requests
        finished, started = list(new.saving), list(new.loading)
        self.pending_async_requests.take(new)
        local.take(self.pending_async_requests.extract(*self.worker.get_finished(finished, started)))
        said = _local.ranks.allgather((set(local.saving), set(local.loading)))
        everywhere = local.extract(*(set.intersection(*each) for each in zip(*said, strict=True)))
        for request in everywhere.loading.values():
            request.state = CONTEXT
        return list(everywhere.saving)

    @property
    def is_idle(self) -> bool:
        parts = self.new_async_requests, self.pending_async_requests, self.local_finished_async_requests
        return not any(each.saving or each.loading for each in parts)


class Rank:
    """One rank: its connector, its memory, and the threads that call."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self._contract = interface(options.release)
        self._is_by_group = options.kind == "layout"
        self.ranks, self.cache = ranks, Cache(options, ranks.rank)
        # The calls of an iteration; a rank without a scheduler makes a part of them.
        self.calls: list[str] = []
        self._threads = {
            name: ThreadPoolExecutor(1, initializer=_enter, initargs=(ranks,))
            for name in ("constructed", "main", "loop")
        }
        args = fake_engine.llm_args(options.tp_size, BLOCK_SIZE)
        module = importlib.import_module("kvxfer.connectors.trtllm")
        # Makes both at once, because one may wait for the other.
        worker = self._threads["constructed"].submit(module.KvxferConnectorWorker, args)
        self.scheduler = None
        if ranks.rank == 0:
            self.scheduler = self._threads["main"].submit(module.KvxferConnectorScheduler, args).result()
        self.worker = worker.result()
        self.manager = Manager(self.worker)
        own, self.worker.get_finished = self.worker.get_finished, self._get_finished
        self._own_get_finished = own

    def _get_finished(self, *args: Any) -> Any:
        self.calls.append("get_finished")
        return self._own_get_finished(*args)

    def call(self, name: str, *args: Any) -> Any:
        """Begins a call, in the recorded thread; returns its future result."""
        if name == "register":
            name = "register_kv_cache_layout" if self._is_by_group else "register_kv_caches"
            args = (self.cache.layout if self._is_by_group else self.cache.tensor,)
        thread = self._contract.thread_of(name)
        if thread == "loop" and name != "get_finished":
            self.calls.append(name)
        if name in ("update_state_after_alloc", "request_finished"):
            *rest, tables = args
            copies = [list(each) for each in tables]
            args = (*rest, copies if self._is_by_group else copies[0])
            name += "_by_layer_group" if self._is_by_group else ""
        half = self.manager if name == "get_finished" else self.worker
        half = half if hasattr(half, name) else self.scheduler
        return self._threads[thread].submit(getattr(half, name), *args)

    def require_order(self) -> None:
        calls = "".join(f"{each}," for each in self.calls)
        assert self._contract.iteration.fullmatch(calls), f"out of order: {calls}"
        self.calls.clear()

    def close(self) -> None:
        """The engine's interface has no call for the end."""
        for half in (self.scheduler, self.worker):
            if half is not None:
                half.shutdown()
        for each in self._threads.values():
            each.shutdown()

    def left(self) -> dict[str, Any]:
        """Returns what this rank's connector still holds of requests."""
        half = self.worker._half
        found = {
            "engine's transfers": not self.manager.is_idle,
            "kept": len(half._kept),
            "fetches": half._fetches._fetches,
            "pushes": len(half._pushes),
            "claims": len(half._heartbeats),
            "transfers": half._agent.stats()["transfers_open"],
            "worker": [getattr(self.worker, each) for each in _OF_WORKER if getattr(self.worker, each)],
            "agreement": self.worker._agreement._received | self.worker._agreement._sent,
        }
        if self.scheduler is not None:
            way = self.scheduler._way
            members = [(self.scheduler, each) for each in _OF_SCHEDULER] + [
                (way.half, each) for each in _OF_HALF
            ]
            found["scheduler"] = [(name, getattr(of, name)) for of, name in members if getattr(of, name)]
            found["keeping"] = len(way.half._keeping)
            found["register"] = 0 if way.register is None else len(way.register)
        return found


# ---- the engine -------------------------------------------------------------------------------


class Waits:
    """An engine that a test drives, here or in another process (`tests.trtllm.engines`)."""

    options: Options

    def turn(self) -> None:
        """Lets the engine go on."""
        raise NotImplementedError

    def ask(self, name: str, *args: Any) -> Any:
        """Calls a method of the engine."""
        raise NotImplementedError

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Lets it go on until a condition holds; returns its value."""
        deadline = time.monotonic() + BOUND_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {BOUND_S:g} s"
            self.turn()
        return found

    def submit(self, request_id: int, tokens: list[int], *args: Any, **kwargs: Any) -> None:
        """Sends a request (`Engine.submitted`)."""
        self.ask("submitted", request_id, tokens, args, kwargs)

    def answer(self, request_id: int) -> Answer:
        """Waits for the outcome of a request."""
        found: Answer = self.until(lambda: self.ask("outcome", request_id), f"an answer to {request_id}")
        return found

    def serve(self, request_id: int, tokens: list[int], *args: Any, **kwargs: Any) -> Answer:
        """Sends a request, and waits for its outcome."""
        self.submit(request_id, tokens, *args, **kwargs)
        return self.answer(request_id)

    def wait_empty(self) -> None:
        """Waits until no rank holds anything of a request any more."""
        left: list[str] = []

        def is_empty() -> bool:
            left[:] = self.ask("left")
            return not left

        try:
            self.until(is_empty, "empty")
        except AssertionError:
            raise AssertionError(f"still there: {left}") from None

    def counts(self, name: str) -> list[Any]:
        """Returns for each rank the sums of its counts since the last call."""
        return [None if each is None else each.get(name) for each in self.ask("statistics")]

    def has_failed_loads(self) -> bool:
        """Whether a load has failed since the last call of `counts` or this."""
        return any(self.counts("failures"))


class Engine(Waits):
    """All ranks of one engine, in this process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.before_load: Callable[[], None] | None = None  # once, between a promise and its load
        self._sequences = interface(options.release).sequences
        self._classes = fake_engine.classes_of(options.release)
        self._blocks = blocks_of(options)
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._saving: dict[int, Request] = {}
        self._outcomes: dict[int, Answer] = {}
        self._stream = object()
        barrier, slots = threading.Barrier(options.tp_size), [b""] * options.tp_size
        os.environ["KVXFER_TRTLLM"] = json.dumps(options.settings)
        try:
            self._ranks = [
                Rank(options, Ranks(rank, options.tp_size, barrier, slots)) for rank in range(options.tp_size)
            ]
        finally:
            del os.environ["KVXFER_TRTLLM"]
        assert set(self._all("register_forward_pass_callable")) == {None}
        self._all("register")
        if options.release == "newer":
            self._lead("wait_for_initialization")

    def _all(self, name: str, *args: Any) -> list[Any]:
        """Makes a call on every rank at once; raises the errors of all."""
        calls = [rank.call(name, *args) for rank in self._ranks]
        if errors := [error for each in calls if isinstance(error := each.exception(BOUND_S), Exception)]:
            raise ExceptionGroup(name, errors)
        return [each.result() for each in calls]

    def _lead(self, name: str, *args: Any) -> Any:
        """Makes a call of the scheduler, which is on rank 0."""
        return self._ranks[0].call(name, *args).result(BOUND_S)

    # ---- what tests ask -----------------------------------------------------------------------

    def turn(self) -> None:
        self.iterate()

    def ask(self, name: str, *args: Any) -> Any:
        return getattr(self, name)(*args)

    def submitted(self, request_id: int, tokens: list[int], args: Any, kwargs: Any) -> None:
        self._submit(request_id, tokens, *args, **kwargs)

    def _submit(
        self,
        request_id: int,
        tokens: list[int],
        max_new_tokens: int = 1,
        num_local: int = 0,
        salt: str | None = None,
        does: str = "served",
    ) -> None:
        """Takes a request, with the name of its recorded sequence."""
        own = [LlmRequest(request_id, tokens, max_new_tokens, salt) for _ in self._ranks]
        self._waiting[request_id] = Request(own, self._sequences[does], num_local)

    def outcome(self, request_id: int) -> Answer | None:
        return self._outcomes.get(request_id)

    def statistics(self) -> list[Any]:
        counts = [rank.worker.take_statistics() for rank in self._ranks]
        return [None if each is None else each.data for each in counts]

    def flip(self) -> None:
        """Changes a byte of the first layer, of every block."""
        self._ranks[0].cache.groups[0][0][0][:, 0, 0, 0] ^= 1

    def left(self) -> list[str]:
        """Returns descriptions of what the ranks still hold of requests."""
        own = {
            "requests": [*self._waiting, *self._running, *self._saving],
            "blocks": any(len(each.free) != each.num_blocks for each in self._blocks),
        }
        found = [("engine", own), *((f"rank {rank.ranks.rank}", rank.left()) for rank in self._ranks)]
        return [
            f"{of}: {name}: {value!r:.300}" for of, held in found for name, value in held.items() if value
        ]

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    # ---- an iteration -------------------------------------------------------------------------

    def iterate(self) -> None:
        """Makes one iteration's calls."""
        for each in list(self._running.values()):
            if each.words[0] in ("preempt", "reset"):
                self._preempt(each)
        begun = self._begin()
        batch = self._batch()
        if batch or begun:
            meta = pickle.dumps(self._lead("build_connector_meta", self._output(batch, begun)))
            for rank in self._ranks:
                # The metadata go to ranks as copies, not as the scheduler's objects.
                rank.call("bind_connector_meta", pickle.loads(meta)).result(BOUND_S)  # noqa: S301 - own
            if self.before_load is not None and any(each.state == LOADING for each in begun):
                before, self.before_load = self.before_load, None
                before()
            self._all("start_load_kv", self._stream)
        if batch:
            self._forward(batch)
        for each in list(self._running.values()):
            if each.words[0] == "end":
                self._end(each, "done" if each.is_whole else "cancelled")
        saved = self._all("get_finished")
        assert all(each == saved[0] for each in saved)
        for request_id in saved[0]:
            self._give_back(self._saving.pop(request_id))
        for rank in self._ranks:
            rank.require_order()

    def _begin(self) -> list[Request]:
        """Gives blocks to waiting requests, and asks which of their tokens another engine has."""
        begun: list[Request] = []
        for request_id, each in list(self._waiting.items()):
            whole = each.own[0].prompt_len + each.own[0].max_new_tokens
            if any(len(blocks.free) * BLOCK_SIZE < whole for blocks in self._blocks):
                break
            each.tables = [blocks.take(whole) for blocks in self._blocks]
            each.told_tables = [0 for _ in each.tables]
            each.words.popleft()
            self._running[request_id] = self._waiting.pop(request_id)
            for layer in range(NUM_LAYERS):
                self._compute(each, layer, 0, each.num_local)
            count, is_async = self._lead("get_num_new_matched_tokens", each.own[0], each.num_local)
            assert count > 0 or not is_async, "(0, True) is an error of the engine's"
            assert each.num_local + count < each.own[0].prompt_len, "there must be a token to compute"
            each.num_matched = count
            each.set(context_current_position=each.num_local + count)
            if is_async:
                each.set(state=LOADING)
                for rank, own in zip(self._ranks, each.own, strict=True):
                    rank.manager.new_async_requests.loading[request_id] = own
            self._leave_windows(each)
            begun.append(each)
        for each in begun:
            self._lead("update_state_after_alloc", each.own[0], each.tables)
        return begun

    def _batch(self) -> list[Request]:
        """Returns the requests that this iteration computes, each with its number of tokens."""
        batch = []
        for each in self._running.values():
            if each.words[0] == "load" and each.state != LOADING:
                each.words.popleft()
            if each.words[0] in ("chunk", "compute", "fail") and each.state != LOADING:
                left = each.own[0].context_remaining_length
                each.chunk = min(left, self.options.chunk_tokens) if each.state == CONTEXT else 1
                batch.append(each)
        return batch

    def _output(self, batch: list[Request], begun: list[Request]) -> Any:
        output = self._classes["SchedulerOutput"]()
        for each in batch:
            new = [table[told:] for table, told in zip(each.tables, each.told_tables, strict=True)]
            is_new = not any(each.told_tables)
            position = each.position if each.state == CONTEXT else len(each.tokens) - 1
            data = self._classes["RequestData"](
                request_id=each.id,
                new_tokens=each.tokens[each.num_told_tokens :],
                new_block_ids=new[0] if len(new) == 1 else [],
                computed_position=position - (each.num_matched if each in begun else 0),
                num_scheduled_tokens=each.chunk,
            )
            if self.options.kind == "layout":
                data.new_block_ids_by_layer_group = new
            each.told_tables = [len(table) for table in each.tables]
            each.num_told_tokens = len(each.tokens)
            (output.new_requests if is_new else output.cached_requests).append(data)
        return output

    def _forward(self, batch: list[Request]) -> None:
        for layer in range(NUM_LAYERS):
            self._all("wait_for_layer_load", layer, self._stream)
            if layer == 1 and any(each.words[0] == "fail" for each in batch):
                for each in list(self._running.values()):
                    self._end(each, "failed")
                return
            for each in batch:
                first = each.position if each.state == CONTEXT else len(each.tokens) - 1
                self._compute(each, layer, first, first + each.chunk)
            self._all("save_kv_layer", layer, self._stream)
        self._all("wait_for_save", self._stream)
        for each in batch:
            if each.words[0] == "chunk":
                each.words.popleft()
            if each.state == CONTEXT:
                each.set(context_current_position=each.position + each.chunk)
                if each.own[0].context_remaining_length:
                    self._leave_windows(each)
                    continue
                each.set(state=GENERATION)
            token = sampled(each.hashes)
            for own in each.own:
                own.add_new_token(token, 0)
            if each.is_whole:
                while each.words[0] != "end":
                    each.words.popleft()

    def _compute(self, each: Request, layer: int, first: int, stop: int) -> None:
        windows = [blocks.window for blocks in self._blocks]
        for rank in self._ranks:
            rank.cache.compute(each.tables, windows, layer, each.hashes[:stop], first)

    def _leave_windows(self, each: Request) -> None:
        for blocks, table in zip(self._blocks, each.tables, strict=True):
            for at in range(min(blocks.first_kept(each.position), len(table))):
                blocks.give_back([table[at]])
                table[at] = -1

    def _end(self, each: Request, what: str) -> None:
        del self._running[each.id]
        each.set(state=COMPLETE)
        new = each.tokens[each.own[0].prompt_len :]
        self._outcomes[each.id] = Answer(what, new, each.num_matched)
        if not self._lead("request_finished", each.own[0], each.tables):
            self._give_back(each)
            return
        each.set(state=SAVING)
        self._saving[each.id] = each
        for rank, own in zip(self._ranks, each.own, strict=True):
            rank.manager.new_async_requests.saving[each.id] = own

    def _preempt(self, each: Request) -> None:
        """Takes a request's blocks between two chunks of its prompt."""
        if each.words.popleft() == "reset":
            self._lead("request_reset", each.own[0])
        else:
            assert not self._lead("request_finished", each.own[0], each.tables)
        self._give_back(each)
        each.set(context_current_position=0)
        each.num_told_tokens = 0
        self._waiting[each.id] = self._running.pop(each.id)

    def _give_back(self, each: Request) -> None:
        for blocks, table in zip(self._blocks, each.tables, strict=True):
            blocks.give_back(table)
        for rank in self._ranks:
            rank.cache.clear(each.tables)
        each.tables = []
