"""SGLang's control messages, which any host can send: each field has a range, and what waits has a budget."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")

from kvxfer import UsageError
from kvxfer.connectors.sglang import waiting_rooms
from kvxfer.connectors.sglang.control_messages import Answer, Destination, Registration, ids_of, read
from kvxfer.connectors.sglang.waiting_rooms import WaitingRooms
from kvxfer.directory import Entry

ENTRY = Entry("decode", "tcp://10.0.0.7:80", bytes(16))
DESTINATION = Destination(
    room=2**63 - 1,
    endpoint="fd00::7",
    dst_port=65535,
    agent="decode",
    tag=bytes(range(16)),
    aux_slot=2**32 - 1,
    required_dst_info_num=8,
    decode_prefix_len=2**31 - 1,
    is_dummy=False,
    brings=("kv", "aux"),
    pages=np.arange(5, dtype=np.uint32),
    states=(np.arange(2, dtype=np.uint32),),
)
MESSAGES: list[Any] = [Registration(ENTRY, "decode.example", 1), Answer("prefill", "no secret"), DESTINATION]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_read_as_they_were_written(message: Any) -> None:
    found = read(message.encode())
    assert found == message
    if isinstance(found, Destination):
        assert [each.tolist() for each in (found.pages, *found.states)] == [[0, 1, 2, 3, 4], [0, 1]]
        assert found.nbytes == 28


@pytest.mark.parametrize("ids", [[-1], [5, 2**32 + 5], [2**70], np.array([2**63], np.uint64)])
def test_block_ids_are_not_narrowed(ids: Any) -> None:
    with pytest.raises(UsageError, match=r"block ids? "):
        ids_of(ids)
    assert ids_of([2**32 - 1, 0]).tolist() == [2**32 - 1, 0]
    assert len(ids_of(None)) == 0


def test_reasons_of_any_length_are_sent() -> None:
    for reason in ("", "x" * 5000, "é" * 5000, "\ud800"):
        told = read(Answer("prefill", reason).encode())
        assert isinstance(told, Answer)
        assert 0 < len(told.reason.encode()) <= 4096


# No field may be any of these.
JUNK: list[Any] = [None, -1, -5, 2**70, -(2**70), 0.5, "", "\ud800", "x" * 5000, [], [-1], {}, {"a": 1}]
OUT_OF_RANGE: dict[str, list[Any]] = {
    "room": [2**63, True, "1"],
    "dst_port": [0, 65536],
    "endpoint": ["x" * 256, 7],
    "agent": ["x" * 129, 7],
    "tag": ["00" * 15, "00" * 17, "zz" * 16],
    "aux_slot": [2**32],
    "required_dst_info_num": [0, 65536],
    "decode_prefix_len": [2**31],
    "is_dummy": [0, 1, True],  # true with pages
    "brings": ["kv", [7], [""], ["x" * 129], ["x"] * 1025],
    "reason": [7],
}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_fields_out_of_range_are_refused_by_name(message: Any) -> None:
    frames = message.encode()
    document = json.loads(frames[2])
    for name in document.keys() - {"kvxfer_sglang"}:
        for value in (*JUNK, *OUT_OF_RANGE[name]):
            if name == "brings" and value == []:
                continue
            changed = json.dumps({**document, name: value}).encode()
            with pytest.raises(UsageError) as caught:
                read([*frames[:2], changed, *frames[3:]])
            said = str(caught.value)
            assert said.isprintable()
            assert len(said) < 1000
            assert name in said or name == "agent" or value is True, (name, value, said)


@pytest.mark.parametrize(
    "ids", [[], [b"abc"], [b"abcd"] * 66, [bytes(8 << 20)] * 3], ids=["none", "odd", "many", "long"]
)
def test_block_ids_out_of_range_are_refused(ids: list[bytes]) -> None:
    with pytest.raises(UsageError):
        read([*DESTINATION.encode()[:3], *ids])


@pytest.mark.parametrize("seed", range(100), indirect=True)
def test_frames_of_any_bytes_are_read_or_refused(seed: int) -> None:
    random_ = random.Random(seed)
    frames = random_.choice(MESSAGES).encode()
    for _ in range(random_.randrange(1, 4)):
        at = random_.randrange(1, len(frames))
        frame = bytearray(frames[at])
        where = random_.randrange(len(frame) + 1)
        frame[where : where + random_.randrange(3)] = random_.randbytes(random_.randrange(3))
        frames[at] = bytes(frame)
    try:
        found = read(frames)
    except UsageError:
        return
    if isinstance(found, Destination):
        np.array([found.aux_slot], np.uint32)  # raises, if it is out of range
        assert 0 <= found.room < 2**63
        assert found.tag_of("".join(found.brings))


@pytest.mark.parametrize("seed", range(20), indirect=True)
def test_rooms_that_never_come_have_a_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_rooms, "_MAX_NBYTES", 1 << 20)
    random_ = random.Random(seed)
    now = [0.0]
    rooms = WaitingRooms(lambda: now[0])
    held: dict[int, Counter[str]] = {}
    assert rooms.hold(0, "honest", 100) == []
    for number in range(1, 3000):
        now[0] += 1
        room = random_.choice([number, random_.randrange(1, number + 1)])
        holder = random_.choice(["", "flood"])
        nbytes = random_.choice([0, 4096, 1 << 18])
        held.setdefault(room, Counter())[holder] += max(nbytes, 4096)
        gone = rooms.hold(room, holder, nbytes)
        if random_.random() < 0.2 and held:
            gone.append(random_.choice(list(held)))
            rooms.end(gone[-1])
        for each in gone:
            held.pop(each, None)
        assert rooms.nbytes == sum(each.total() for each in held.values()) + 4096 <= 1 << 20
        assert len(rooms) == len(held) + 1
    # An honest engine's room outlives the flood of others, and goes by its age.
    assert 0 in rooms.older_than(now[0] - 1)
    for each in rooms.older_than(-1):
        rooms.end(each)
    assert len(rooms) == rooms.nbytes == 0


def test_a_message_that_is_larger_than_the_budget_is_not_kept() -> None:
    rooms = WaitingRooms()
    assert rooms.hold(1, "flood", 65 << 20) == [1]
    assert len(rooms) == rooms.nbytes == 0
