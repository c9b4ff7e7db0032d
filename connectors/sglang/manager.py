"""The agent of one SGLang worker, and the state that its senders and receivers share.

Prefill and decode meet as in SGLang's other backends: decode finds prefill's ranks at the bootstrap server,
and names its pages for a request over their control sockets. In addition:

1. Decode asks each rank that sends anything, once, to open a session with decode's agent.
2. Decode names its pages to its own agent (`Arrival`), under a tag that it draws, and then to prefill.
3. Each prefill rank writes chunks by its own agent as they are computed (`Delivery`).
4. Decode's agent reports when everything has arrived; prefill sends no message for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import numpy as np
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll, StateType
from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortNotification, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, process_model_config

import kvxfer
from kvxfer.connectors.common.bounded_table import remember
from kvxfer.connectors.common.ending import deregister
from kvxfer.connectors.common.handover import HandoverError, require_allowed
from kvxfer.connectors.common.helper_threads import HelperThreads
from kvxfer.connectors.common.prefill_ranks import PrefillRanks, is_open
from kvxfer.connectors.common.regions import remote_region
from kvxfer.connectors.common.statistics import Recorder
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.sglang.aux_rows import AUX, AuxRows
from kvxfer.connectors.sglang.backend_settings import settings_of_environment
from kvxfer.connectors.sglang.cache_parts import KV, CachePart, RankSlice, parts_of
from kvxfer.connectors.sglang.control_messages import (
    GUARD,
    Answer,
    Destination,
    Ids,
    Registration,
    ids_of,
    read,
)
from kvxfer.connectors.sglang.delivery import Delivery, Target
from kvxfer.connectors.sglang.prefill_sources import Sources
from kvxfer.connectors.sglang.waiting_rooms import WaitingRooms
from kvxfer.threads import signals_blocked, start_thread

_log = logging.getLogger("kvxfer")

# How often the control thread checks for ended requests, and how often it logs the counters.
_TICK_MS: Final = 200
_REPORT_EVERY_S: Final = 60.0
# How long to wait for a peer to let go, after which its session is lost as silent, or is ended here.
_SETTLE_S: Final = 1.0
_NUM_HELPERS: Final = 4
_MAX_FAILED: Final = 4096


class KvxferKVManager(CommonKVManager):
    """The manager of one worker at prefill or decode.

    Raises
    ------
    ValueError
        A setting is invalid, or this backend does not support a part of SGLang's configuration.
    kvxfer.KvxferError
        The agent could not be made, or the caches could not be registered.
    """

    kv_status_msg_tag = b"KVXFER_STATUS"
    kv_status_msg_carries_reason = True
    supports_deferred_decode_kv_release = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.settings = settings_of_environment()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        _require_supported(self)
        self.is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        self.patience_s = self.settings.silent_timeout_s + _SETTLE_S
        self.statistics = Recorder()
        gpu = _gpu()
        self.agent = self._make_agent(gpu)
        self.parts = parts_of(args, self._rank_slice(gpu))
        self.aux = AuxRows(args, self.settings.model)
        self.regions: dict[str, kvxfer.Region] = {}
        self.register_buffer_to_engine()
        self.sources = Sources(self.agent)
        self._deliveries: dict[int, Delivery] = {}
        self._senders: set[int] = set()
        self._orphans = WaitingRooms()  # rooms without a sender, which SGLang may not clear
        self._failed: dict[int, str] = {}  # rooms that failed before both sides were there; bounded
        self.rooms_lock = threading.RLock()
        self._decodes = PrefillRanks(self.agent, self.settings.connect_timeout_s)
        self._sessions: dict[str, Future[kvxfer.Peer]] = {}  # with decode ranks, by their agents' names
        self._helpers = HelperThreads(_NUM_HELPERS, thread_name_prefix="kvxfer-sglang")
        self._reported_at = time.monotonic()
        self._is_closing = threading.Event()
        self._control = start_thread(self._serve_control, "kvxfer-control")
        if not self.is_prefill:
            with signals_blocked():
                self._start_heartbeat_checker_thread()

    # ---- memory -------------------------------------------------------------------------------

    def register_buffer_to_engine(self) -> None:
        """Registers the caches with the agent, also again after `deregister_buffer_to_engine`."""
        if self.regions:
            return
        if self.settings.huge_pages and self.agent.options.gpu_in_use is None:
            kvxfer.use_huge_pages([part.memory for part in self.parts])
        for part in self.parts:
            self.regions[part.name] = self.agent.register(part.name, part.memory, part.layout)
        self.regions[AUX] = self.agent.register(AUX, self.aux.rows, self.aux.layout)

    def deregister_buffer_to_engine(self) -> None:
        """Deregisters the caches: when this returns, no peer touches a byte of them any more."""
        regions, self.regions = self.regions, {}
        deregister(regions.values())

    def parts_of_component(self, component: int) -> list[CachePart]:
        """Returns the parts that use a component's block ids."""
        return [part for part in self.parts if part.component == component]

    def agent_name_of(self, rank_ip: str, rank_port: int) -> str:
        """Returns the name of a prefill rank's agent, from the rank's entry at the bootstrap server."""
        return f"sglang-prefill/{rank_ip}:{rank_port}"

    # ---- decode: sessions -----------------------------------------------------------------------

    def registration(self) -> list[bytes]:
        """Returns the message that asks a prefill rank for a session."""
        return Registration(self.agent.entry, self.local_ip, self.rank_port).encode()

    def report(self) -> None:
        """Logs the counters once an interval. Receivers call it, from the thread that counts."""
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_EVERY_S and (counts := self.statistics.take()) is not None:
            said = ", ".join(f"{name} {value}" for name, value in counts.reduce().items())
            _log.info("kvxfer: in the last %.0f s: %s", now - self._reported_at, said)
            self._reported_at = now

    # ---- prefill: rooms -------------------------------------------------------------------------

    def opened(self, room: int) -> str:
        """Notes that a sender for a room exists. Returns why the room has failed already, or ""."""
        with self.rooms_lock:
            self._senders.add(room)
            self._orphans.end(room)
            return self._failed.pop(room, "")

    def delivery(self, room: int) -> Delivery | None:
        """Returns the delivery of a room; None before its first chunk, and after its end."""
        return self._deliveries.get(room)

    def closed(self, room: int, failure: str = "") -> None:
        """Ends the delivery of a room; when it returns, no page of the room is read any more.

        Parameters
        ----------
        failure
            Why the room failed, for decode ranks that name their pages later.
        """
        with self.rooms_lock:
            delivery = self._deliveries.pop(room, None)
            self._senders.discard(room)
            if failure:
                remember(self._failed, room, failure, _MAX_FAILED)
                self._orphans.begin(room)
        if delivery is not None and not delivery.is_quiet:
            delivery.fail("its request ended before it was sent")
            delivery.quiesce(self.patience_s)

    def cleared(self, room: int, was_sent: bool) -> None:
        """Notes that SGLang's code has dropped a room's state, except for the reason of its failure."""
        with self.rooms_lock:
            self._orphans.end(room)
        if was_sent:
            with self.failure_lock:
                self.failure_records.pop(room, None)

    def _forget(self, room: int) -> None:
        """Drops SGLang's state of a room that SGLang's code does not clear by itself."""
        self.transfer_infos.pop(room, None)
        self.req_to_decode_prefix_len.pop(room, None)
        self.request_status.pop(room, None)
        with self.failure_lock:
            self.failure_records.pop(room, None)

    def look_after(self, room: int) -> None:
        """Reports the state of a room's writes to SGLang's code."""
        delivery = self._deliveries.get(room)
        if delivery is None or self.request_status.get(room) in (KVPoll.Success, KVPoll.Failed):
            return
        if delivery.is_between_chunks:
            self._look_at_peers(room, delivery)
        if delivery.is_done:
            self.update_status(room, KVPoll.Success)
        elif delivery.failure:
            self.conclude_failure(bootstrap_room=room, failure_reason=delivery.failure)

    def _look_at_peers(self, room: int, delivery: Delivery) -> None:
        """Fails a room that has lost a peer; between chunks no pending write would report it."""
        for target in list(self.transfer_infos.get(room, {}).values()):
            if target.peer is not None and (error := target.peer.error) is not None:
                delivery.fail(str(error))

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: Any,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """Posts a chunk, the last one with states and metadata. Returns at once; never raises.

        The parameters are SGLang's: `index_slice` is the chunk's range in the prompt's pages. The pages may
        be read after `wait_event`.
        """
        with self.rooms_lock:
            if bootstrap_room not in self.transfer_infos or bootstrap_room not in self._senders:
                return  # this rank sends nothing, or the request has ended
            targets = list(self.transfer_infos[bootstrap_room].values())
            delivery = self._deliveries.setdefault(bootstrap_room, Delivery(bootstrap_room))
        try:
            pages = ids_of(kv_indices)
            if is_last_chunk and aux_index is not None:
                self.aux.pack(aux_index)
            for target in targets:
                if target.is_dummy:
                    continue
                self._write(delivery, target, KV, pages, target.destination.pages[index_slice], wait_event)
                if is_last_chunk:
                    self._write_states(delivery, target, state_indices or [], wait_event)
                    self._write_aux(delivery, target, aux_index)
            if is_last_chunk:
                delivery.close()
            self.update_status(bootstrap_room, KVPoll.Transferring)
        except Exception as error:
            if not isinstance(error, kvxfer.KvxferError | ValueError):
                # Input from another engine must not end this engine.
                _log.exception("kvxfer: room %s: a chunk could not be posted", bootstrap_room)
            delivery.fail(str(error) or type(error).__name__)
            self.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=delivery.failure)

    def _write_states(self, delivery: Delivery, target: Target, given: Sequence[Any], after: Any) -> None:
        named = target.destination.states
        for component in range(len(self.kv_args.state_types)):
            src = given[component] if component < len(given) else None
            dst = named[component] if component < len(named) else None
            ids = self.state_ids(component, src), self.state_ids(component, dst)
            self._write(delivery, target, component, *ids, after)

    def state_ids(self, component: int, indices: Any) -> Ids:
        """Converts SGLang's indices for a kind of state to block ids."""
        ids = ids_of(indices)
        # For a ring, SGLang gives its row and then the live positions. The positions follow from the prompt's
        # length, so only the row is needed, and it moves whole.
        return ids[:1] if self.kv_args.state_types[component] == StateType.DSA_TAIL else ids

    def _write_aux(self, delivery: Delivery, target: Target, aux_index: int | None) -> None:
        if AUX in target.destination.brings and aux_index is not None:
            slots = np.array([aux_index], np.uint32), np.array([target.destination.aux_slot], np.uint32)
            self._post(delivery, target, AUX, *slots, None)

    def _write(
        self, delivery: Delivery, target: Target, component: int, src: Ids, dst: Ids, after: Any
    ) -> None:
        parts = [
            each for each in self.parts_of_component(component) if each.name in target.destination.brings
        ]
        if not parts:
            return
        if len(src) != len(dst):
            what = "pages" if component == KV else f"blocks of {self.kv_args.state_types[component].value}"
            raise ValueError(
                f"prefill sends {len(src)} {what} of a request, but decode named {len(dst)}: both engines "
                "must run the same release of SGLang with the same model and --page-size"
            )
        for part in parts if len(src) else ():
            self._post(delivery, target, part.name, src, dst, after)

    def _post(self, delivery: Delivery, target: Target, name: str, src: Ids, dst: Ids, after: Any) -> None:
        assert target.peer is not None, "a rank that brings anything has a session"
        region = self.regions[name]
        write = partial(
            self.agent.write,
            region,
            target.regions[name],
            src,
            dst,
            after=after,
            notify=target.destination.tag_of(name),
            context=f"room {delivery.room}",
        )
        num_pages = 0 if name == AUX else len(src)
        delivery.post(target.peer, write, num_pages, len(src) * region.layout.block_nbytes)

    # ---- the control socket ---------------------------------------------------------------------

    def _serve_control(self) -> None:
        """Reads messages from the other engine's ranks, until `close`; a bad message affects only itself."""
        poller = zmq.Poller()
        poller.register(self.server_socket, zmq.POLLIN)
        while not self._is_closing.is_set():
            try:
                if poller.poll(_TICK_MS):
                    self._take(self.server_socket.recv_multipart())
                self._tick()
            except kvxfer.UsageError as error:
                _log.warning("kvxfer: a control message cannot be read: %s", error)
            except Exception:
                if self._is_closing.is_set():
                    return
                _log.exception("kvxfer: a control message could not be processed")

    def _take(self, frames: list[bytes]) -> None:
        if frames[0] == ABORT_TAG and self.is_prefill:
            self._take_abort(AbortNotification.from_zmq(frames))
        elif frames[0] == GUARD:
            message = read(frames)
            match message:
                case Registration() if self.is_prefill:
                    self._take_registration(message)
                case Destination() if self.is_prefill:
                    self._take_destination(message)
                case Answer() if not self.is_prefill:
                    self.sources.refused(message.agent, message.reason)
                case _:
                    _log.warning("kvxfer: a %s message arrived at the wrong engine", type(message).__name__)
        elif not self.is_prefill and not self.handle_abort_ack_message(frames):
            told = self.parse_kv_status_message(frames)
            if told is not None:
                room, status, rank, reason = told
                with self.rooms_lock:
                    self.apply_prefill_status(
                        bootstrap_room=room, status=status, prefill_rank=rank, failure_reason=reason
                    )

    def _tick(self) -> None:
        if not self.agent.closed:
            self.agent.take_message()  # this also processes news about peers
        if self.is_prefill:
            self._forget_orphans()

    # ---- prefill: decode's messages ---------------------------------------------------------------

    def _take_registration(self, message: Registration) -> None:
        name = message.agent.name
        try:
            require_allowed((message.agent,), self.settings)
        except (HandoverError, kvxfer.UsageError) as error:
            self._answer(message, str(error))
            return
        session = self._decodes.session(message.agent, name)
        remember(self._sessions, name, session)
        session.add_done_callback(partial(self._answer_session, message))

    def _answer_session(self, message: Registration, session: Future[kvxfer.Peer]) -> None:
        if session.cancelled() or self._is_closing.is_set():
            return
        if (error := session.exception()) is not None:
            _log.warning("kvxfer: no session with %s: %s", message.agent.name, error)
            self._answer(message, str(error))

    def _answer(self, message: Registration, reason: str) -> None:
        self._tell(message.endpoint, message.dst_port, Answer(self.agent.name, reason).encode())

    def _take_destination(self, message: Destination) -> None:
        if message.is_dummy:
            self._admit(Target(message))
            return
        session = self._sessions.get(message.agent)
        if session is None or (session.done() and not is_open(session)):
            self._refuse(message, f"{self.agent.name} has no session with {message.agent}")
        else:
            # Decode may see the session open a moment before prefill, which dialled it.
            session.add_done_callback(lambda session: self._admit_over(message, session))

    def _admit_over(self, message: Destination, session: Future[kvxfer.Peer]) -> None:
        try:
            peer = session.result()
            self._admit(Target(message, peer, {name: remote_region(peer, name) for name in message.brings}))
        except Exception as error:
            self._refuse(message, str(error) or type(error).__name__)

    def _admit(self, target: Target) -> None:
        message = target.destination
        refused: list[tuple[Destination, str]] = []
        with self.rooms_lock:
            if (failure := self._failed.get(message.room) or self._misfit(message)) is not None:
                refused.append((message, failure))
            else:
                refused += self._take_in(target)
        for each, why in refused:
            self._tell_failure(each, why)

    def _misfit(self, message: Destination) -> str | None:
        """Returns why the pages of a decode rank cannot belong to the room for which others named pages."""
        infos = self.transfer_infos.get(message.room, {})
        count = next((info.required_dst_info_num for info in infos.values()), message.required_dst_info_num)
        if message.required_dst_info_num != count or len(infos.keys() | {message.agent}) > count:
            return f"{count} decode ranks were to name pages of room {message.room}, and others have"
        return None

    def _take_in(self, target: Target) -> list[tuple[Destination, str]]:
        """Stores a decode rank's pages; returns what is dropped for them, and why."""
        message = target.destination
        dropped: list[tuple[Destination, str]] = []
        infos = self.transfer_infos.setdefault(message.room, {})
        infos[message.agent] = target
        if message.room not in self._senders:
            # Without a session, nobody has proven the name.
            holder = "" if target.peer is None else target.peer.name
            for room in self._orphans.hold(message.room, holder, message.nbytes):
                why = "too many requests of its engine wait for prefill's half"
                dropped += [(each.destination, why) for each in self.transfer_infos.get(room, {}).values()]
                self._forget(room)
                remember(self._failed, room, why, _MAX_FAILED)
        if len(infos) == message.required_dst_info_num and message.room in self.transfer_infos:
            self.resolve_kv_replica_factor(infos)
            self.req_to_decode_prefix_len[message.room] = message.decode_prefix_len
            self.update_status(message.room, KVPoll.WaitingForInput)
        return dropped

    def _refuse(self, message: Destination, reason: str) -> None:
        """Fails a room whose pages at decode cannot be written."""
        self._fail_room(message.room, reason)
        self._tell_failure(message, reason)

    def _fail_room(self, room: int, reason: str) -> Delivery | None:
        """Fails a room, now or when its request comes; returns its delivery, if any."""
        with self.rooms_lock:
            if room not in self._senders:
                # If the room failed here before, keep its state: SGLang's scheduler has yet to ask why.
                if room not in self._failed:
                    self._orphans.end(room)
                    self._forget(room)
                    remember(self._failed, room, reason, _MAX_FAILED)
            elif self.request_status.get(room) not in (None, KVPoll.Success):
                with self.failure_lock:
                    self.failure_records.setdefault(room, reason)
                self.update_status(room, KVPoll.Failed)
            delivery = self._deliveries.get(room)
        if delivery is not None:
            delivery.fail(reason)
        return delivery

    def _tell_failure(self, message: Destination, reason: str) -> None:
        self.send_kv_status_message(
            targets=[(message.endpoint, message.dst_port)],
            bootstrap_room=message.room,
            status=KVPoll.Failed,
            failure_reason=reason,
        )

    def _take_abort(self, notification: AbortNotification | None) -> None:
        if notification is None:
            return
        delivery = self._fail_room(notification.room, "Aborted by decode.")
        target = notification.deferred_ack_target()
        if self.enable_deferred_decode_kv_release and target is not None:
            self.register_deferred_ack_target(notification.room, target)
            self._helpers.submit(self._acknowledge, notification.room, delivery)

    def _acknowledge(self, room: int, delivery: Delivery | None) -> None:
        """Waits until nothing is written any more (at once, if there is no delivery), and tells decode."""
        if delivery is not None:
            delivery.quiesce(self.patience_s)
        self._maybe_ack_drained_abort(room)

    def _forget_orphans(self) -> None:
        """Drops rooms whose request never came: the router asked only decode, or died in between."""
        with self.rooms_lock:
            for room in self._orphans.older_than(self.bootstrap_timeout):
                self._orphans.end(room)
                self._forget(room)

    def _tell(self, endpoint: str, port: int, frames: list[bytes]) -> None:
        from sglang.srt.utils.network import NetworkAddress

        address = NetworkAddress(endpoint, port)
        try:
            self._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)
        except Exception as error:
            _log.debug("kvxfer: no message was sent to %s:%s: %s", endpoint, port, error)

    # ---- making and ending -------------------------------------------------------------------------

    def _make_agent(self, gpu: int | None) -> kvxfer.Agent:
        position = WorkerRank(
            "sglang",
            self.attn_tp_rank,
            self.attn_tp_size,
            self.pp_rank,
            self.pp_size,
            gpu,
            self.system_dp_rank,
        )
        role = "prefill" if self.is_prefill else "decode"
        try:
            return kvxfer.Agent(
                f"sglang-{role}/{self.local_ip}:{self.rank_port}", self.settings.agent_options(position)
            )
        except kvxfer.KvxferError as error:
            error.add_note(
                f"The agent listens at host of KVXFER_SGLANG, or KVXFER_HOST: {self.settings.host}"
            )
            raise

    def _rank_slice(self, gpu: int | None) -> RankSlice:
        is_latent = bool(self.is_mla_backend or self.is_hybrid_mla_backend)
        return RankSlice(
            tp_rank=self.attn_tp_rank,
            tp_size=self.attn_tp_size,
            state_tp_rank=self.kv_args.engine_rank % self.state_tp_size,
            state_tp_size=self.state_tp_size,
            is_latent=is_latent,
            total_heads=1 if is_latent else process_model_config().get_total_num_kv_heads(),
            is_staged=self.is_prefill and self.pp_size > 1,
            total_layers=process_model_config().num_hidden_layers if self.pp_size > 1 else 0,
            gpu=gpu,
            model=self.settings.model,
        )

    def close(self) -> None:
        """Closes the agent and ends all transfers: when it returns, no byte lands in the engine's caches."""
        self._is_closing.set()
        if not self.is_prefill:
            self._heartbeat_shutdown.set()
        self._control.join(timeout=10)
        self._decodes.close()
        self._helpers.shutdown(wait=False)
        self.agent.close()
        self._zmq_ctx.destroy(linger=0)


