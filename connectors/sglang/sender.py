"""Prefill's handle of one request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import CommonKVSender

from kvxfer.connectors.sglang.delivery import Delivery
from kvxfer.connectors.sglang.manager import KvxferKVManager

_log = logging.getLogger("kvxfer")

_ABORTED: Final = "Aborted at prefill."
_ENDED: Final = (KVPoll.Success, KVPoll.Failed)


class KvxferKVSender(CommonKVSender):
    """Sends one request's cache; SGLang's scheduler calls it, from one thread.

    `poll` reports a failure only when no page of the request is read any more.
    """

    kv_mgr: KvxferKVManager

    def __init__(
        self,
        mgr: KvxferKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self._last_delivery: Delivery | None = None
        failure = mgr.opened(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if failure:
            mgr.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=failure)

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        """Posts the next chunk. Returns at once; never raises."""
        super().send(kv_indices, state_indices, num_kv_tokens, indices_event)
        self._last_delivery = self.kv_mgr.delivery(self.bootstrap_room) or self._last_delivery

    def _poll_with_status(self, check_status: Callable[[int], int]) -> int:
        self.kv_mgr.look_after(self.bootstrap_room)
        delivery = self._last_delivery
        is_read = delivery is not None and not delivery.is_quiet
        if is_read and self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Failed:
            return int(KVPoll.Transferring)
        was_concluded = self.conclude_state in _ENDED
        status = int(super()._poll_with_status(check_status))
        if status == KVPoll.Success and not was_concluded and delivery is not None:
            self._tell(delivery)
        return status

    def get_transfer_metric(self) -> KVTransferMetric:
        """Returns the posted bytes, and the time from the first posting to the last end."""
        metric = self._transfer_metric
        if (delivery := self._last_delivery) is not None:
            metric.transfer_total_bytes = delivery.nbytes
            if delivery.ended_ns:
                metric.transfer_latency_s = (delivery.ended_ns - delivery.began_ns) / 1e9
        return metric

    def abort(self) -> None:
        """Gives the request up and tells decode; when it returns, no page of it is read any more."""
        if self.kv_mgr.request_status.get(self.bootstrap_room) not in _ENDED:
            self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason=_ABORTED)
        super().abort()
        self.kv_mgr.closed(self.bootstrap_room, _ABORTED)

    def clear(self) -> None:
        """Ends the request; when it returns, no page of it is read any more."""
        status = self.kv_mgr.request_status.get(self.bootstrap_room)
        has_failed = KVPoll.Failed in (status, self.conclude_state)
        self.kv_mgr.closed(self.bootstrap_room, "The request failed at prefill." if has_failed else "")
        super().clear()
        self.kv_mgr.cleared(self.bootstrap_room, was_sent=not has_failed)

    def _tell(self, delivery: Delivery) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "kvxfer: room %s: sent %d bytes in %d pages over %s in %.1f ms; noticed %.1f ms later",
                self.bootstrap_room,
                delivery.nbytes,
                delivery.num_pages,
                "+".join(sorted(delivery.rails)) or "nothing",
                (delivery.ended_ns - delivery.began_ns) / 1e6,
                (time.monotonic_ns() - delivery.ended_ns) / 1e6 if delivery.ended_ns else 0.0,
            )
