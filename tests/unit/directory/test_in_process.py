"""directory: names resolve when they are published, and not for ever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvxfer.directory import Directory
from kvxfer.directory.in_process import MemoryDirectory
from kvxfer.errors import PeerError


async def test_resolve_waits_for_publish() -> None:
    directory: Directory = MemoryDirectory()
    waiting = asyncio.create_task(directory.resolve("decode-0", 30))
    await asyncio.sleep(0)
    directory.publish("decode-0", "tcp://a:1")
    assert await waiting == "tcp://a:1"
    assert await directory.resolve("decode-0", 0) == "tcp://a:1"


async def test_resolve_gives_up_and_forgets() -> None:
    directory = MemoryDirectory()
    directory.publish("other", "tcp://b:1")
    with pytest.raises(PeerError, match="known: other") as caught:
        await directory.resolve("nobody", 0.001)
    assert caught.value.code == "unreachable"
    assert not directory._waiting


def test_withdraw_spares_a_successor() -> None:
    directory = MemoryDirectory()
    directory.publish("a", "tcp://old:1")
    directory.publish("a", "tcp://new:1")
    directory.withdraw("a", "tcp://old:1")
    assert directory.resolve_blocking("a", 0) == "tcp://new:1"
    directory.withdraw("a", "tcp://new:1")
    with pytest.raises(PeerError):
        directory.resolve_blocking("a", 0)


def test_resolve_blocking_wakes() -> None:
    directory = MemoryDirectory()
    thread = threading.Thread(target=directory.publish, args=("a", "tcp://a:1"))
    thread.start()
    assert directory.resolve_blocking("a", 30) == "tcp://a:1"
    thread.join()
