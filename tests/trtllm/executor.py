"""Plays TensorRT-LLM's executor on one rank: a process with the connector in it, on real buffers.

Its loop calls the connector as the recorded contract says, and checks both: the calling threads, the order,
the allowed answers. A "forward" reads every byte of a request's cache that the engine takes for computed, and
compares it with the bytes that follow from the tokens. Then it writes the bytes of the tokens that it
computes.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.trtllm import fake_engine
from tests.trtllm.contract import Interface, interface
from tests.trtllm.fake_engine import (
    COMPLETE,
    CONTEXT,
    GENERATION,
    LOADING,
    SAVING,
    KvCacheBufferRef,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    KvCacheRegion,
    LlmRequest,
)

BLOCK_SIZE: Final = 4
NUM_LAYERS: Final = 3
NUM_HEADS: Final = 4
HEAD_NBYTES: Final = 2
LATENT_NBYTES: Final = 8
WINDOW: Final = 10

_MASK: Final = (1 << 64) - 1
_SPREAD: Final = np.array(
    [(0x9E3779B97F4A7C15 * (2 * at + 1)) & _MASK for at in range(LATENT_NBYTES)], np.uint64
)


@dataclass(frozen=True)
class Options:
    """One engine.

    Attributes
    ----------
    release
        `tests.trtllm.contract.RELEASES`.
    kind
        ``"tensor"``: one pool; ``"latent"``: the same of MLA; ``"layout"``: layer groups, one with a window.
    settings
        ``KVXFER_TRTLLM``.
    chunk_tokens
        The most tokens of a prompt that a step computes.
    """

    settings: dict[str, Any]
    release: str = "older"
    kind: str = "tensor"
    tp_size: int = 1
    num_blocks: int = 64
    chunk_tokens: int = 1 << 20


def prefix_hashes(tokens: list[int], salt: str | None) -> list[int]:
    """Returns for each token a hash of it and all tokens before it."""
    state = int.from_bytes((salt or "").encode()[:8].ljust(8)) | 1
    found = []
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x2545F4914F6CDD1D + 1) & _MASK
        found.append(state)
    return found


def content(hashes: list[int], layer: int, kv: int, head: int, nbytes: int) -> NDArray[np.uint8]:
    """Returns what a model would have computed for one head: [token, byte]."""
    own = np.uint64(((layer * 2 + kv) * 64 + head) * 0x9E37 + 1)
    mixed = (np.array(hashes, np.uint64) ^ own)[:, None] * _SPREAD[:nbytes]
    return (mixed >> np.uint64(56)).astype(np.uint8)


def sampled(hashes: list[int]) -> int:
    """Returns the token that follows."""
    return (hashes[-1] >> 20) % 50_000


# ---- memory -----------------------------------------------------------------------------------


class Group:
    """The blocks of some layers: for each layer its kv arrays, [block, token, head, byte]."""

    def __init__(
        self, views: dict[int, list[NDArray[np.uint8]]], num_blocks: int, window: int | None
    ) -> None:
        self.views = views
        self.window = window
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))  # the first request has block 0

    def allocate(self, num_tokens: int) -> list[int] | None:
        count = -(-num_tokens // BLOCK_SIZE)
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        again = [block for block in blocks if block >= 0]
        assert not set(again) & set(self.free), "a block was given back twice"
        self.free += again

    def first_kept(self, position: int) -> int:
        """Returns the first block of a table that the token at `position` or a later one sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // BLOCK_SIZE


