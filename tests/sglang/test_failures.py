"""Requests that end early at either engine: their pages are released first, and only they fail."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll, StateType

from kvxfer.connectors.sglang.control_messages import GUARD, Destination
from tests.sglang.ranks import (
    LLAMA,
    Cache,
    Engine,
    Model,
    Pair,
    Receiving,
    Sending,
    configured,
    end_of,
    hand_over,
)
from tests.waiting import until

SUCCESS: Final = (KVPoll.Success, KVPoll.Success)
FAILED: Final = (KVPoll.Failed, KVPoll.Failed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_HOST_IP", "127.0.0.1")
    return tmp_path


@pytest.fixture(params=[(1, 1), (1, 2), (2, 1)], ids=lambda sizes: f"TP{sizes[0]} to TP{sizes[1]}")
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    model = Model(states=(StateType.SWA,))
    sizes: tuple[int, int] = request.param
    with configured(folder) as address, Pair(model, sizes[0], sizes[1], address) as pair:
        yield pair


def succeed(pair: Pair, random_: random.Random) -> None:
    """Hands one request over normally."""
    sending, receiving = pair.request(random_, 4)
    assert hand_over(sending, receiving) == SUCCESS
    assert receiving.differences() == []
    assert sending.release() == receiving.release() == []


def step(sending: Sending, receiving: Receiving, random_: random.Random) -> None:
    """Does what the schedulers may do next."""
    if receiving.name_pages() and sending.begin() and not sending.is_whole:
        sending.send_chunk(random_.randrange(1, 4))


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("aborts", ["prefill", "decode", "both"])
def test_an_abort_is_told_at_both_ends(pair: Pair, aborts: str, num_steps: int, seed: int) -> None:
    random_ = random.Random(seed)
    sending, receiving = pair.request(random_, 9)
    for half in random_.sample([sending, receiving], 2):
        half.start()
    for _ in range(num_steps):
        step(sending, receiving, random_)
    for role, half in (("prefill", sending), ("decode", receiving)):
        if aborts in (role, "both"):
            half.abort()
    if aborts != "decode":
        # From now on its pages may belong to other requests.
        sending.overwrite()
    until(lambda: receiving.name_pages() or receiving.has_ended, "decode's pages, or its end")
    ends = end_of(sending, receiving)
    assert KVPoll.Failed in ends
    if ends[1] == KVPoll.Success:  # all pages had arrived before prefill failed it
        assert receiving.differences() == []
    assert bool(receiving.release()) == (ends[1] == KVPoll.Failed)
    assert bool(sending.release()) == (ends[0] == KVPoll.Failed)
    # Nothing lands in the pages that `release` has zeroed.
    time.sleep(0.05)
    assert not any(each.any() for each in receiving.pages())
    succeed(pair, random_)
    assert pair.left() == {}


def test_requests_with_random_aborts_leave_nothing(folder: Path, seed: int) -> None:
    random_ = random.Random(seed)
    ends: dict[tuple[int, int], int] = {}
    with configured(folder) as address, Pair(LLAMA, 1, 1, address) as pair:
        free_pages = pair.prefill.num_free_pages, pair.decode.num_free_pages
        active: list[tuple[Sending, Receiving]] = []
        num_left = 200
        while num_left or active:
            if num_left and len(active) < 8:
                active.append(pair.request(random_, random_.randrange(1, 10)))
                num_left -= 1
            sending, receiving = halves = random_.choice(active)
            half = random_.choice(halves)
            if half.handles and random_.random() < 0.05:
                half.abort()
                if half is sending:
                    sending.overwrite()
            elif not half.handles:
                half.start()
            elif sending.handles and receiving.handles:
                step(sending, receiving, random_)
                if sending.has_ended and receiving.has_ended:
                    active.remove(halves)
                    end = sending.poll(), receiving.poll()
                    ends[end] = ends.get(end, 0) + 1
                    if receiving.poll() == KVPoll.Success:
                        assert receiving.differences() == []
                    for each in random_.sample(halves, 2):
                        assert bool(each.release()) == (end[halves.index(each)] == KVPoll.Failed)
        assert pair.left() == {}
        assert (pair.prefill.num_free_pages, pair.decode.num_free_pages) == free_pages
    assert ends[SUCCESS] > 20
    assert ends[FAILED] > 20


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_SECRET", "prefill's own secret, 32 letters")


def test_another_secret_is_refused_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, secrets: None, seed: int
) -> None:
    with configured(folder) as address:
        prefill = Engine("prefill", LLAMA, 1, address)
        monkeypatch.setenv("KVXFER_SECRET", "decode's own secret, of 32 letters")
        decode = Engine("decode", LLAMA, 1, address)
        with closing(prefill), closing(decode):
            random_ = random.Random(seed)
            cache = Cache(LLAMA, 3, seed)
            sending = Sending(prefill, 77, cache, random_)
            receiving = Receiving(decode, 77, cache, random_)
            sending.start()
            receiving.start()
            assert end_of(sending, receiving) == FAILED
            (reason,) = receiving.release()
            assert reason.startswith("no session with sglang-prefill/127.0.0.1:")
            assert "secret" in reason
            assert sending.release() == ["Aborted by decode."]
            assert decode.left() == prefill.left() == {}


def test_hosts_that_are_not_allowed_are_not_dialled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("KVXFER_SGLANG", '{"allowed_hosts": ["10.1.0.0/16"]}')
    with configured(folder) as address, Pair(LLAMA, 1, 1, address) as pair:
        _, receiving = pair.request(random.Random(seed), 3)
        receiving.start()
        until(lambda: receiving.has_ended, "the refusal")
        (reason,) = receiving.release()
        assert "allowed_hosts" in reason
        assert pair.prefill.managers[0].agent.peers == ()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("[]", "write an object"),
        ("{", "not valid JSON"),
        ('{"mode": "push"}', "mode is not a setting"),
        ('{"port": -1}', "port"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str, said: str
) -> None:
    monkeypatch.setenv("KVXFER_SGLANG", setting)
    with configured(folder) as address, pytest.raises(ValueError, match=said):
        Engine("prefill", LLAMA, 1, address)


def test_control_messages_of_strangers_cost_nothing(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    with configured(folder) as address, Pair(LLAMA, 1, 1, address) as pair, zmq.Context() as context:
        for engine in (pair.prefill, pair.decode):
            with context.socket(zmq.PUSH) as socket:
                socket.connect(f"tcp://127.0.0.1:{engine.managers[0].rank_port}")
                honest = pair.decode.managers[0].registration()
                for kind in (b"register", b"answer", b"pages", b"pickle"):
                    for body in (b"", b"{", b'{"kvxfer_sglang": 1}', honest[2][:-9], draw.randbytes(99)):
                        socket.send_multipart([GUARD, kind, body])
                stranger = Destination(0, "127.0.0.1", 1, "x", bytes(16), 0, 1, 0, True, ()).encode()
                for field in ("room", "aux_slot", "required_dst_info_num", "decode_prefix_len"):
                    for value in (-5, 2**70):
                        body = json.dumps({**json.loads(stranger[2]), field: value}).encode()
                        socket.send_multipart([*stranger[:2], body, *stranger[3:]])
                for frames in (
                    [b""],
                    [GUARD],
                    [b"ABORT"],
                    [b"ABORT", b"x"],
                    [b"KVXFER_STATUS", b"1", b"9", b""],
                ):
                    socket.send_multipart(frames)
        succeed(pair, draw)
        assert pair.left() == {}


def test_acknowledged_aborts_hold_decodes_pages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "1")
    with configured(folder) as address, Pair(LLAMA, 1, 1, address) as pair:
        sending, receiving = pair.request(random.Random(seed), 6)
        sending.start()
        receiving.start()
        until(receiving.name_pages, "sessions")
        until(sending.begin, "pages")
        sending.send_chunk(2)
        receiving.abort()
        manager = pair.decode.managers[0]
        until(lambda: manager.is_abort_release_safe(receiving.room, 1), "prefill's acknowledgement")
        manager.clear_deferred_abort_state(receiving.room)
        assert end_of(sending, receiving) == FAILED
        assert sending.release() == ["Aborted by decode."]
        assert receiving.release() == ["Aborted by AbortReq."]
        assert pair.left() == {}
