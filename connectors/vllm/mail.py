"""Sending notes: reads of no block of a region that every worker has, each with a notification."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

import kvxfer
from kvxfer.connectors.vllm.notes import Note
from kvxfer.connectors.vllm.regions import CacheRegions, remote_region

_log = logging.getLogger("kvxfer")

_NO_IDS: Final = np.empty(0, np.uint32)


def send(agent: kvxfer.Agent, regions: CacheRegions, peer: kvxfer.Peer, note: Note) -> None:
    """Sends a note, or does nothing where the peer is gone: each side has a deadline of its own."""
    try:
        remote = remote_region(peer, regions.notes.name)
        agent.read(regions.notes, remote, _NO_IDS, _NO_IDS, notify=note.encode())
    except Exception as error:
        _log.debug("kvxfer: a note was not sent to %s: %s", peer.name, error)
