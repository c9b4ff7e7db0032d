"""A rank's process dies or stops during a request: the other end releases its pages and continues."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll

from tests.sglang.rank_process import RankProcess
from tests.sglang.ranks import LLAMA, Cache, Engine, Half, Receiving, Sending, configured
from tests.waiting import until

NUM_PAGES = 9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_HOST_IP", "127.0.0.1")
    return tmp_path


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with configured(folder) as address:
        yield address


def drive(half: Half, other: RankProcess, seed: int, num_chunks: int) -> None:
    """Continues a request until `num_chunks` chunks of three pages were sent."""
    other.request(half.room, seed, NUM_PAGES)
    half.start()
    other.call(half.room, "start")
    names, begins = (
        (half.name_pages, partial(other.call, half.room, "begin"))
        if isinstance(half, Receiving)
        else (partial(other.call, half.room, "name_pages"), half.begin)  # type: ignore[attr-defined]
    )
    until(names, "sessions")
    until(begins, "pages")
    for _ in range(num_chunks):
        if isinstance(half, Sending):
            half.send_chunk(3)
        else:
            other.call(half.room, "send_chunk", 3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("num_chunks", [0, 1])
def test_prefill_is_lost(folder: Path, address: str, number: int, num_chunks: int, seed: int) -> None:
    random_ = random.Random(seed)
    with (
        RankProcess("prefill", address, folder) as prefill,
        closing(Engine("decode", LLAMA, 1, address)) as decode,
    ):
        receiving = Receiving(decode, 1, Cache(LLAMA, NUM_PAGES, seed), random_)
        drive(receiving, prefill, seed, num_chunks)
        prefill.send_signal(number)
        until(lambda: receiving.has_ended, "decode's end")
        assert receiving.poll() == KVPoll.Failed
        (reason,) = receiving.release()
        assert "sglang-prefill/" in reason
        assert decode.left() == {}
        # A replacement registers at the same server, and is found.
        with RankProcess("prefill", address, folder) as another:
            again = Receiving(decode, 2, Cache(LLAMA, NUM_PAGES, seed), random_)
            drive(again, another, seed, 3)
            until(lambda: again.has_ended, "the end")
            assert again.poll() == KVPoll.Success
            assert again.differences() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("aborts", [False, True])
def test_decode_is_lost(folder: Path, address: str, number: int, aborts: bool, seed: int) -> None:
    random_ = random.Random(seed)
    with closing(Engine("prefill", LLAMA, 1, address)) as prefill:
        with RankProcess("decode", address, folder) as decode:
            sending = Sending(prefill, 1, Cache(LLAMA, NUM_PAGES, seed), random_)
            drive(sending, decode, seed, 1)
            decode.send_signal(number)
            sending.send_chunk(3)
            if aborts:
                sending.abort()
                sending.overwrite()
            until(lambda: sending.has_ended, "prefill's end")
            assert sending.poll() == KVPoll.Failed
            assert sending.release()
            assert prefill.left() == {}
        with RankProcess("decode", address, folder) as another:
            again = Sending(prefill, 2, Cache(LLAMA, NUM_PAGES, seed), random_)
            drive(again, another, seed, 3)
            until(lambda: again.has_ended, "the end")
            assert again.poll() == KVPoll.Success
            until(partial(another.call, 2, "has_ended"), "decode's end")
            assert another.call(2, "differences") == []
