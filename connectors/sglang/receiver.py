"""Decode's handle of one request."""

from __future__ import annotations

import time
from typing import Any, Final

import zmq
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

import kvxfer
from kvxfer.connectors.common.statistics import PUSH
from kvxfer.connectors.sglang.arrival import Arrival, Expected
from kvxfer.connectors.sglang.aux_rows import AUX
from kvxfer.connectors.sglang.cache_parts import KV
from kvxfer.connectors.sglang.control_messages import Destination, Ids, ids_of
from kvxfer.connectors.sglang.manager import KvxferKVManager
from kvxfer.connectors.sglang.prefill_sources import Source

_ENDED: Final = (KVPoll.Success, KVPoll.Failed)
# Ask again after this time: a message to a rank that restarts is lost.
_ASK_AGAIN_S: Final = 1.0


class KvxferKVReceiver(CommonKVReceiver):
    """Receives one request's cache; SGLang's scheduler calls it, from one thread.

    `poll` reports a failure only when no byte of the request can land any more.
    """

    kv_mgr: KvxferKVManager

    def __init__(self, mgr: KvxferKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self._arrival: Arrival | None = None
        self._sources: list[Source] | None = None
        self._real: list[dict[str, Any]] = []  # prefill ranks that may send something
        self._first_asked_at = self._asked_at = self._began_at = 0.0
        self._aux_slot = 0
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    # ---- sessions -------------------------------------------------------------------------------

    def init(self, prefill_dp_rank: int) -> None:
        super().init(prefill_dp_rank)
        if self.conclude_state is None and self._has_lost_one():
            # The rank's engine may have restarted at another address.
            self.invalidate_cached_bootstrap_infos()
            self._setup_bootstrap_infos()
        if self.conclude_state is not None:
            return
        self._real = [info for info in self.bootstrap_infos if not info["is_dummy"]]
        self._began_at = self._first_asked_at = time.monotonic()
        self._connect_sources()

    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> dict[str, Any] | None:
        info = super()._get_bootstrap_info_from_server(
            prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank
        )
        return None if info is None else {**info, "cp_rank": int(prefill_cp_rank)}

    def _register_kv_args(self) -> bool:
        return True  # each request that finds no session asks for one

    def _name_of(self, info: dict[str, Any]) -> str:
        return self.kv_mgr.agent_name_of(info["rank_ip"], info["rank_port"])

    def _has_lost_one(self) -> bool:
        infos = getattr(self, "bootstrap_infos", None) or []
        return any(self.kv_mgr.sources.was_lost(self._name_of(info)) for info in infos)

    def _connect_sources(self) -> bool:
        """Returns whether a session with each rank is open; asks for the missing ones otherwise."""
        if self._sources is not None:
            if self._arrival is not None or all(_is_open(source.peer) for source in self._sources):
                return True
            # A session was lost before any page was named, e.g. because prefill refused this engine's caches.
            self._sources = None
            self._began_at = time.monotonic()
        found = [self.kv_mgr.sources.find(self._name_of(info)) for info in self._real]
        if all(peer is not None for peer in found):
            self._sources = [
                Source(peer, info["cp_rank"])
                for peer, info in zip(found, self._real, strict=True)
                if peer is not None
            ]
            return True
        now = time.monotonic()
        lacking = [info for peer, info in zip(found, self._real, strict=True) if peer is None]
        for info in lacking:
            reason = self.kv_mgr.sources.refusal_since(self._name_of(info), self._first_asked_at)
            late_s = now - self._began_at - self.kv_mgr.settings.connect_timeout_s
            if not reason and late_s > 0:
                reason = f"not open within {self.kv_mgr.settings.connect_timeout_s:g} s (connect_timeout_s)"
            if reason:
                self._fail(f"no session with {self._name_of(info)}: {reason}")
                self.invalidate_cached_bootstrap_infos()
                return False
        if now - self._asked_at >= _ASK_AGAIN_S:
            self._asked_at = now
            for info in lacking:
                self._send(info, self.kv_mgr.registration())
        return False

    # ---- pages ----------------------------------------------------------------------------------

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Names the pages to this rank's agent, and then to prefill. Never raises."""
        if self.conclude_state is not None:
            return
        try:
            self._name_pages(kv_indices, aux_index, state_indices or [], decode_prefix_len or 0, destination)
        except (kvxfer.KvxferError, ValueError) as error:
            self._fail(str(error))

    def _name_pages(
        self,
        kv_indices: Any,
        aux_index: int | None,
        state_indices: list[Any],
        decode_prefix_len: int,
        destination: KVTransferDestination,
    ) -> None:
        manager = self.kv_mgr
        if self._sources is None or aux_index is None:
            raise ValueError("SGLang named pages without a slot, or before a session with prefill was open")
        if destination != KVTransferDestination.DEVICE:
            raise ValueError(
                "kvxfer writes pages to the memory in which decode computes, not to its host pool"
            )
        divided = frozenset(part.name for part in manager.parts_of_component(KV))
        brings = manager.sources.brings(self._sources, manager.regions, divided)
        pages = ids_of(kv_indices)
        # SGLang's indices of rings hold more than the row; prefill converts them by `state_ids`, too.
        states = tuple(ids_of(each) for each in state_indices)
        arrival = self._arrival = Arrival(
            manager.agent,
            manager.waiting_timeout,
            f"room {self.bootstrap_room}",
            [source.peer for source in self._sources],
        )
        blocks: dict[str, Ids] = {AUX: ids_of([aux_index])}
        for part in manager.parts:
            at = part.component
            if at == KV:
                blocks[part.name] = pages
            elif at < len(states):
                blocks[part.name] = manager.state_ids(at, states[at])
        arrival.expect(
            Expected(
                manager.regions[name],
                ids,
                tuple(
                    source.peer for source, names in zip(self._sources, brings, strict=True) if name in names
                ),
            )
            for name, ids in blocks.items()
            if len(ids)
        )
        self._aux_slot = aux_index
        told = iter(brings)
        for info in self.bootstrap_infos:
            message = Destination(
                room=self.bootstrap_room,
                endpoint=manager.local_ip,
                dst_port=manager.rank_port,
                agent=manager.agent.name,
                tag=arrival.tag,
                aux_slot=aux_index,
                required_dst_info_num=self.required_dst_info_num,
                decode_prefix_len=decode_prefix_len,
                is_dummy=bool(info["is_dummy"]),
                brings=() if info["is_dummy"] else next(told),
                pages=pages[:0] if info["is_dummy"] else pages,
                states=() if info["is_dummy"] else states,
            )
            if not self._send(info, message.encode()):
                self.invalidate_cached_bootstrap_infos()
                return
        self.init_time = time.time()

    def _send(self, info: dict[str, Any], frames: list[bytes]) -> bool:
        try:
            sock, lock = self._connect_to_bootstrap_server(info)
            with lock:
                sock.send_multipart(frames)
        except zmq.ZMQError as error:
            self._fail(
                f"prefill's {info.get('rank_ip')}:{info.get('rank_port')} does not accept messages: {error}"
            )
            return False
        return True

    # ---- progress and the end -------------------------------------------------------------------

    def _poll(self) -> int:
        if self.conclude_state == KVPoll.Success:
            return int(KVPoll.Success)
        arrival = self._arrival
        if arrival is not None and self.conclude_state is None:
            if arrival.is_done and self.kv_mgr.request_status.get(self.bootstrap_room) != KVPoll.Failed:
                return self._succeed(arrival)
            if (error := arrival.error) is not None:
                self._fail(str(error), error.code)
        status = int(super()._poll())
        if status == KVPoll.Failed:
            return self._end()
        if status == KVPoll.WaitingForInput and not self._connect_sources():
            return self._end() if self.conclude_state == KVPoll.Failed else int(KVPoll.Bootstrapping)
        return status

    def _succeed(self, arrival: Arrival) -> int:
        self.kv_mgr.aux.unpack(self._aux_slot)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        self.conclude_state = KVPoll.Success
        self.kv_mgr.statistics.loaded(
            f"of room {self.bootstrap_room}",
            PUSH,
            began_ns=arrival.began_ns,
            noticed_ns=time.monotonic_ns(),
            stages=arrival.stages,
            rails=arrival.rails,
            nbytes=arrival.nbytes,
            num_pages=arrival.num_pages,
            num_ranks=arrival.num_sources,
        )
        self.kv_mgr.report()
        return int(KVPoll.Success)

    def _fail(self, reason: str, code: str = "refused") -> None:
        """Fails the request, here and at all prefill ranks; the first reason stays."""
        if self.conclude_state in _ENDED:
            return
        with self.kv_mgr.failure_lock:
            self.kv_mgr.failure_records.setdefault(self.bootstrap_room, reason)
        self.kv_mgr.statistics.failed(PUSH, code)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
        if self._arrival is not None:
            self._arrival.cancel()
        self.ensure_abort_notified()

    def _end(self) -> int:
        """Returns Failed once no byte lands any more."""
        if self._arrival is not None:
            self._arrival.cancel()
            if not self._arrival.is_quiet:
                return int(KVPoll.Transferring)
        return int(KVPoll.Failed)

    def abort(self) -> None:
        """Gives the request up and tells prefill; `poll` reports when its pages may be reused."""
        super().abort()
        if self._arrival is not None:
            self._arrival.cancel()

    def clear(self) -> None:
        """Ends the request; when it returns, no byte of it can land any more."""
        if self._arrival is not None:
            self._arrival.quiesce(self.kv_mgr.patience_s)
        with self.kv_mgr.rooms_lock:  # a concurrent message from prefill would leave state forever
            super().clear()
        if self.conclude_state == KVPoll.Success:
            # Prefill may have reported a failure although everything arrived here: drop SGLang's record.
            with self.kv_mgr.failure_lock:
                self.kv_mgr.failure_records.pop(self.bootstrap_room, None)


def _is_open(peer: kvxfer.Peer) -> bool:
    return peer.state is kvxfer.PeerState.OPEN
