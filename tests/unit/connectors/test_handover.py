"""What a decode engine believes of parameters that came by way of a router: nothing that it can check."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("pydantic")

from kvxfer import LeaseToken
from kvxfer.connectors.common.handover import Handover, HandoverError, is_return, prompt_digest, readers_of
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.directory import Entry
from tests.connectors.requests import Request

LEASE = "kvxfer-lease-1.400000000000000{}"


def request_of(num_tokens: int = 100, first: int = 0, beside: bytes = b"") -> Request:
    return Request(list(range(first, first + num_tokens)), beside=beside)


def handover(num_groups: int = 1, address: str = "tcp://10.0.0.7:7301") -> Handover:
    return Handover(
        request_id="cmpl-1",
        ranks=(Entry("p.0", address, bytes(16)), Entry("p.1", "tcp://[fd00::1]:80", bytes(16))),
        leases=tuple(LeaseToken.parse(LEASE.format(group)) for group in range(num_groups)),
        tables=((7, 9, 0, 4),) * num_groups,
        block_sizes=(32,) * num_groups,
        pages_per_block=(2,) * num_groups,
        num_tokens=100,
        keep_s=30.0,
    )


def rank(address: str) -> dict[str, Any]:
    """An agent's entry as a router may have made it up."""
    return {"kvxfer_agent": 1, "name": "p.0", "address": address, "incarnation": "00" * 16}


def passed(**changes: Any) -> dict[str, Any]:
    """Parameters as they arrive: through JSON, changed on the way."""
    params: dict[str, Any] = json.loads(json.dumps(handover().params("engine", request_of())))
    own = changes.pop("own", {})
    params["kvxfer"] |= own
    return {**params, **changes}


def read(params: dict[str, Any], **settings: Any) -> Handover:
    return Handover.read(params, request_of(), 1, Settings(**settings))


def test_an_engine_that_does_not_say_how_long_it_keeps_listens_to_no_heartbeats() -> None:
    params = passed()
    del params["kvxfer"]["keep_s"]
    assert read(params) == replace(handover(), keep_s=None)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://evil.example\0@10.0.0.7:80",
        "tcp://evil.example@10.0.0.7:80",
        "tcp://10.0.0.7:80/path",
        "tcp://10.0.0.7",
        "tcp://0.0.0.0:80",
        "tcp://10.0.0.7:٣",
        "tcp://a℀b:1",
        "tcp://[foo",
        "tcp://:80",
        "http://10.0.0.7:80",
        "tcp://" + "a" * 300 + ":1",
        "",
    ],
)
def test_addresses_have_one_reading(address: str) -> None:
    with pytest.raises(HandoverError, match=r"ranks\.0: .*agent's address (is|must be) "):
        read(passed(own={"ranks": [rank(address)]}))


def test_only_allowed_hosts_are_dialled() -> None:
    allowed = ("10.0.0.0/8", "fd00::/8")
    assert read(passed(), allowed_hosts=allowed)
    with pytest.raises(HandoverError, match="host fd00::1 is not among"):
        read(passed(), allowed_hosts=("10.0.0.7",))
    with pytest.raises(HandoverError, match=r"host 10\.0\.0\.7 is not among"):
        read(passed(), allowed_hosts=("prefill.example", "fd00::1"))
    ranks = [rank("tcp://prefill.example:1")]
    with pytest.raises(HandoverError, match=r"host 10\.0\.0\.8 is not among"):
        read(passed(own={"ranks": [rank("tcp://[::ffff:10.0.0.8]:1")]}), allowed_hosts=("10.0.0.7",))
    with pytest.raises(HandoverError, match=r"host prefill\.example is not among"):
        read(passed(own={"ranks": ranks}), allowed_hosts=allowed)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("LocalHost", True),
        ("100.127.0.1", True),
        ("fd00::1", True),
        ("172.32.0.1", False),
        ("8.8.8.8", False),
        ("169.254.169.254", False),  # where clouds give machines their credentials
        ("2001:db8::1", False),
        ("prefill.example", False),
        ("0x7f000001", False),
    ],
)
def test_without_a_list_hosts_of_private_networks_alone_are_dialled(host: str, is_ours: bool) -> None:
    assert Settings().may_dial(host) == is_ours
    assert Settings(allowed_hosts=("*",)).may_dial(host)
    assert not Settings(allowed_hosts=()).may_dial(host)
    if not is_ours and ":" not in host:
        with pytest.raises(HandoverError, match=rf"host {host} is not among .* \(by default only this host"):
            read(passed(own={"ranks": [rank(f"tcp://{host}:1")]}))


