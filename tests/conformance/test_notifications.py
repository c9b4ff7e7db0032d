"""Notifications between real agents: in order, once each, and also from peers that are gone."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, Peer, Transfer
from tests.waiting import until


class Ends:
    """Two agents. The second lets the first write; ``note`` writes with a payload."""

    def __init__(self, prefill: Agent, decode: Agent) -> None:
        self.prefill, self.decode = prefill, decode
        source = prefill.register("kv", np.ones((4, 64), np.uint8))
        region = decode.register("kv", np.zeros((4, 64), np.uint8))
        remote = prefill.connect_blocking(decode.address, 10).region_blocking("kv")
        region.grant(decode.accept_blocking("prefill", 10), mode="write", ttl_s=60)
        self.note: Callable[[bytes], Transfer] = lambda payload: prefill.write(
            source, remote, [1], [2], notify=payload
        )


@pytest.fixture(params=["shm", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    options = AgentOptions(transports=(request.param,))
    with Agent("prefill", options=options) as prefill, Agent("decode", options=options) as decode:
        yield Ends(prefill, decode)


def test_a_note_that_is_read_after_its_peer_was_lost_names_it(ends: Ends) -> None:
    peer = ends.decode.accept_blocking("prefill", 10)
    for payload in (b"held", b"forgotten"):
        ends.note(payload).wait(10)
    ends.prefill.close()
    until(lambda: not ends.decode.peers)
    note = ends.decode.notification_blocking(10)
    assert note.payload == b"held"
    assert note.peer is peer
    del note, peer
    gc.collect()
    note = ends.decode.notification_blocking(10)
    assert (note.peer.name, note.peer.state, note.payload) == ("prefill", "lost", b"forgotten")


def test_polling_comes_to_an_end_though_nobody_reads(ends: Ends) -> None:
    for _ in range(3):
        ends.note(b"unread").wait(10)
    deadline = time.monotonic() + 10
    while ends.decode.poll():
        assert time.monotonic() < deadline
    assert ends.decode.take_notification() is not None


def test_each_goes_to_one_reader_in_order_while_others_drive(ends: Ends) -> None:
    """One thread reads notifications. Others poll and wait for transfers, which reads the same ring."""
    count, found, stop = 300, [], threading.Event()

    def read() -> None:
        for _ in range(count):
            found.append(int(ends.decode.notification_blocking(20).payload))

    def drive() -> None:
        while not stop.is_set():
            ends.decode.poll()
            time.sleep(0.0005)

    threads = [threading.Thread(target=read), threading.Thread(target=drive)]
    for thread in threads:
        thread.start()
    for number in range(count):
        ends.note(b"%d" % number).wait(20)
    threads[0].join(20)
    stop.set()
    threads[1].join(20)
    assert found == list(range(count))
    assert ends.decode.take_notification() is None


async def test_many_tasks_read_beside_each_other(ends: Ends) -> None:
    """As many notes as tasks may come as one piece of news: each of them gets one."""
    readers: list[Peer] = []

    async def read() -> bytes:
        async for note in ends.decode.notifications():
            readers.append(note.peer)
            return note.payload
        return b""

    for _ in range(20):
        waiting = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.gather(*(ends.note(b"%d" % number) for number in range(3)))
        assert sorted(await asyncio.wait_for(asyncio.gather(*waiting), 10)) == [b"0", b"1", b"2"]
    assert len(readers) == 60


async def test_a_loop_that_is_busy_keeps_nobody_waiting(ends: Ends) -> None:
    """The loop serves the agent while it waits. While it computes, the agent's thread does."""
    reader = ends.decode.notifications()

    def write(first: int) -> None:
        for number in range(first, first + 20):
            ends.note(b"%d" % number).wait(20)

    for first in range(0, 100, 20):
        writing = threading.Thread(target=write, args=(first,))
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        writing.start()
        note = await waiting
        writing.join(20)  # the loop stands still meanwhile
        assert not writing.is_alive()
        assert note.payload == b"%d" % first
        for number in range(first + 1, first + 20):
            assert (await asyncio.wait_for(anext(reader), 10)).payload == b"%d" % number


def test_two_loops_answer_each_other(ends: Ends) -> None:
    """Each loop runs on its own thread, and answers each write with one of its own."""
    region = ends.prefill.regions["kv"]
    peer = ends.prefill.peers[0]
    region.grant(peer, mode="write", ttl_s=60)
    source = ends.decode.regions["kv"]
    remote = ends.decode.peers[0].regions["kv"]
    count, heard = 200, {"prefill": 0, "decode": 0}

    async def prefill() -> None:
        notes = ends.prefill.notifications()
        for number in range(count):
            ends.note(b"%d" % number)
            assert (await asyncio.wait_for(anext(notes), 20)).payload == b"%d" % number
            heard["prefill"] += 1

    async def decode() -> None:
        notes = ends.decode.notifications()
        for number in range(count):
            assert (await asyncio.wait_for(anext(notes), 20)).payload == b"%d" % number
            ends.decode.write(source, remote, [2], [3], notify=b"%d" % number)
            heard["decode"] += 1

    threads = [threading.Thread(target=asyncio.run, args=(end(),)) for end in (prefill, decode)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard == {"prefill": count, "decode": count}
