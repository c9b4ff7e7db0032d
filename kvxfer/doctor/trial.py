"""Tries a transport: two agents of this process move pages over it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# By its lazy names: if the native module does not load, a trial reports that.
import kvxfer
from kvxfer.errors import KvxferError
from kvxfer.log import logger

NUM_PAGES = 64
PAGE_NBYTES = 4096
_TIMEOUT_S = 5.0
_AGENTS = ("doctor-src", "doctor-dst")


def try_transport(name: str) -> str:
    """Moves pages over one transport and compares every byte; returns what failed, ``""`` for nothing.

    Takes some milliseconds, two agents and two pools of 256 KiB.
    """
    # UCX would write its warnings to standard output, where the report goes.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        with _unlogged():
            return _move(name)
    except (KvxferError, ImportError, OSError, TimeoutError) as error:
        return str(error)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps messages of the trial's agents out of the log, because the finding reports failures."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return not any(name in record.getMessage() for name in _AGENTS)

    log = logger()
    log.addFilter(is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


def _move(name: str) -> str:
    # Its own secret: whatever the environment says, no other process can join.
    options = kvxfer.AgentOptions(transports=(name,), secret=os.urandom(32), connect_timeout_s=_TIMEOUT_S)
    pages = np.frombuffer(os.urandom(NUM_PAGES * PAGE_NBYTES), np.uint8).reshape(NUM_PAGES, PAGE_NBYTES)
    blocks = range(NUM_PAGES)
    with (
        kvxfer.Pool(NUM_PAGES, PAGE_NBYTES, name=_AGENTS[0], huge_pages=False) as src_pool,
        kvxfer.Pool(NUM_PAGES, PAGE_NBYTES, name=_AGENTS[1], huge_pages=False) as dst_pool,
        kvxfer.Agent(_AGENTS[0], options) as source,
        kvxfer.Agent(_AGENTS[1], options) as destination,
    ):
        src, dst = src_pool.array(pages.shape), dst_pool.array(pages.shape)
        src[:] = pages
        region = source.register("pages", src)
        target = destination.register("pages", dst)
        peer = destination.connect_blocking(source.address)
        if name not in peer.rails:
            return "; ".join(peer.notes) or f"no {name} rail came up, and the agent gave no reason"
        region.grant(source.accept_blocking(timeout_s=_TIMEOUT_S))
        remote = peer.region_blocking("pages", _TIMEOUT_S)
        transfer = destination.read(target, remote, blocks, blocks, timeout_s=_TIMEOUT_S)
        transfer.wait(_TIMEOUT_S + 1)
        wrong = np.flatnonzero((dst != pages).any(axis=1))
        if len(wrong):
            return f"{len(wrong)} of {NUM_PAGES} pages arrived with wrong bytes; the first is {wrong[0]}"
        return ""
