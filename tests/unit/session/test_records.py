"""records: what the native core keeps of transfers, as a daemon beside the agents reads it."""

from __future__ import annotations

import os
import select
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, AgentOptions, KvxferError
from kvxfer._native import CODES, AgentCore, NativeError
from kvxfer.session.records import RECORD_NBYTES, Record, decode, encode
from kvxfer.testing.pair import Pair, connected_pair

BOUND_S = 60.0
TRANSPORTS = ("shm", "tcp", "loopback")


def core_of(agent: Agent) -> AgentCore:
    return agent._core


def take(core: AgentCore, most: int = 256) -> list[Record]:
    return decode(core.take_records(most))


def await_records(agent: Agent, count: int) -> list[Record]:
    """Takes that many records as a daemon's link does: it sleeps on the descriptor, then takes all."""
    fd = core_of(agent).watch_records(64)
    taken: list[Record] = []
    while len(taken) < count:
        assert select.select([fd], [], [], BOUND_S)[0], f"{len(taken)} of {count} records"
        taken += take(core_of(agent))
    assert len(taken) == count
    return taken


@contextmanager
def watched(*transports: str) -> Iterator[Pair]:
    with connected_pair(AgentOptions(transports=transports)) as pair:
        for cache in (pair.prefill, pair.decode):
            core_of(cache.agent).watch_records(64)
        yield pair


def test_records_are_encoded_as_native_code_has_them() -> None:
    with watched("loopback") as pair:
        prefill = pair.prefill
        pair.decode.region.grant(pair.decode.peer, mode="write", ttl_s=BOUND_S).wait(BOUND_S)
        prefill.agent.write(prefill.region, prefill.remote, [1], [2], context="whose").wait(BOUND_S)
        records = await_records(prefill.agent, 1)
        cut = records[0]._replace(outcome="failed", code="peer-lost", context="x" * 200, message="y" * 200)
        (found,) = decode(encode([cut]))
        assert found == cut._replace(context="x" * 128, message="y" * 120)
        assert decode(encode(records)) == records


# ---- what both ends tell ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_records_of_both_ends_join(transport: str) -> None:
    with watched(transport) as pair:
        prefill, decode_end = pair.prefill, pair.decode
        expected = decode_end.agent.expect(b"req", [1, 2], context="of decode")
        write = prefill.agent.write(
            prefill.region, prefill.remote, [4, 5], [1, 2], notify=b"req", priority=3, context="req-42"
        )
        write.wait(BOUND_S)
        expected.wait(BOUND_S)
        (source,) = await_records(prefill.agent, 1)
        destination, expectation = await_records(decode_end.agent, 2)
    assert (source.role, destination.role, expectation.role) == ("source", "destination", "expectation")
    assert source.transfer == destination.transfer
    assert (source.ours, destination.ours, expectation.ours) == (True, False, True)
    assert (source.region, source.remote_region) == (destination.remote_region, destination.region)
    nbytes = prefill.blocks([4, 5]).nbytes
    for record in (source, destination):
        assert record.outcome == "done"
        assert record.state == "done"
        assert (record.code, record.message) == ("", "")
        assert (record.nbytes, record.nbytes_done, record.num_blocks) == (nbytes, nbytes, 2)
        assert record.num_layers == prefill.num_layers
        assert record.priority == 3
        assert 0 < record.posted_ns <= record.begun_ns <= record.ended_ns
        assert record.pieces_done == record.num_pieces > 0
    assert source.context == "req-42"
    assert destination.context == expectation.context == "of decode"
    assert destination.rails == expectation.rails == (transport,) or destination.rails == ("eager",)
    assert destination.posted_ns <= destination.first_piece_ns <= destination.ended_ns
    assert expectation.num_blocks == 2
    assert expectation.handle == expectation.transfer


def test_a_failure_is_told_in_its_code_and_words() -> None:
    with watched("tcp") as pair:
        write = pair.prefill.agent.write(
            pair.prefill.region, pair.prefill.remote, [0], [0], context="ü" * 100
        )
        with pytest.raises(KvxferError) as caught:
            write.wait(BOUND_S)
        for cache in (pair.prefill, pair.decode):
            (record,) = await_records(cache.agent, 1)
            assert (record.outcome, record.code) == ("failed", "not-permitted")
            assert record.message
            assert record.context == "ü" * 64  # 128 bytes
        assert caught.value.code == "not-permitted"