class Cache:
    """A rank's memory, and how the engine describes it to its connector."""

    def __init__(self, options: Options, rank: int) -> None:
        is_latent = options.kind == "latent"
        held = 1 if is_latent else NUM_HEADS // options.tp_size
        self.heads = range(1) if is_latent else range(rank * held, (rank + 1) * held)
        self.head_nbytes = LATENT_NBYTES if is_latent else HEAD_NBYTES
        self.groups: list[Group] = []
        self.tensor: NDArray[np.uint8] | None = None
        self.layout: KvCacheLayout | None = None
        if options.kind == "layout":
            self._lay_out(options.num_blocks)
        else:
            kv_factor = 1 if is_latent else 2
            page = held, BLOCK_SIZE, self.head_nbytes
            shape = options.num_blocks, NUM_LAYERS, kv_factor, math.prod(page)
            self.tensor = np.full(shape, 0xEE, np.uint8)
            views = {
                layer: [
                    self.tensor[:, layer, kv].reshape(-1, *page).swapaxes(1, 2) for kv in range(kv_factor)
                ]
                for layer in range(NUM_LAYERS)
            }
            self.groups = [Group(views, options.num_blocks, None)]

    def _lay_out(self, num_blocks: int) -> None:
        """Layers 0 and 1 see all tokens, and layer 2 a window; each group's keys and values are separate."""
        groups = []
        nbytes = BLOCK_SIZE * len(self.heads) * self.head_nbytes
        for at, (layers, window) in enumerate((((0, 1), None), ((2,), WINDOW))):
            size = len(layers) * nbytes
            slots = num_blocks if window is None else num_blocks // 2
            views: dict[int, list[NDArray[np.uint8]]] = {layer: [] for layer in layers}
            regions = []
            for role in ("key", "value"):
                stride = size + 32  # another buffer lies between
                pool = np.full(slots * stride, 0xEE, np.uint8)
                base = pool.ctypes.data
                fake_engine.POOLS[base] = pool
                buffers = tuple(KvCacheBufferRef(layer, role) for layer in layers)
                regions.append(KvCacheRegion(base, size, stride, slots, buffers))
                pages = pool.reshape(slots, stride)
                for index, layer in enumerate(layers):
                    own = pages[:, index * nbytes : (index + 1) * nbytes]
                    views[layer].append(own.reshape(slots, BLOCK_SIZE, len(self.heads), self.head_nbytes))
            self.groups.append(Group(views, slots, window))
            groups.append(KvCacheLayerGroupLayout(at, layers, window, tuple(regions)))
        self.layout = KvCacheLayout(BLOCK_SIZE, tuple(groups))

    def computed(self, hashes: list[int], layer: int, kv: int) -> NDArray[np.uint8]:
        """Returns what this rank would have computed: [token, head, byte]."""
        return np.stack([content(hashes, layer, kv, head, self.head_nbytes) for head in self.heads], 1)

    def group_of(self, layer: int) -> tuple[int, Group]:
        return next((at, each) for at, each in enumerate(self.groups) if layer in each.views)


# ---- the engine's manager of connectors -------------------------------------------------------


@dataclass
class AsyncRequests:
    """Requests whose blocks move."""

    saving: dict[int, Any] = field(default_factory=dict)
    loading: dict[int, Any] = field(default_factory=dict)

    def take(self, other: AsyncRequests) -> None:
        self.saving |= other.saving
        self.loading |= other.loading
        other.saving, other.loading = {}, {}

    def extract(self, saving: list[int], loading: list[int]) -> AsyncRequests:
        return AsyncRequests(
            {each: self.saving.pop(each) for each in saving},
            {each: self.loading.pop(each) for each in loading},
        )


