"""Messages about pushes between workers of two engines, and from a router: untrusted bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pydantic")

from pydantic import ValidationError

from kvxfer.connectors.common import notes
from kvxfer.connectors.common.expected_push import ExpectedPush, has_coordinates, read_key
from kvxfer.connectors.common.handover import Handover, HandoverError
from kvxfer.connectors.common.notes import Heartbeat, Leaving, Note, Receipt, Refusal, RegistrationPart
from kvxfer.connectors.common.paging import GroupTable, pair_pages
from kvxfer.connectors.common.push_registration import Registration, Share
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.waiting_registrations import Registrations
from kvxfer.directory import Entry
from kvxfer.message import MAX_MESSAGE_NBYTES
from tests.connectors.requests import Request

KEY = bytes(range(16))
RANK = Entry("p.0", "tcp://10.0.0.7:80", bytes(16))
REQUEST = Request([1, 2, 3])
PEER: Any = SimpleNamespace(id=1, name="decode")


def registration(num_blocks: int = 3, **changes: Any) -> Registration:
    fields: dict[str, Any] = {
        "tag": "ab" * 16,
        "prompt": "0" * 32,
        "first_token": 32,
        "num_tokens": 32 * num_blocks - 5,
        "tables": (tuple(range(1, num_blocks + 1)),),
        "block_sizes": (32,),
        "pages_per_block": (2,),
        "shares": (Share(group=0, layers=(0, 4), heads=(2, 4)),),
    }
    return Registration.model_validate({**fields, **changes})


@pytest.mark.parametrize(
    "note",
    [
        Receipt(notes.digest_of("request"), notes.digest_of("lease"), 1, 2),
        Receipt(notes.digest_of("request"), notes.digest_of("lease"), 1, 2, may_be_shared=True),
        RegistrationPart(KEY, 0, 1, 2, 3, b"content"),
        Leaving(KEY, 3, 4),
        Leaving(KEY, 3, 4, may_be_shared=True),
        Heartbeat(notes.digest_of("request"), notes.digest_of("lease"), True),
        Refusal(KEY, "it has another prompt: caf\u00e9"),
    ],
)
def test_notes_are_read_as_they_were_written(note: Note) -> None:
    assert notes.read(note.encode()) == note


@pytest.mark.parametrize(
    ("request_id", "context"),
    [
        ("cmpl-1", "cmpl-1"),
        ("x" * 300, "x" * 256),
        ("x" + "é" * 200, "x" + "é" * 127),  # a character is whole or not there
        ("lone \udc80", "lone ?"),
    ],
)
def test_transfers_are_of_their_request(request_id: str, context: str) -> None:
    assert notes.context_of(request_id) == context


def test_a_trace_is_whole_in_a_record() -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    assert notes.context_of("cmpl-1", trace) == f"cmpl-1 {trace}"
    long = notes.context_of("é" * 200, trace)
    assert len(long.encode()) <= 128
    assert long.endswith(f" {trace}")


@pytest.mark.parametrize(("reader", "num_readers"), [(4, 4), (0, 0), (0, 1025), (65535, 65535)])
def test_workers_that_no_engine_has_are_refused(reader: int, num_readers: int) -> None:
    for note in (
        Receipt(KEY, KEY, reader, num_readers),
        RegistrationPart(KEY, reader, num_readers, 0, 1, b""),
        Leaving(KEY, reader, num_readers),
    ):
        with pytest.raises(ValueError, match=f"worker {reader} of {num_readers}"):
            notes.read(note.encode())


@pytest.mark.parametrize("seed", range(200), indirect=True)
def test_bytes_of_strangers_are_read_or_refused(seed: int) -> None:
    random_ = random.Random(seed)
    payload = bytes([random_.randrange(9)]) + random_.randbytes(random_.randrange(80))
    try:
        note = notes.read(payload)
    except ValueError:
        return
    assert note.encode() == payload or isinstance(note, Refusal)  # whose text may have replaced characters


def test_a_registration_comes_in_parts_in_any_order(seed: int) -> None:
    whole = registration(1_000_000)
    content = whole.model_dump_json().encode()
    parts = RegistrationPart.split(KEY, 0, 1, content)
    assert len(parts) > 20
    assert all(len(part.encode()) <= MAX_MESSAGE_NBYTES for part in parts)
    registrations = Registrations(60.0)
    random.Random(seed).shuffle(parts)
    for part in parts:
        assert not registrations.take(KEY)
        registrations.add(PEER, notes.read(part.encode()))  # type: ignore[arg-type]
    (arrival,) = registrations.take(KEY)
    assert arrival[1:4] == (0, 1, whole)
    assert not registrations.take(KEY)


def test_what_waits_is_bounded() -> None:
    registrations = Registrations(60.0)
    for number in range(20000):
        registrations.add(PEER, half(number))
    assert 16 << 20 < nbytes(registrations) <= 17 << 20
    # A peer may repeat itself.
    for _ in range(20000):
        registrations.add(PEER, half(0))
    assert nbytes(registrations) <= 17 << 20
    # And many of them have no more than so much together.
    for number in range(20000):
        registrations.add(peer_of(number % 8), half(number))
    assert 60 << 20 < nbytes(registrations) <= 64 << 20


def peer_of(number: int) -> Any:
    return SimpleNamespace(id=number, name=f"decode-{number}")


def half(number: int) -> RegistrationPart:
    return RegistrationPart(number.to_bytes(16, "big"), 0, 1, 0, 2, b"half")


def nbytes(registrations: Registrations) -> int:
    """Returns the waiting bytes, after checking that three sums of them agree."""
    waiting = sum(each.nbytes for of in registrations._peers.values() for each in of.values())
    assert waiting == sum(each.nbytes for of in registrations._keys.values() for each in of.values())
    assert waiting == sum(registrations._nbytes.values()) == registrations._total_nbytes
    return waiting


def test_a_peer_that_floods_forgets_its_own_and_nobody_elses() -> None:
    registrations = Registrations(60.0)
    honest, content = peer_of(1000), registration().model_dump_json().encode()
    (own,) = RegistrationPart.split(KEY, 0, 1, content)
    assert not registrations.add(honest, own)
    told = []
    # Four peers fill all the room, and go on sending.
    for number in range(24000):
        (part,) = RegistrationPart.split(number.to_bytes(16, "big"), 0, 1, content)
        told += registrations.add(peer_of(number % 4), part)
    # The peer of each forgotten registration can be told.
    assert len(told) > 7000
    assert {arrival.peer.id for arrival in told} == {0, 1, 2, 3}
    assert all(arrival.registration == registration() for arrival in told)
    assert [arrival.peer for arrival in registrations.take(KEY)] == [honest]


def test_who_comes_for_one_key_from_several_peers_is_taken_in_their_order() -> None:
    registrations = Registrations(60.0)
    for number in (3, 1, 2):
        registrations.add(peer_of(number), Leaving(KEY, 0, 1))
    assert [arrival.peer.id for arrival in registrations.take(KEY)] == [3, 1, 2]
    assert nbytes(registrations) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"tag": "ab"},
        {"first_token": 91},
        {"tables": ((1, 2),)},
        {"tables": ("no base64",)},
        {"tables": ((1, 2, 3), (1, 2, 3))},
        {"block_sizes": (0,)},
        {"pages_per_block": (3,)},
        {"shares": (Share(group=1, layers=(0, 4), heads=(2, 4)),)},
        {"shares": ({"group": 0, "layers": (0, -4), "heads": (0, 1)},)},
        {"shares": ({"group": 0, "layers": (4, 4), "heads": (0, 1)},)},
        {
            "shares": (
                Share(group=0, layers=(0, 4), heads=(0, 2)),
                Share(group=0, layers=(0, 4), heads=(2, 4)),
            )
        },
    ],
)
def test_absurd_registrations_are_refused(changes: dict[str, Any]) -> None:
    assert registration()
    with pytest.raises(ValidationError):
        registration(**changes)


def test_pages_of_both_ends_lie_side_by_side() -> None:
    src, dst = GroupTable((5, 0, 7, 8), 32, 2), GroupTable((1, 2, 0, 4), 32, 2)
    pairs = pair_pages(src, dst, 16, 120)
    assert pairs.src.tolist() == [11, 16, 17]
    assert pairs.dst.tolist() == [3, 8, 9]
    assert pairs.num_lacking == 2
    assert pairs.tokens is None
    assert pair_pages(src, GroupTable((1, 2), 64, 1), 16, 120).tokens == range(16, 120)


def own(**changes: Any) -> dict[str, Any]:
    return {"kvxfer": {"version": 1, "push": KEY.hex(), "ranks": [RANK.to_dict()], **changes}}


def coordinates(**changes: Any) -> dict[str, Any]:
    """The parameters that vLLM's own proxy for pushes gives decode."""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "prefill-1",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 1,
        "remote_request_id": "6ec1",
        **changes,
    }