def test_what_a_closed_agent_ended_is_still_there() -> None:
    with watched("shm") as pair:
        prefill, core = pair.prefill, core_of(pair.prefill.agent)
        prefill.agent.write(prefill.region, prefill.remote, [0], [0], notify=b"req", hold=True)
        prefill.agent.close()
        (record,) = take(core)
        assert (record.outcome, record.code) == ("failed", "closed")
        (record,) = await_records(pair.decode.agent, 1)
        assert (record.outcome, record.code) == ("failed", "peer-lost")


# ---- how much is kept -------------------------------------------------------------------------------


def test_nothing_is_kept_while_nobody_watches() -> None:
    with connected_pair(AgentOptions(transports=("shm",))) as pair:
        prefill, core = pair.prefill, core_of(pair.prefill.agent)
        pair.decode.region.grant(pair.decode.peer, mode="write", ttl_s=600)
        prefill.agent.write(prefill.region, prefill.remote, [0], [0]).wait(BOUND_S)
        assert take(core) == []
        core.watch_records(8)
        prefill.agent.write(prefill.region, prefill.remote, [0], [0]).wait(BOUND_S)
        core.watch_records(0)
        prefill.agent.write(prefill.region, prefill.remote, [0], [0]).wait(BOUND_S)
        assert len(take(core)) == 1  # records that were kept before may still be taken
        assert prefill.agent.stats()["records_dropped"] == 0


def test_the_newest_are_kept_and_the_others_counted() -> None:
    with connected_pair(AgentOptions(transports=("shm",))) as pair:
        prefill, core = pair.prefill, core_of(pair.prefill.agent)
        pair.decode.region.grant(pair.decode.peer, mode="write", ttl_s=600)
        core.watch_records(3)
        for _ in range(5):
            prefill.agent.write(prefill.region, prefill.remote, [0], [0]).wait(BOUND_S)
        assert prefill.agent.stats()["records_dropped"] == 2
        first, second, third = take(core, 2) + take(core, 2)
        assert first.transfer < second.transfer < third.transfer


# ---- what is open -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_held_write_is_seen_and_cancelled(transport: str) -> None:
    with watched(transport) as pair:
        prefill, core = pair.prefill, core_of(pair.prefill.agent)
        write = prefill.agent.write(prefill.region, prefill.remote, [4, 5], [1, 2], notify=b"req", hold=True)
        (seen,) = decode(core.open_transfers(8))
        assert (seen.role, seen.outcome, seen.state) == ("source", "pending", "serving")
        assert (seen.pieces_done, seen.nbytes_done, seen.ended_ns) == (0, 0, 0)
        assert decode(core.open_transfers(0)) == []
        assert not core.cancel_transfer(seen.session, seen.transfer, False)
        assert core.cancel_transfer(seen.session, seen.transfer, True)
        assert not core.cancel_transfer(seen.session, seen.transfer, True)
        with pytest.raises(KvxferError) as caught:
            write.wait(BOUND_S)
        assert caught.value.code == "cancelled"
        (ended,) = await_records(prefill.agent, 1)
        assert (ended.outcome, ended.code, ended.transfer) == ("cancelled", "cancelled", seen.transfer)
        assert decode(core.open_transfers(8)) == []


# ---- forks ------------------------------------------------------------------------------------------


def test_a_forked_child_is_told_so() -> None:
    with watched("shm") as pair:
        core = core_of(pair.prefill.agent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: this is about them
            child = os.fork()
        if child == 0:
            codes = []
            for ask in (core.take_records, lambda: core.watch_records(4), lambda: core.leases(1)):
                try:
                    ask()
                except NativeError as error:
                    codes.append(error.args[0])
            os._exit(0 if codes == [CODES["forked"]] * 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- the bytes --------------------------------------------------------------------------------------


def test_what_is_no_whole_record_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of records"):
        decode(bytes(RECORD_NBYTES + 1))
    assert decode(b"") == []