class Manager:
    """Stands between the loop and the connector: calls the scheduler, and makes the ranks agree."""

    def __init__(self, worker: Any, scheduler: Any, ranks: Any, by_group: bool) -> None:
        self.worker, self.scheduler = worker, scheduler
        self._ranks = ranks
        self._by_group = by_group
        self.new_async_requests = AsyncRequests()
        self.pending_async_requests = AsyncRequests()
        self.local_finished_async_requests = AsyncRequests()
        self.loaded: dict[int, Any] = {}

    def _on_leader(self, call: Callable[[], Any]) -> Any:
        return self._ranks.broadcast(call() if self.scheduler is not None else None)

    def query(self, request: LlmRequest, num_computed: int) -> int:
        count, is_async = self._on_leader(
            lambda: self.scheduler.get_num_new_matched_tokens(request, num_computed)
        )
        assert count > 0 or not is_async, "(0, True) is an error of the engine's"
        assert num_computed + count < request.prompt_len, "there must be a token to compute"
        if is_async:
            self.new_async_requests.loading[request.request_id] = request
        return int(count)

    def allocated(self, request: LlmRequest, tables: list[list[int]]) -> None:
        if self.scheduler is None:
            return
        if self._by_group:
            self.scheduler.update_state_after_alloc_by_layer_group(request, [list(each) for each in tables])
        else:
            self.scheduler.update_state_after_alloc(request, list(tables[0]))

    def step(self, output: Any) -> None:
        # The metadata go to other ranks as copies, not as the leader's objects.
        self.worker.bind_connector_meta(self._on_leader(lambda: self.scheduler.build_connector_meta(output)))

    def request_finished(self, request: LlmRequest, tables: list[list[int]]) -> bool:
        self.loaded.pop(request.request_id, None)
        if self._by_group:
            stays = self._on_leader(
                lambda: self.scheduler.request_finished_by_layer_group(
                    request, [list(each) for each in tables]
                )
            )
        else:
            stays = self._on_leader(lambda: self.scheduler.request_finished(request, list(tables[0])))
        if stays:
            self.new_async_requests.saving[request.request_id] = request
            request.state = SAVING
        return bool(stays)

    def get_finished(self) -> list[Any]:
        started = list(self.new_async_requests.loading)
        finished = list(self.new_async_requests.saving)
        self.pending_async_requests.take(self.new_async_requests)
        saved, loaded = self.worker.get_finished(finished, started)
        # An unknown request, or one that was given back before, raises a KeyError here.
        self.local_finished_async_requests.take(self.pending_async_requests.extract(saved, loaded))
        local = self.local_finished_async_requests
        said = self._ranks.allgather((set(local.saving), set(local.loading)))
        everywhere = local.extract(
            sorted(set.intersection(*(each[0] for each in said))),
            sorted(set.intersection(*(each[1] for each in said))),
        )
        for request_id, request in everywhere.loading.items():
            request.state = CONTEXT
            self.loaded[request_id] = request
        return list(everywhere.saving.values())

    @property
    def is_idle(self) -> bool:
        parts = self.new_async_requests, self.pending_async_requests, self.local_finished_async_requests
        return not any(each.saving or each.loading for each in parts)


# ---- the loop ---------------------------------------------------------------------------------


@dataclass
class Sequence:
    """A request in the engine."""

    request: LlmRequest
    num_local: int  # tokens at the beginning that its own prefix cache has
    tables: list[list[int]] = field(default_factory=list)
    told_tables: list[int] = field(default_factory=list)  # how many blocks the connector knows
    num_told_tokens: int = 0
    num_matched: int = 0
    chunk: int = 0

    @property
    def is_added(self) -> bool:
        return bool(self.tables)