def test_names_are_allowed_by_how_they_end() -> None:
    settings = Settings(allowed_hosts=("*.prefill.svc", "other.example"))
    assert settings.may_dial("pod-0.prefill.svc")
    assert settings.may_dial("Pod-0.Prefill.SVC")
    assert settings.may_dial("other.example")
    for host in ("prefill.svc", "evilprefill.svc", "pod-0.prefill.svc.example", "10.0.0.7"):
        assert not settings.may_dial(host)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"own": {"version": 2}}, "version 2"),
        ({"own": {"leases": []}}, "leases"),
        ({"own": {"leases": [LEASE.format(7), LEASE.format(8)]}}, "name 2 cache groups"),
        ({"own": {"leases": ["4000000000000007"]}}, "text is not a lease token"),
        ({"own": {"ranks": [rank("tcp://h:1")] * 65}}, "ranks"),
        ({"own": {"ranks": [{"kvxfer_agent": 1, "\ud800": 1}]}}, r"lacks name.* has unknown \\ud800"),
        ({"own": {"block_sizes": [33]}}, "equal pages"),
        ({"own": {"block_sizes": [16]}}, "do not match"),
        ({"own": {"num_tokens": 99}}, "another prompt"),
        ({"own": {"keep_s": 0}}, "keep_s"),
        ({"own": {"prompt": "0" * 32}}, "another prompt"),
        ({"kvxfer": None}, "kvxfer"),
        ({"remote_block_ids": None}, "no remote_block_ids"),
        ({"remote_block_ids": [[1] * 101]}, "at most 100 blocks"),
        ({"remote_block_ids": [[-1] * 4]}, "remote_block_ids"),
        ({"remote_block_ids": [[1] * 4] * 2}, "2 cache groups"),
        ({"remote_request_id": ""}, "remote_request_id"),
    ],
)
def test_what_cannot_be_is_refused_in_words(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(HandoverError, match=word):
        read(passed(**changes))


@pytest.mark.parametrize(
    ("own", "readers"),
    [
        (None, ()),
        ({"version": 1}, ()),
        ({"version": 1, "reader": "decode-0", "colour": "red"}, ("decode-0",)),
        ({"version": 1, "readers": ["decode/0", "decode/1", "decode/0"]}, ("decode_0", "decode_1")),
    ],
)
def test_a_router_may_say_who_reads(own: Any, readers: tuple[str, ...]) -> None:
    assert readers_of({"do_remote_decode": True, "kvxfer": own}) == readers


@pytest.mark.parametrize(
    "own",
    [
        *({"version": 1, "reader": reader} for reader in ("", 7)),
        *({"version": 1, "readers": readers} for readers in ("decode", [""], ["decode"] * 65)),
        {"version": 2},
        3,
    ],
)
def test_a_reader_that_cannot_be_is_refused(own: Any) -> None:
    with pytest.raises(HandoverError):
        readers_of({"kvxfer": own})


def test_a_digest_is_of_all_that_decides_a_cache() -> None:
    requests = [request_of(), request_of(99), request_of(first=1), request_of(beside=b"an adapter")]
    digests = [prompt_digest(request, request.num_prompt_tokens) for request in requests]
    assert len(set(digests)) == 4
    assert prompt_digest(request_of(), 100) == digests[0]
    # Of its beginning nothing matters that comes later.
    assert prompt_digest(request_of(), 99) == digests[1]


def test_what_decode_hands_back_is_the_beginning_of_the_next_turn() -> None:
    decoded = replace(handover(), comes_back=True)
    params = json.loads(json.dumps(decoded.params("engine", request_of())))
    assert is_return(params)
    assert params["remote_num_tokens"] == 100
    longer = request_of(180)
    assert Handover.read(params, longer, 1, Settings()) == decoded
    with pytest.raises(HandoverError, match="another prompt"):
        Handover.read(params, request_of(180, first=1), 1, Settings())
    with pytest.raises(HandoverError, match="another prompt"):
        Handover.read(params, request_of(99), 1, Settings())
    # The handed-over blocks cover the whole prompt.
    assert not is_return(passed())
    with pytest.raises(HandoverError, match="another prompt"):
        Handover.read(passed(), longer, 1, Settings())


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"lease_ttl": 5}, "lease_ttl: "),
        ({"lease_ttl_s": 0}, "lease_ttl_s"),
        ({"lease_ttl_s": float("nan")}, "lease_ttl_s"),
        ({"allowed_hosts": ["10.0.0.0/99"]}, "allowed_hosts"),
    ],
)
def test_settings_are_checked_when_the_engine_starts(extra: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"^the engine's settings: {word}"):
        Settings.of(extra, "the engine's settings")


def test_settings_reach_the_agent(tmp_path: Any) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    options = Settings.of(
        {
            "host": "fd00::1",
            "port": 5600,
            "secret_file": str(tmp_path / "secret"),
            "transports": ["tcp"],
        },
        "settings",
    ).agent_options(WorkerRank("engine", tp_rank=1, tp_size=2, dp_rank=3))
    assert options.listen == "tcp://[fd00::1]:5607"
    assert options.secret == tmp_path / "secret", "the file, which is read again"
    assert options.transports == ("tcp",)
    assert options.advertise is None
    everywhere = Settings(host="0.0.0.0", advertise="fd00::7").agent_options(WorkerRank("engine"))
    assert (everywhere.listen, everywhere.advertise) == ("tcp://0.0.0.0:0", "tcp://[fd00::7]")
