"""A plug-in for tests: it corrupts decode's pages before a transfer, and records what arrived.

SGLang's decode computes no prompt itself, so a page that did not arrive still has its old bytes. Each engine
writes what it saw into the folder that ``KVXFER_OBSERVED`` names.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

NAME: Final = "kvxfer-observed"
ENTRY_POINT: Final = f"{__name__}:register"
FOLDER: Final = "KVXFER_OBSERVED"
#: While this file is in the folder, one byte of what arrives is changed.
FLIP: Final = "flip"
#: One line for each request whose pages have arrived.
ARRIVED: Final = "arrived.jsonl"
#: What an idle engine still holds of requests; one file for each worker, rewritten continuously.
HELD: Final = "held"

# Every byte of the corrupted pages: no model computes this NaN.
_SPOILED: Final = 0xFF
_SPOILED_WORD: Final = 0xFFFFFFFF
# The highest byte of a float32, which has all but one bit of the exponent.
_HIGH_BYTE: Final = 3
_FLOAT_NBYTES: Final = 4
_EXPONENT: Final = 0x40
_TOLD_EVERY_S: Final = 0.2
# A manager's bounded records of why the last requests failed.
_RECORDS: Final = ("failure_records", "_failed")

_told_at = 0.0


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    decode = "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req"
    HookRegistry.register(
        "kvxfer.connectors.sglang.receiver.KvxferKVReceiver.send_metadata", _spoil, HookType.BEFORE
    )
    HookRegistry.register(decode, _look, HookType.BEFORE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.on_idle", _tell_held, HookType.AFTER)


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _spoil(receiver: Any, kv_indices: Any, *_: Any, **__: Any) -> None:
    receiver.kvxfer_pages = np.array(kv_indices)
    for buffer in _buffers(receiver):
        buffer[receiver.kvxfer_pages] = _SPOILED


def _look(_: Any, decode_req: Any) -> None:
    receiver = decode_req.kv_receiver
    pages = receiver.kvxfer_pages
    whole = np.ones(len(pages), bool)
    for buffer in _buffers(receiver):
        whole &= (buffer[pages].view(np.uint32) != _SPOILED_WORD).all(axis=1)
    if (_folder() / FLIP).exists():
        # Values rather than keys, because a softmax may hide a changed key.
        *_, values = _buffers(receiver)
        high = values[pages[0], _HIGH_BYTE::_FLOAT_NBYTES]
        # The first element below 2 becomes huge; a larger one would only become tiny.
        values[pages[0], _HIGH_BYTE + _FLOAT_NBYTES * int((high & _EXPONENT).argmin())] ^= _EXPONENT
    line = {"rid": decode_req.req.rid, "pages": len(pages), "arrived": int(whole.sum())}
    with (_folder() / ARRIVED).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _buffers(receiver: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yields this worker's keys and values of each layer, as bytes of pages."""
    args = receiver.kv_mgr.kv_args
    for address, nbytes, page_nbytes in zip(
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True
    ):
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        yield np.frombuffer(memory, np.uint8).reshape(-1, page_nbytes)


def _tell_held(_: None, scheduler: Any) -> None:
    global _told_at
    if time.monotonic() - _told_at < _TOLD_EVERY_S:
        return
    _told_at = time.monotonic()
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None) or getattr(
        scheduler, "disagg_decode_prealloc_queue", None
    )
    if queue is None:
        return
    held = {
        name: len(value)
        for name, value in vars(queue.kv_manager).items()
        if isinstance(value, dict | set | list) and name not in _RECORDS
    }
    held["slots"] = scheduler.req_to_metadata_buffer_idx_allocator.available_size()
    held["rows"] = scheduler.req_to_token_pool.available_size()
    path = _folder() / f"{HELD}-{os.getpid()}.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"at_s": time.monotonic(), "held": held}))
    fresh.replace(path)