class Executor:
    """One rank.

    Parameters
    ----------
    ranks
        How it talks to the others (`fake_engine.OneRank`).
    control
        At rank 0: the connection for commands and for the outcomes of requests.
    """

    def __init__(self, options: Options, ranks: Any, control: Connection) -> None:
        os.environ["KVXFER_TRTLLM"] = json.dumps(options.settings)
        self._options = options
        self._ranks = ranks
        self._control = control
        self._contract: Interface = interface(options.release)
        self._cache = Cache(options, ranks.rank)
        self._calls: list[str] = []
        self._preempts: dict[int, str] = {}
        self._loop_thread: threading.Thread | None = None
        self._main_thread = threading.current_thread()
        self._waiting: dict[int, Sequence] = {}
        self._active: dict[int, Sequence] = {}
        self._saving: dict[int, Sequence] = {}
        self._cancelled: set[int] = set()
        self._backlog: list[tuple[Any, ...]] = []
        self._fails_forward = False
        self._holds_load = False
        self._is_ended = self._leaves_open = False
        self._stream = object()
        self._classes = fake_engine.classes_of(options.release)
        fake_engine.install(options.release, ranks, Manager)
        args = fake_engine.llm_args(options.tp_size, BLOCK_SIZE)
        module = importlib.import_module("kvxfer.connectors.trtllm")
        # Makes both at once, because one may wait for the other.
        with ThreadPoolExecutor(2) as threads:
            worker = threads.submit(module.KvxferConnectorWorker, args)
            scheduler = threads.submit(module.KvxferConnectorScheduler, args) if ranks.rank == 0 else None
            self.worker = self._heard(worker.result(), "KvCacheConnectorWorker")
            self.scheduler = None
            if scheduler is not None:
                self.scheduler = self._heard(scheduler.result(), "KvCacheConnectorScheduler")
        assert self.worker.register_forward_pass_callable() is None
        self._manager = Manager(self.worker, self.scheduler, ranks, options.kind == "layout")
        if options.kind == "layout":
            self.worker.register_kv_cache_layout(self._cache.layout)
        else:
            self.worker.register_kv_caches(self._cache.tensor)
        if self.scheduler is not None and options.release == "newer":
            self.scheduler.wait_for_initialization()

    def _heard(self, half: Any, name: str) -> Any:
        """Records every call of the contract, and checks its thread."""
        for call in self._contract.classes[name] | self._contract.documented.get(name, {}):
            if call.startswith("_") or call in ("supports_attention_dp", "get_connector_meta"):
                continue
            if (own := getattr(half, call, None)) is not None:
                setattr(half, call, self._noted(call, own))
        return half

    def _noted(self, call: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            thread = self._contract.thread_of(call)
            expected = self._main_thread if thread == "main" else self._loop_thread
            assert threading.current_thread() is expected, f"{call} is called by the thread {thread}"
            if thread == "loop":
                self._calls.append(call.removesuffix("_by_layer_group"))
            return own(*args)

        return noted

    def run(self) -> None:
        """Runs the loop in its own thread until the command to end."""
        failures: list[str] = []

        def loop() -> None:
            try:
                while not self._is_ended:
                    self._iterate()
            except Exception:
                failures.append(traceback.format_exc())

        self._loop_thread = threading.Thread(target=loop, name="executor")
        self._loop_thread.start()
        self._loop_thread.join()
        # The engine's interface has no call for the end.
        for half in (self.scheduler, self.worker):
            if half is not None and not self._leaves_open:
                half.shutdown()
        self._control.send(("ended", self._ranks.rank, failures))

    def _commands(self) -> list[tuple[Any, ...]]:
        """Returns the new commands; waits for one if the loop has nothing to do."""
        given, self._backlog = self._backlog, []
        if self._ranks.rank == 0:
            while self._control.poll(None if not (given or self._waiting or self._active) else 0):
                given.append(self._control.recv())
        commands: list[tuple[Any, ...]] = self._ranks.broadcast(given)
        return commands

    def _iterate(self) -> None:
        asked: list[tuple[Any, ...]] = []
        for command in self._commands():
            match command:
                case ("submit", request_id, tokens, max_new_tokens, num_local, salt):
                    request = LlmRequest(request_id, tokens, max_new_tokens, salt)
                    self._waiting[request_id] = Sequence(request, num_local)
                case ("cancel", request_id):
                    self._cancelled.add(request_id)
                case ("preempt", request_id, how):
                    self._preempts[request_id] = how
                case ("fail",):
                    self._fails_forward = True
                case ("hold",):
                    self._holds_load = True
                case ("end", leaves_open):
                    self._is_ended = True
                    self._leaves_open = leaves_open
                case _:
                    asked.append(command)
        for request_id in self._preempts.keys() & self._active.keys():
            self._preempt(request_id)
        self._schedule()
        for request_id in self._cancelled & (self._active.keys() | self._waiting.keys()):
            self._end(request_id, ("cancelled", request_id))
        self._cancelled.clear()
        for request in self._manager.get_finished():
            self._give_back(self._saving.pop(request.request_id))
        # The calls of one iteration; a rank without a scheduler makes a part of them.
        calls = "".join(f"{each}," for each in self._calls)
        assert self._contract.iteration.fullmatch(calls), f"out of order: {calls}"
        self._calls.clear()
        for command in asked:
            self._answer(command)

    def _tell(self, *told: Any) -> None:
        if self._ranks.rank == 0:
            self._control.send(told)

    # ---- scheduling ---------------------------------------------------------------------------

    def _schedule(self) -> None:
        added = self._add()
        batch: list[Sequence] = []
        for each in self._active.values():
            request = each.request
            if request.state == CONTEXT:
                each.chunk = min(request.context_remaining_length, self._options.chunk_tokens)
                batch.append(each)
            elif request.state == GENERATION:
                each.chunk = 1
                batch.append(each)
        if not batch and not added:
            return
        loading = self._manager.new_async_requests.loading
        for each in added:
            if each.request.request_id in loading:
                each.request.state = LOADING
        batch = [each for each in batch if each.request.state in (CONTEXT, GENERATION)]
        self._manager.step(self._output(batch, {each.request.request_id for each in added}))
        if self._holds_load and loading:
            self._hold()
        self.worker.start_load_kv(self._stream)
        if batch:
            self._forward(batch)

    def _hold(self) -> None:
        """Waits, on all ranks, between the promise of a load and its beginning."""
        self._holds_load = False
        self._tell("held")
        cancelled: list[int] = []
        while self._ranks.rank == 0 and (command := self._control.recv()) != ("go",):
            if command[0] == "cancel":
                cancelled.append(command[1])
            else:
                self._backlog.append(command)
        # Before this iteration's end, so that the promised cache has not arrived yet.
        self._cancelled |= set(self._ranks.broadcast(cancelled))

    def _add(self) -> list[Sequence]:
        """Gives blocks to waiting requests, and asks which of their tokens another engine has."""
        added: list[Sequence] = []
        for request_id, each in list(self._waiting.items()):
            request = each.request
            whole = request.prompt_len + request.max_new_tokens
            tables = [group.allocate(whole) for group in self._cache.groups]
            if any(table is None for table in tables):
                for group, table in zip(self._cache.groups, tables, strict=True):
                    group.give_back(table or [])
                break
            each.tables = [table for table in tables if table is not None]
            each.told_tables = [0 for _ in tables]
            del self._waiting[request_id]
            self._active[request_id] = each
            self._compute(each, 0, each.num_local)
            each.num_matched = self._manager.query(request, each.num_local)
            request.context_current_position = each.num_local + each.num_matched
            self._leave_windows(each)
            added.append(each)
        for each in added:
            self._manager.allocated(each.request, each.tables)
        return added

    def _output(self, batch: list[Sequence], added: set[int]) -> Any:
        output = self._classes["SchedulerOutput"]()
        for each in batch:
            request = each.request
            new = [table[told:] for table, told in zip(each.tables, each.told_tables, strict=True)]
            tokens = request.get_tokens(0)
            is_new = not any(each.told_tables)
            position = request.context_current_position
            if request.state == GENERATION:
                position = len(tokens) - 1
            elif request.request_id in added:
                position -= each.num_matched
            data = self._classes["RequestData"](
                request.request_id,
                tokens[each.num_told_tokens :],
                new[0] if len(new) == 1 else [],
                position,
                each.chunk,
            )
            if self._options.kind == "layout":
                data.new_block_ids_by_layer_group = new
            each.told_tables = [len(table) for table in each.tables]
            each.num_told_tokens = len(tokens)
            (output.new_requests if is_new else output.cached_requests).append(data)
        return output

    def _leave_windows(self, each: Sequence) -> None:
        position = each.request.context_current_position
        for group, table in zip(self._cache.groups, each.tables, strict=True):
            for at in range(min(group.first_kept(position), len(table))):
                if table[at] >= 0:
                    group.give_back([table[at]])
                    table[at] = -1

    # ---- computing ----------------------------------------------------------------------------

    def _forward(self, batch: list[Sequence]) -> None:
        try:
            for layer in range(NUM_LAYERS):
                self.worker.wait_for_layer_load(layer, self._stream)
                if self._fails_forward and layer == 1:
                    self._fails_forward = False
                    raise RuntimeError("a forward that fails")
                for each in batch:
                    self._compute_layer(each, layer, *self._chunk_of(each))
                self.worker.save_kv_layer(layer, self._stream)
            self.worker.wait_for_save(self._stream)
        except RuntimeError:
            for request_id in list(self._active):
                self._end(request_id, ("failed", request_id))
            return
        for each in batch:
            request = each.request
            if request.state == CONTEXT:
                request.context_current_position += each.chunk
                if request.context_remaining_length:
                    self._leave_windows(each)
                    continue
                request.state = GENERATION
            request.add_new_token(sampled(self._hashes(each)), 0)
            if len(request.get_tokens(0)) - request.prompt_len >= request.max_new_tokens:
                new = request.get_tokens(0)[request.prompt_len :]
                self._end(request.request_id, ("done", request.request_id, new, each.num_matched))

    def _chunk_of(self, each: Sequence) -> tuple[int, int]:
        request = each.request
        if request.state == CONTEXT:
            first = request.context_current_position
            return first, first + each.chunk
        stop = len(request.get_tokens(0))
        return stop - 1, stop

    def _compute(self, each: Sequence, first: int, stop: int) -> None:
        for layer in range(NUM_LAYERS):
            self._compute_layer(each, layer, first, stop)

    def _compute_layer(self, each: Sequence, layer: int, first: int, stop: int) -> None:
        """Checks all that the tokens attend to, and writes their own part."""
        at, group = self._cache.group_of(layer)
        hashes = self._hashes(each)
        seen = 0 if group.window is None else max(first - group.window + 1, 0)
        for kv, array in enumerate(group.views[layer]):
            expected = self._cache.computed(hashes[:stop], layer, kv)
            for block, within, tokens in self._places(each.tables[at], seen, first):
                if not np.array_equal(array[block, within], expected[tokens]):
                    raise AssertionError(
                        f"request {each.request.request_id}: layer {layer}, kv {kv}, block {block}: tokens "
                        f"{tokens} of rank {self._ranks.rank} are not what was computed"
                    )
            for block, within, tokens in self._places(each.tables[at], first, stop):
                array[block, within] = expected[tokens]

    def _places(self, table: list[int], first: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        while first < stop:
            end = min((first // BLOCK_SIZE + 1) * BLOCK_SIZE, stop)
            block = table[first // BLOCK_SIZE]
            assert block >= 0, f"token {first} has no block"
            within = first % BLOCK_SIZE
            yield block, slice(within, within + end - first), slice(first, end)
            first = end

    def _hashes(self, each: Sequence) -> list[int]:
        return prefix_hashes(each.request.get_tokens(0), each.request.cache_salt)

    # ---- the end of a request -----------------------------------------------------------------

    def _end(self, request_id: int, told: tuple[Any, ...]) -> None:
        each = self._waiting.pop(request_id, None) or self._active.pop(request_id)
        each.request.state = COMPLETE
        if each.is_added:
            self._leave(each)
        self._tell(*told)

    def _leave(self, each: Sequence) -> None:
        if self._manager.request_finished(each.request, each.tables):
            self._saving[each.request.request_id] = each
        else:
            self._give_back(each)

    def _give_back(self, each: Sequence) -> None:
        for group, table in zip(self._cache.groups, each.tables, strict=True):
            group.give_back(table)
            for arrays in group.views.values():
                for array in arrays:
                    array[[block for block in table if block >= 0]] = 0xDD  # nobody's
        each.tables = []

    def _preempt(self, request_id: int) -> None:
        """Takes a request's blocks between two chunks of its prompt."""
        each = self._active[request_id]
        if each.request.state != CONTEXT:
            return
        del self._active[request_id]
        how = self._preempts.pop(request_id)
        if how == "reset":
            if self.scheduler is not None:
                self.scheduler.request_reset(each.request)
        else:
            assert not self._manager.request_finished(each.request, each.tables)
            each.request.state = CONTEXT
        self._give_back(each)
        each.request.context_current_position = 0
        each.num_told_tokens = 0
        self._waiting[request_id] = each
        self._tell("preempted", request_id)

    # ---- what is left -------------------------------------------------------------------------

    def _answer(self, command: tuple[Any, ...]) -> None:
        match command:
            case ("left",):
                said = self._ranks.allgather(self._left())
                self._tell("left", [each for rank in said for each in rank])
            case ("counts",):
                counts = self.worker.take_statistics()
                said = self._ranks.allgather(None if counts is None else counts.data)
                self._tell("counts", said)
            case ("flip",):
                # A byte of the first layer, of every block.
                for arrays in self._cache.groups[0].views.values():
                    arrays[0][:, 0, 0, 0] ^= 1
                    break
            case _:
                raise AssertionError(f"no such command: {command}")

    def _left(self) -> list[str]:
        """Returns descriptions of what this rank still holds of requests."""
        half = self.worker._half
        found = {
            "engine": {**self._waiting, **self._active, **self._saving},
            "engine's transfers": not self._manager.is_idle,
            "blocks": any(len(group.free) != group.num_blocks for group in self._cache.groups),
            "kept": len(half._kept),
            "fetches": half._fetches._fetches,
            "pushes": len(half._pushes),
            "claims": len(half._claims),
            "transfers": half._agent.stats()["transfers_open"],
            "worker": [getattr(self.worker, each) for each in _OF_WORKER if getattr(self.worker, each)],
            "agreement": self.worker._agreement._received | self.worker._agreement._sent,
        }
        if self.scheduler is not None:
            own = self.scheduler._way.half
            found |= {
                "scheduler": [
                    (each, getattr(self.scheduler, each))
                    for each in _OF_SCHEDULER
                    if getattr(self.scheduler, each)
                ],
                "deciding": [(each, getattr(own, each)) for each in _OF_HALF if getattr(own, each)],
                "keeping": len(own._keeping),
                "register": 0 if self.scheduler._way.register is None else len(self.scheduler._way.register),
            }
        return [f"rank {self._ranks.rank}: {name}: {value!r:.300}" for name, value in found.items() if value]


_OF_WORKER: Final = "_steps", "_orders", "_started", "_received", "_through", "_aborted", "_parked"
_OF_SCHEDULER: Final = "_requests", "_promised", "_loading", "_blocks", "_reset", "_granting"
_OF_HALF: Final = "_prefills", "_sources", "_said", "_fetching", "_kept", "_claimed"


class Ranks:
    """The messages between the ranks of an engine: all to rank 0, and back."""

    def __init__(self, rank: int, size: int, lines: list[Connection]) -> None:
        self.rank, self.size = rank, size
        self._lines = lines  # rank 0 has one to each other rank, in their order

    def allgather(self, own: Any) -> list[Any]:
        if self.rank:
            self._lines[0].send(own)
            gathered: list[Any] = self._lines[0].recv()
            return gathered
        said = [own, *(line.recv() for line in self._lines)]
        for line in self._lines:
            line.send(said)
        return said

    def broadcast(self, own: Any) -> Any:
        if self.rank:
            return self._lines[0].recv()
        for line in self._lines:
            line.send(own)
        return own


def main(options: Options, rank: int, lines: list[Connection], control: Connection) -> None:
    """Runs one rank in its own process."""
    try:
        executor = Executor(options, Ranks(rank, options.tp_size, lines), control)
    except Exception as error:
        control.send(("unstarted", rank, f"{type(error).__name__}: {error}"))
        return
    control.send(("started", rank))
    executor.run()