def _gpu() -> int | None:
    """Returns the index of the GPU that holds the caches; None for host memory."""
    device = get_device()
    if device.device == "cpu":
        return None
    if device.device != "cuda":
        raise ValueError(f"kvxfer moves caches in host memory and on CUDA devices, not on {device.device}")
    return int(device.gpu_id)


def _require_supported(manager: CommonKVManager) -> None:
    """Refuses unsupported configurations with a message, at start-up."""
    staged_decode = manager.disaggregation_mode == DisaggregationMode.DECODE and manager.pp_size > 1
    refused: tuple[tuple[bool, str], ...] = (
        (manager.defer_decode_allocation, "--disaggregation-decode-allocation-policy prefill_complete"),
        (manager.dcp_size > 1, "decode context parallelism (--dcp-size)"),
        (manager.kv_shard_size > 1, "--enable-kv-cache-sharding"),
        (staged_decode, "pipeline parallelism at decode (--pp-size)"),
        (bool(getattr(manager.server_args, "enable_hisparse", False)), "--enable-hisparse"),
        (
            envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() == "INTRA_NODE_NVLINK",
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK, which puts metadata on a GPU",
        ),
    )
    for is_asked, what in refused:
        if is_asked:
            raise ValueError(
                f"--disaggregation-transfer-backend kvxfer does not support {what}: leave it out"
            )