def named(name: str, at: int = 0, tokens: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request([*tokens], f"{name}-{at}-89abcdef", batch=(name, at))


def test_engines_that_are_given_one_name_of_a_request_make_one_key_of_it() -> None:
    params, request = coordinates(), named("cmpl-6ec1")
    assert has_coordinates(params)
    read = ExpectedPush.read(params, request, Settings())
    assert read.key == read_key({"do_remote_decode": True, "remote_block_ids": None}, request)
    assert [(rank.name, rank.address) for rank in read.ranks] == [
        ("prefill-1/*", "tcp://10.0.0.7:5600"),
        ("prefill-1/*", "tcp://10.0.0.7:5601"),
    ]
    others = [
        named("cmpl-6ec2"),
        named("chatcmpl-6ec1"),
        named("cmpl-6ec1", 1),
        named("cmpl-6ec1", 0, (1, 2)),
    ]
    keys = {ExpectedPush.read(params, other, Settings()).key for other in others}
    assert len(keys | {read.key}) == 5


@pytest.mark.parametrize(
    "params",
    [
        coordinates(remote_block_ids=[[1]]),
        coordinates(kvxfer={"version": 1}),
        coordinates(remote_request_id=None),
        {"do_remote_prefill": True},
    ],
)
def test_parameters_of_a_pull_are_no_coordinates(params: dict[str, Any]) -> None:
    assert not has_coordinates(params)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"remote_engine_id": ""}, "remote_engine_id"),
        ({"remote_host": "a@b"}, "address"),
        ({"remote_host": "8.8.8.8"}, "not among"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65535}, "65536"),
        ({"tp_size": 9, "pp_size": 8}, "72 ranks"),
    ],
)
def test_absurd_coordinates_are_refused_in_words(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(HandoverError, match=word):
        ExpectedPush.read(coordinates(**changes), named("cmpl-6ec1"), Settings())


def test_a_request_without_a_name_is_told_from_no_other() -> None:
    with pytest.raises(HandoverError, match="draw a key"):
        ExpectedPush.read(coordinates(), REQUEST, Settings())


def test_every_prompt_of_a_request_has_a_key_of_its_own() -> None:
    """The router draws one; the first has it."""
    params = own()
    keys = [read_key(params, named("cmpl-1", at)) for at in range(3)]
    assert keys[0] == KEY
    assert len(set(keys)) == 3
    for at, key in enumerate(keys):
        # The match does not depend on the other engine's name for the request.
        assert ExpectedPush.read(params, named("cmpl-2", at), Settings()).key == key


def test_a_prompt_beside_the_one_that_prefill_tells_of_is_pushed() -> None:
    first = Handover("cmpl-1-0-89abcdef", (RANK,), (), (), (), (), 3, batch="cmpl-1")
    read = ExpectedPush.beside(first, named("cmpl-2", 1))
    assert (read.key, read.ranks) == (read_key({}, named("cmpl-1", 1)), (RANK,))
    with pytest.raises(HandoverError, match="a request for each"):
        ExpectedPush.beside(replace(first, batch=None), named("cmpl-2", 1))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": 2}, "version 2"),
        ({"push": "0" * 31}, "push"),
        ({"ranks": [RANK.to_dict()] * 65}, "ranks"),
        ({"ranks": [{**RANK.to_dict(), "address": "tcp://a@b:1"}]}, "address"),
        ({"ranks": [{**RANK.to_dict(), "address": "tcp://10.1.0.7:1"}]}, "not among"),
    ],
)
def test_absurd_pushes_are_refused_in_words(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(HandoverError, match=word):
        ExpectedPush.read(own(**changes), REQUEST, Settings(allowed_hosts=("10.0.0.7",)))
