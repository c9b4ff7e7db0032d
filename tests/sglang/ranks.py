"""Ranks of SGLang engines without a model: real managers, senders and receivers on real buffers.

All ranks of a test are in one process, with an agent each; prefill's bootstrap server is SGLang's own. The
contents of a cache are drawn once for the whole model, and each rank holds its slice. So what arrives is
compared with what that rank would have computed itself.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import requests
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, KVTransferError
from sglang.srt.disaggregation.pp_consensus_store import PPConsensusStore
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_context, get_parallel

from kvxfer.connectors.sglang.manager import KvxferKVManager
from kvxfer.connectors.sglang.receiver import KvxferKVReceiver
from kvxfer.connectors.sglang.sender import KvxferKVSender
from tests.waiting import until

Array = NDArray[np.uint8]

PAGE_TOKENS: Final = 4
NUM_PAGES: Final = 96
NUM_SLOTS: Final = 24
NUM_LAYERS: Final = 3
TOTAL_HEADS: Final = 4
HEAD_NBYTES: Final = 24
LATENT_NBYTES: Final = 40
#: Sizes of metadata buffers: some equal, one longer.
AUX_NBYTES: Final = (64, 64, 512, 128)
_PATIENCE_S: Final = 60.0
ENDED: Final = (KVPoll.Success, KVPoll.Failed)

# Channels of the convolution: queries, keys and values have separate ones.
CONV_CHANNELS: Final = (8, 8, 16)
CONV_NBYTES: Final = 6
STATE_HEADS: Final = 4
STATE_NBYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Model:
    """The parts of a model's cache.

    Attributes
    ----------
    is_latent
        MLA.
    states
        Kinds of states, in the order in which both engines have them.
    total_heads
        KV heads.
    """

    is_latent: bool = False
    states: tuple[StateType, ...] = ()
    total_heads: int = TOTAL_HEADS

    def heads_of(self, tp_size: int, tp_rank: int) -> slice:
        """Returns the KV heads of a rank."""
        if tp_size >= self.total_heads:
            first = tp_rank * self.total_heads // tp_size
            return slice(first, first + 1)
        num = self.total_heads // tp_size
        return slice(tp_rank * num, (tp_rank + 1) * num)


LLAMA: Final = Model()


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of pipeline parallelism, and its layers of the model."""

    rank: int
    layers: range

    @classmethod
    def all_of(cls, num: int) -> list[Self]:
        """Divides the layers among `num` stages; the first ones have more."""
        starts = [-(-NUM_LAYERS * rank // num) for rank in range(num + 1)]
        return [cls(rank, range(*starts[rank : rank + 2])) for rank in range(num)]


class PipelineGroup:
    """The channel between SGLang's stages, all in this process: the first stage sends first."""

    def __init__(self) -> None:
        self._said: Any = None

    def broadcast_object(self, value: Any, src: int) -> Any:
        assert src == 0
        self._said = value or self._said
        return self._said


class Buffers:
    """The memory of one rank, as SGLang lays it out: token rows, states and metadata."""

    def __init__(self, model: Model, tp_size: int, tp_rank: int, stage: Stage | None = None) -> None:
        self.model, self.tp_size, self.tp_rank = model, tp_size, tp_rank
        self.stage = stage or Stage(0, range(NUM_LAYERS))
        self.kv = self._tokens()
        self.states = [self._state(kind) for kind in model.states]
        self.aux = [np.zeros((NUM_SLOTS, nbytes), np.uint8) for nbytes in AUX_NBYTES]

    def _tokens(self) -> list[Array]:
        """Returns keys of all layers, then values: ``[pages, tokens of a page, heads, bytes]`` each."""
        heads = self.model.heads_of(self.tp_size, self.tp_rank)
        num_heads, count = heads.stop - heads.start, len(self.stage.layers)
        if self.model.is_latent:
            shape = NUM_PAGES, PAGE_TOKENS, 1, LATENT_NBYTES
        else:
            shape, count = (NUM_PAGES, PAGE_TOKENS, num_heads, HEAD_NBYTES), 2 * count
        return [np.zeros(shape, np.uint8) for _ in range(count)]

    def _state(self, kind: StateType) -> list[Array]:
        if kind == StateType.SWA:
            return self._tokens()
        if kind == StateType.MAMBA:
            conv = NUM_SLOTS, sum(CONV_CHANNELS) // self.tp_size, CONV_NBYTES
            heads = NUM_SLOTS, STATE_HEADS // self.tp_size, STATE_NBYTES
            return [np.zeros(conv, np.uint8) for _ in range(2)] + [
                np.zeros(heads, np.uint8) for _ in range(2)
            ]
        return [np.zeros((NUM_PAGES, 16), np.uint8) for _ in range(NUM_LAYERS)]

    def args(self) -> KVArgs:
        """Returns SGLang's description of them for a manager."""
        args = KVArgs()
        args.engine_rank = self.tp_rank
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = _infos(self.kv)
        args.kv_layer_ids = []
        args.kv_cache_dtype_str = "float32"
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = _infos(self.aux)
        args.state_types = list(self.model.states)
        infos = [_infos(state) for state in self.states]
        args.state_data_ptrs = [ptrs for ptrs, _, _ in infos]
        args.state_data_lens = [lens for _, lens, _ in infos]
        args.state_item_lens = [items for _, _, items in infos]
        args.state_layer_ids = [[] for _ in infos]
        is_mamba = [kind == StateType.MAMBA for kind in self.model.states]
        args.state_dim_per_tensor = [
            [each.shape[1] for each in state] if mamba else []
            for state, mamba in zip(self.states, is_mamba, strict=True)
        ]
        args.state_slice_outer_counts = [[1] * 4 if mamba else [] for mamba in is_mamba]
        conv = list(CONV_CHANNELS)
        args.state_conv_shard_groups = [[conv, conv, None, None] if mamba else [] for mamba in is_mamba]
        args.is_hybrid_mla_backend = False
        args.swa_kv_cache_layout = "nhd"
        args.mla_compression_ratios = None
        args.page_size = PAGE_TOKENS
        args.system_dp_rank = 0
        args.rust_http_port = None
        args.pp_rank = self.stage.rank
        args.prefill_start_layer, args.prefill_end_layer = self.stage.layers.start, self.stage.layers.stop
        args.ib_device, args.gpu_id = "", 0
        return args


def _infos(buffers: Sequence[Array]) -> tuple[list[int], list[int], list[int]]:
    return (
        [each.ctypes.data for each in buffers],
        [each.nbytes for each in buffers],
        [each[0].nbytes for each in buffers],
    )


class Cache:
    """What a request has computed for the whole model: drawn once, and sliced for each rank."""

    def __init__(self, model: Model, num_pages: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.model, self.num_pages = model, num_pages
        self.kv = self._tokens(draw)
        self.states = [self._state(kind, draw) for kind in model.states]
        self.aux = [draw.integers(1, 255, nbytes, np.uint8) for nbytes in AUX_NBYTES]

    def _tokens(self, draw: np.random.Generator) -> Array:
        if self.model.is_latent:
            shape: tuple[int, ...] = NUM_LAYERS, self.num_pages, PAGE_TOKENS, 1, LATENT_NBYTES
        else:
            shape = 2 * NUM_LAYERS, self.num_pages, PAGE_TOKENS, self.model.total_heads, HEAD_NBYTES
        return draw.integers(1, 255, shape, np.uint8)

    def _state(self, kind: StateType, draw: np.random.Generator) -> list[Any]:
        if kind == StateType.SWA:
            return list(self._tokens(draw))
        if kind == StateType.MAMBA:
            conv = [[draw.integers(1, 255, (n, CONV_NBYTES), np.uint8) for n in CONV_CHANNELS] for _ in "ab"]
            return [*conv, *(draw.integers(1, 255, (STATE_HEADS, STATE_NBYTES), np.uint8) for _ in "ab")]
        return [draw.integers(1, 255, (self.num_pages, 16), np.uint8) for _ in range(NUM_LAYERS)]

    def of_rank(self, buffers: Buffers) -> list[list[Array]]:
        """Returns a rank's slice: token rows by buffer, then each kind of states by buffer."""
        heads = slice(0, 1) if self.model.is_latent else self.model.heads_of(buffers.tp_size, buffers.tp_rank)
        layers = buffers.stage.layers
        rows = layers if self.model.is_latent else [*layers, *(NUM_LAYERS + layer for layer in layers)]
        found = [[self.kv[row][:, :, heads] for row in rows]]
        for kind, state in zip(self.model.states, self.states, strict=True):
            if kind == StateType.SWA:
                found.append([each[:, :, heads] for each in state])
            elif kind == StateType.MAMBA:
                conv = [np.concatenate([_share(part, buffers) for part in each])[None] for each in state[:2]]
                found.append([*conv, *(_share(each, buffers)[None] for each in state[2:])])
            else:
                found.append(state)
        return found


def _share(rows: Array, buffers: Buffers) -> Array:
    num = len(rows) // buffers.tp_size
    return rows[buffers.tp_rank * num : (buffers.tp_rank + 1) * num]


@dataclass(slots=True)
class Place:
    """Where a request's cache is at one engine: the same ids at all of its ranks."""

    pages: NDArray[np.int32]
    aux_slot: int
    states: list[Any]


class Engine:
    """The ranks of one engine.

    Parameters
    ----------
    address
        Of prefill's bootstrap server, which prefill's engine starts and decode's asks.
    num_stages, cp_size
        Sizes of pipeline and of context parallelism; each rank of the latter holds all pages here, as if it
        had computed them.
    """

    def __init__(
        self, role: str, model: Model, tp_size: int, address: str, num_stages: int = 1, cp_size: int = 1
    ) -> None:
        self.role, self.model, self.address = role, model, address
        self.buffers: list[Buffers] = []
        self.managers: list[KvxferKVManager] = []
        mode = DisaggregationMode(role)
        sizes = {**dict.fromkeys(("tp_size", "moe_tp_size"), tp_size * cp_size), "attn_tp_size": tp_size}
        groups = [PipelineGroup() for _ in range(tp_size * cp_size)]
        for stage, rank, cp_rank in product(Stage.all_of(num_stages), range(tp_size), range(cp_size)):
            buffers = Buffers(model, tp_size, rank, stage)
            stages = {"pp_size": num_stages, "pp_group": groups[rank * cp_size + cp_rank]}
            context = {"attn_cp_size": cp_size, "attn_cp_rank": cp_rank}
            ranks = {"tp_rank": cp_rank * tp_size + rank, "attn_tp_rank": rank}
            with get_parallel().override(**sizes, **ranks, **stages, **context):
                args = get_context().server_args
                self.managers.append(KvxferKVManager(buffers.args(), mode, args, model.is_latent))
            self.buffers.append(buffers)
        self._free_pages = list(range(1, NUM_PAGES))
        self._free_slots = list(range(NUM_SLOTS))

        if role == "decode":
            for manager in self.managers:
                until(partial(manager.try_ensure_parallel_info, address), "prefill's ranks")

    def close(self) -> None:
        for manager in self.managers:
            manager.close()
            if isinstance(manager.request_status, PPConsensusStore):
                manager.request_status.close()

    def left(self) -> dict[str, int]:
        """Returns what agents and managers still hold of requests; empty without a leak."""
        tables = (
            *("request_status", "failure_records", "_deliveries", "_senders", "_orphans", "transfer_infos"),
            *("req_to_decode_prefix_len", "prefill_response_tracker", "required_prefill_response_num_table"),
        )
        found: dict[str, int] = {}
        for rank, manager in enumerate(self.managers):
            held = {}
            for name in tables:
                table = getattr(manager, name, ())
                held[name] = len(getattr(table, "_local_map", table))  # stages share theirs
            held["transfers"] = manager.agent.stats()["transfers_open"]
            found |= {f"{self.role} {rank} {name}": number for name, number in held.items() if number}
        return found

    # ---- memory -------------------------------------------------------------------------------

    def allocate(self, num_pages: int, random_: random.Random) -> Place:
        """Takes pages and a slot, in any order."""
        random_.shuffle(self._free_pages)
        random_.shuffle(self._free_slots)
        pages = [self._free_pages.pop() for _ in range(num_pages)]
        slot = self._free_slots.pop()
        states: list[Any] = []
        for kind in self.model.states:
            if kind == StateType.MAMBA:
                states.append(np.array([slot], np.int32))
            elif kind == StateType.SWA:
                states.append(np.array(pages[-2:], np.int32))
            else:
                states.append(np.array(pages, np.int32))
        return Place(np.array(pages, np.int32), slot, states)

    def free(self, place: Place) -> None:
        """Gives pages back, and fills them with bytes that were never sent."""
        for buffers in self.buffers:
            for each in buffers.kv:
                each[place.pages] = 0
        self._free_pages += place.pages.tolist()
        self._free_slots.append(place.aux_slot)

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    def fill(self, place: Place, cache: Cache, pages: slice = slice(None)) -> None:
        """Computes some pages of a request, and its states and metadata."""
        for buffers in self.buffers:
            tokens, *states = cache.of_rank(buffers)
            for buffer, rows in zip(buffers.kv, tokens, strict=True):
                buffer[place.pages[pages]] = rows[pages]
            for state, ids, rows_of in zip(buffers.states, place.states, states, strict=True):
                for buffer, rows in zip(state, rows_of, strict=True):
                    buffer[ids] = rows[len(rows) - len(ids) :]
            for column, item in zip(buffers.aux, cache.aux, strict=True):
                column[place.aux_slot] = item

    def differences(self, place: Place, cache: Cache, first_page: int = 0) -> list[str]:
        """Returns which of a request's pages, states and metadata differ from the expected ones."""
        found = []
        for rank, buffers in enumerate(self.buffers):
            tokens, *states = cache.of_rank(buffers)
            for index, (buffer, rows) in enumerate(zip(buffers.kv, tokens, strict=True)):
                if not np.array_equal(buffer[place.pages[first_page:]], rows[first_page:]):
                    found.append(f"rank {rank}: buffer {index}")
            for kind, state, ids, rows_of in zip(
                self.model.states, buffers.states, place.states, states, strict=True
            ):
                for index, (buffer, rows) in enumerate(zip(state, rows_of, strict=True)):
                    if not np.array_equal(buffer[ids], rows[len(rows) - len(ids) :]):
                        found.append(f"rank {rank}: {kind.value} buffer {index}")
            for index, (column, item) in enumerate(zip(buffers.aux, cache.aux, strict=True)):
                if not np.array_equal(column[place.aux_slot], item):
                    found.append(f"rank {rank}: metadata {index}")
        return found


class Half:
    """One request at one engine. Each method is a step of SGLang's scheduler there."""

    def __init__(
        self, engine: Engine, room: int, cache: Cache, random_: random.Random, prefix_pages: int = 0
    ) -> None:
        self.engine, self.room, self.cache, self.prefix_pages = engine, room, cache, prefix_pages
        self.place = engine.allocate(cache.num_pages, random_)
        self.handles: list[Any] = []

    def start(self) -> None:
        """Makes a handle for each rank."""
        raise NotImplementedError

    def poll(self) -> int:
        """Returns the state on which the scheduler's ranks agree: the least of all."""
        return min(handle.poll() for handle in self.handles)

    @property
    def has_ended(self) -> bool:
        return self.poll() in ENDED

    def abort(self) -> None:
        for handle in self.handles:
            handle.abort()

    def release(self) -> list[str]:
        """Ends it as the scheduler does, and gives its pages back.

        Returns why it failed, from each rank that knows; a failure of one rank fails all.
        """
        reasons = []
        has_failed = self.poll() == KVPoll.Failed
        for handle in self.handles:
            if has_failed:
                try:
                    handle.failure_exception()
                except KVTransferError as error:
                    if not error.is_from_another_rank:
                        reasons.append(error.failure_reason)
            else:
                handle.clear()
        self.engine.free(self.place)
        return reasons


class Sending(Half):
    """A request at prefill."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_sent = self.prefix_pages
        self.is_init = False

    def start(self) -> None:
        for manager in self.engine.managers:
            self.handles.append(KvxferKVSender(manager, self.engine.address, self.room))

    def begin(self) -> bool:
        """Announces the number of pages once decode has named its own; returns whether it has."""
        if not self.is_init and self.poll() == KVPoll.WaitingForInput:
            self.is_init = True
            for sender in self.handles:
                assert sender.pop_decode_prefix_len() == self.prefix_pages * PAGE_TOKENS
                sender.init(self.cache.num_pages - self.prefix_pages, self.place.aux_slot)
        return self.is_init

    def send_chunk(self, num_pages: int) -> bool:
        """Computes and sends the next pages; returns whether they were the last."""
        first, self.num_sent = self.num_sent, min(self.num_sent + num_pages, self.cache.num_pages)
        self.engine.fill(self.place, self.cache, slice(first, self.num_sent))
        for sender in self.handles:
            states = (self.place.states or None) if self.is_whole else None
            sender.send(self.place.pages[first : self.num_sent], states)
        return self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether all of it was sent."""
        return self.num_sent == self.cache.num_pages

    def overwrite(self) -> None:
        """Computes something else in its pages."""
        for buffers in self.engine.buffers:
            for each in buffers.kv:
                each[self.place.pages] = 255


class Receiving(Half):
    """A request at decode."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.are_named = False

    def start(self) -> None:
        for manager in self.engine.managers:
            receiver = KvxferKVReceiver(manager, self.engine.address, self.room)
            receiver.init(0)
            self.handles.append(receiver)

    def name_pages(self) -> bool:
        """Names its pages once its receivers are ready; returns whether they were named."""
        if not self.are_named and self.poll() == KVPoll.WaitingForInput:
            self.are_named = True
            for receiver in self.handles:
                receiver.send_metadata(
                    self.place.pages[self.prefix_pages :],
                    self.place.aux_slot,
                    self.place.states or None,
                    self.prefix_pages * PAGE_TOKENS,
                )
        return self.are_named

    def differences(self) -> list[str]:
        """Returns which buffers do not hold what prefill should have sent."""
        return self.engine.differences(self.place, self.cache, self.prefix_pages)

    def pages(self) -> list[Array]:
        """Returns what its pages hold."""
        return [each[self.place.pages].copy() for buffers in self.engine.buffers for each in buffers.kv]


class Pair:
    """A prefill and a decode engine."""

    def __init__(
        self,
        model: Model,
        prefill_tp: int,
        decode_tp: int,
        address: str,
        num_stages: int = 1,
        cp_size: int = 1,
    ) -> None:
        self.model = model
        with ExitStack() as stack:
            self.prefill = Engine("prefill", model, prefill_tp, address, num_stages, cp_size)
            stack.callback(self.prefill.close)
            self.decode = Engine("decode", model, decode_tp, address)
            stack.callback(self.decode.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def request(
        self, random_: random.Random, num_pages: int, prefix_pages: int = 0
    ) -> tuple[Sending, Receiving]:
        """Returns both halves of a new request."""
        cache = Cache(self.model, num_pages, random_.randrange(1 << 32))
        room = random_.randrange(1, 1 << 62)
        return (
            Sending(self.prefill, room, cache, random_, prefix_pages),
            Receiving(self.decode, room, cache, random_, prefix_pages),
        )

    def left(self) -> dict[str, int]:
        """Returns what agents and managers still hold of requests; empty without a leak."""
        return {**self.prefill.left(), **self.decode.left()}


def hand_over(sending: Sending, receiving: Receiving, chunk_pages: int = 3) -> tuple[int, int]:
    """Runs a request from its beginning to its end; returns its outcomes at both engines."""
    receiving.start()
    sending.start()
    until(receiving.name_pages, "sessions")
    until(sending.begin, "decode's pages at prefill")
    while not sending.send_chunk(chunk_pages):
        pass
    return end_of(sending, receiving)


def end_of(sending: Sending, receiving: Receiving) -> tuple[int, int]:
    """Waits for the end at both engines, and returns both outcomes."""
    # Schedulers continue to poll until the other engine's is done, too.
    until(lambda: all([sending.has_ended, receiving.has_ended]), "the end at both engines")
    return sending.poll(), receiving.poll()


@contextmanager
def configured(folder: Path, total_heads: int = TOTAL_HEADS, address: str = "") -> Iterator[str]:
    """Publishes SGLang's configuration; yields the address of a bootstrap server, or the one named."""
    (folder / "config.json").write_text(json.dumps(_config(total_heads)))
    with ExitStack() as stack:
        port = int(address.rpartition(":")[2]) if address else _free_port()
        stack.enter_context(
            get_context().override_server_args(
                model_path=str(folder),
                host="127.0.0.1",
                device="cpu",
                disaggregation_bootstrap_port=port,
                load_balance_method="follow_bootstrap_room",
            )
        )
        ranks = {
            "attn_tp_rank": 0,
            "attn_cp_rank": 0,
            "attn_dp_rank": 0,
            "attn_dcp_rank": 0,
            "pp_group": None,
        }
        stack.enter_context(get_parallel().override(**ranks))
        if not address:
            server = CommonKVBootstrapServer("127.0.0.1", port)
            stack.callback(server.close)
            until(lambda: _answers(port), "the bootstrap server")
        yield f"127.0.0.1:{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _answers(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def _config(total_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": total_heads,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "torch_dtype": "float32",
    }
