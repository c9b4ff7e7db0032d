"""Sessions that requests ask for: hosts that do not answer, and one agent under many names."""

from __future__ import annotations

import itertools
import socket
from contextlib import ExitStack
from dataclasses import replace

from kvxfer import LeaseToken
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.step import FetchOrder, Grant, Step
from kvxfer.directory import Entry
from tests.connectors.workers import collected, until, workers

LEASE = LeaseToken.draw()


def order(name: str, *ranks: Entry) -> Step:
    source = Handover("computed", ranks, (LEASE,), ((1,),), (32,), (1,), 32)
    return Step(fetches=[FetchOrder(name, source, ((2,),), 0, 32)])


def test_silent_hosts_do_not_keep_others_from_being_dialled() -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(40)]
        ranks = [Entry("x", f"tcp://127.0.0.1:{each.getsockname()[1]}", bytes(16)) for each in silent]
        prefill = stack.enter_context(workers("prefill"))
        decode = stack.enter_context(workers("decode", connect_timeout_s=5.0))
        prefill[0].half.step(Step(grants=[Grant("computed", (LEASE,), ((1,),))]))
        decode[0].half.step(order("hostile", *ranks))
        decode[0].half.step(order("honest", prefill[0].rank))
        failed: dict[str, bool] = {}

        def have_ended() -> bool:
            prefill[0].half.collect(set())
            result = decode[0].half.collect(set())
            failed.update({request_id: request_id in result.failed for request_id in result.received})
            return len(failed) == 2

        until(have_ended, "both")
        assert failed == {"hostile": True, "honest": False}


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
