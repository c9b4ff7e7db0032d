"""Sessions that requests need: hosts that do not answer, and one agent with many names."""

from __future__ import annotations

import itertools
import socket
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvxfer import LeaseToken
from kvxfer.connectors.common.handover import MAX_RANKS, Handover
from kvxfer.connectors.common.step import FetchOrder, Grant, Step
from kvxfer.directory import Entry
from tests.connectors.workers import Worker, collected, workers
from tests.waiting import until

LEASE = LeaseToken.draw()


def order(name: str, *ranks: Entry) -> Step:
    source = Handover("computed", ranks, (LEASE,), ((1,),), (32,), (1,), 32)
    return Step(fetches=[FetchOrder(name, source, ((2,),), 0, 32)])


@pytest.mark.parametrize(
    "requests",
    [[[f"127.0.1.{number}" for number in range(1, MAX_RANKS + 1)]], [["127.0.1.1"] * 16] * 8],
    ids=["one request of many hosts", "many requests of one host"],
)
def test_hosts_that_never_answer_leave_diallers_to_others(requests: list[list[str]]) -> None:
    """The host of another request is dialled at once."""
    with ExitStack() as stack:
        prefill = stack.enter_context(workers("prefill"))
        decode = stack.enter_context(workers("decode", connect_timeout_s=60.0))
        for number, hosts in enumerate(requests):
            decode[0].half.step(order(f"hostile {number}", *silent(stack, *hosts)))
        hand_over(prefill, decode, "honest")
        assert not decode[0].half.collect(set()).received  # the others still wait


def test_a_host_that_has_answered_is_dialled_beside_any_number_that_never_do() -> None:
    with ExitStack() as stack:
        prefill = stack.enter_context(workers("prefill"))
        decode = stack.enter_context(workers("decode", connect_timeout_s=60.0))
        hand_over(prefill, decode, "first")
        for request in range(8):
            hosts = [f"127.0.{request + 1}.{number}" for number in range(1, 17)]
            decode[0].half.step(order(f"hostile {request}", *silent(stack, *hosts)))
        # Another engine on that host, as after a restart.
        again = stack.enter_context(workers("prefill"))
        hand_over(again, decode, "second")


def silent(stack: ExitStack, *hosts: str) -> list[Entry]:
    """Listeners that are not agents: they never answer a dial."""
    listeners = [stack.enter_context(socket.create_server((host, 0))) for host in hosts]
    return [
        Entry("x", f"tcp://{host}:{each.getsockname()[1]}", bytes(16))
        for host, each in zip(hosts, listeners, strict=True)
    ]


def hand_over(prefill: list[Worker], decode: list[Worker], name: str) -> None:
    """Has decode read a request of prefill, while others wait."""
    prefill[0].half.step(Step(grants=[Grant("computed", (LEASE,), ((1,),))]))
    decode[0].half.step(order(name, prefill[0].rank))
    received: dict[str, bool] = {}

    def has_ended() -> bool:
        prefill[0].half.collect({"computed"})
        result = decode[0].half.collect(set())
        received.update({each: each in result.failed for each in result.received})
        return name in received

    until(has_ended, name)
    assert received == {name: False}


def test_one_agent_by_many_spellings_is_one_session() -> None:
    spellings = itertools.product(*((letter, letter.upper()) for letter in "localhost"))
    with workers("prefill") as prefill, workers("decode") as decode:
        port = prefill[0].rank.address.rpartition(":")[2]
        for number, letters in enumerate(itertools.islice(spellings, 12)):
            rank = replace(prefill[0].rank, address=f"tcp://{''.join(letters)}:{port}")
            decode[0].half.step(order(f"request-{number}", rank))
            collected(decode)
        assert len(decode[0].half._agent.peers) == 1
        until(lambda: len(prefill[0].half._agent.peers) == 1, "prefill's end of the others")
