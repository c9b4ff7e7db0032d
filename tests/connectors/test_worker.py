"""The worker half over real agents, with arrays that no model filled: prefill and decode in one process."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.connectors.common import fetch
from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.failed_loads import FailedLoads
from kvxfer.connectors.common.handover import Handover, place_of
from kvxfer.connectors.common.pace import StepPace
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.step import Claimed, FetchOrder, Grant, Step, Unfetchable
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.directory import Entry
from tests.connectors.requests import Request
from tests.connectors.workers import BLOCK_SIZE, LAYERS, NUM_HEADS, Pushed, Worker, memory_of
from tests.fault.node import Worker as Process
from tests.fault.proxy import Proxy
from tests.seeds import seed_of
from tests.waiting import until

SRC, DST = (5, 9, 2), (7, 3, 11)
NUM_TOKENS = 3 * BLOCK_SIZE - 4
NUM_BLOCKS, CONTENT = 64, 16
_PAGE_NBYTES = NUM_HEADS * BLOCK_SIZE * CONTENT * 4


def worker_of(name: str, num_blocks: int = NUM_BLOCKS, **settings: Any) -> Worker:
    position = WorkerRank(name)
    shape = (num_blocks, NUM_HEADS, BLOCK_SIZE, CONTENT)
    random = np.random.default_rng(seed_of(name))
    caches = {}
    for layer in LAYERS:
        # Memory without madvise for huge pages, which numpy would give.
        memory = mmap.mmap(-1, num_blocks * _PAGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        caches[layer] = np.frombuffer(memory, np.float32).reshape(shape)
        random.random(out=caches[layer], dtype=np.float32)
    return Worker(position, memory_of(caches, position), caches, **settings)


@pytest.fixture
def prefill() -> Iterator[Worker]:
    with worker_of("prefill") as worker:
        yield worker


@pytest.fixture
def decode() -> Iterator[Worker]:
    with worker_of("decode") as worker:
        yield worker


_request_ids = count(1)


def granted(prefill: Worker, *readers: str) -> Handover:
    """A request that prefill has computed."""
    request_id = f"request-{next(_request_ids)}"
    lease = kvxfer.LeaseToken.draw()
    prefill.half.step(Step(grants=[Grant(request_id, (lease,), (SRC,), readers)]))
    return Handover(request_id, (prefill.rank,), (lease,), (SRC,), (BLOCK_SIZE,), (1,), NUM_TOKENS)


def order(handover: Handover | Unfetchable, request_id: str = "a") -> Step:
    return Step(fetches=[FetchOrder(request_id, handover, (DST,), 0, NUM_TOKENS)])


def counted(worker: Worker) -> dict[str, Any]:
    statistics = worker.half.take_statistics()
    return {} if statistics is None else statistics.data


def test_a_handover_is_worth_nothing_to_another_engine(prefill: Worker, decode: Worker) -> None:
    handover = granted(prefill, "decode")
    with worker_of("decode-2") as other:
        # It copied all parameters from a router's log; it can neither read the blocks nor have them given
        # back.
        other.half.step(order(handover))
        assert other.until("received", "a").failed == {"a": set(DST)}
        assert counted(other)["failures"] == {"pull": {"not-permitted": 1}}
        decode.half.step(order(handover))
        assert not decode.until("received", "a").failed
        assert np.array_equal(decode.pages(DST), prefill.pages(SRC))
        prefill.until("sent", handover.request_id, {handover.request_id})
        assert counted(prefill)["receipts"] == 1


@pytest.mark.parametrize("how", ["pull", "push"])
def test_an_engine_whose_cache_differs_declines_at_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with worker_of("prefill", lease_ttl_s=600.0) as prefill, unlike("decode") as decode:
        if how == "pull":
            handover = granted(prefill)
            name = handover.request_id
            decode.half.step(order(handover, name))
        else:
            pushed = Pushed(name := "pushed", SRC, DST, NUM_TOKENS, bytes(16))
            decode.half.step(pushed.order([prefill]))
            prefill.half.before_forward(pushed.chunk(0, NUM_TOKENS))
            prefill.half.after_forward(whole=True)
        assert decode.until("received", name).failed
        assert counted(decode)["failures"] == {how: {"layout-mismatch": 1}}
        assert "differ in region 'kv.0': model: another at the source, tiny at the" in caplog.text
        prefill.until("sent", name, {name})
        assert not counted(prefill).get("expired")


def unlike(name: str) -> Worker:
    position = WorkerRank(name)
    caches = {layer: np.zeros((NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, CONTENT), np.float32) for layer in LAYERS}
    (memory,) = memory_of(caches, position)
    memory = replace(memory, layout=replace(memory.layout, model="another"))
    return Worker(position, [memory], caches)


@pytest.mark.parametrize("named", [True, False], ids=["named", "claimed"])
def test_engines_that_share_a_handover_all_read_before_it_is_given_back(
    prefill: Worker, decode: Worker, named: bool
) -> None:
    with worker_of("decode-2") as other:
        handover = granted(prefill, *(("decode", "decode-2") if named else ()))
        if not named:
            other.half.step(Step(claimed=[Claimed("b", replace(handover, keep_s=30.0))]))
            until(lambda: not_sent(prefill, handover) or prefill.half.take_news() is not None, "a claim")
        decode.half.step(order(handover))
        assert not decode.until("received", "a").failed
        until(lambda: counted(prefill).get("receipts") == 1 or not_sent(prefill, handover), "a receipt")
        assert prefill.half.collect({handover.request_id}).sent == set()
        other.half.step(order(handover, "b"))
        assert not other.until("received", "b").failed
        assert np.array_equal(other.pages(DST), prefill.pages(SRC))
        prefill.until("sent", handover.request_id)


def not_sent(prefill: Worker, handover: Handover) -> bool:
    """Steps once, and asserts that the unread request is not given back; always False."""
    assert not prefill.half.collect({handover.request_id}).sent
    return False


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_sample_has_read_waits_for_samples_at_other_engines(decode: Worker, comes: bool) -> None:
    """The samples are not announced: there only may be some."""
    with worker_of("prefill", lease_ttl_s=60.0) as prefill, worker_of("decode-2") as other:
        handover = replace(granted(prefill), may_be_shared=True)
        decode.half.step(order(handover))
        assert not decode.until("received", "a").failed
        until(lambda: counted(prefill).get("receipts") == 1 or not_sent(prefill, handover), "a receipt")
        assert not_sent(prefill, handover) is False
        if comes:
            other.half.step(order(handover, "b"))
            assert not other.until("received", "b").failed
            assert np.array_equal(other.pages(DST), prefill.pages(SRC))
            until(lambda: counted(prefill).get("receipts") == 1 or not_sent(prefill, handover), "a receipt")
        news = prefill.half.take_news()
        assert news is not None
        assert news.read == (handover.request_id,)
        # Where others need the blocks.
        prefill.half.before_forward(Step(given_way=[handover.request_id]))
        prefill.until("sent", handover.request_id)


@pytest.mark.parametrize("theirs", ["another secret, as long", None], ids=["another secret", "no secret"])
def test_what_a_routers_log_prints_opens_nothing_without_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    for variable in ("KVXFER_SECRET", "KVXFER_SECRET_FILE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "secret").write_text("a secret for tests only")
    knows: dict[str, Any] = {"secret_file": tmp_path / "secret"}
    other: dict[str, Any] = {}
    if theirs is not None:
        (tmp_path / "theirs").write_text(theirs)
        other["secret_file"] = tmp_path / "theirs"
    with (
        worker_of("prefill", **knows) as prefill,
        # It uses the name of the named reader's engine.
        worker_of("decode", **other) as stranger,
        worker_of("decode", **knows) as decode,
    ):
        request = Request(list(range(NUM_TOKENS)))
        for readers in ((), ("decode",)):
            printed = json.dumps(granted(prefill, *readers).params("prefill", request))
            read = Handover.read(json.loads(printed), request, 1, Settings())
            before = stranger.pages(DST)
            key = read.request_id
            # It can neither read, nor prolong or end the keeping of the blocks, nor get a push.
            stranger.half.step(Step(claimed=[Claimed(key, read)]))
            stranger.half.step(order(read, key))
            assert stranger.until("received", key).failed == {key: set(DST)}
            stranger.half.step(Step(released=[read]))
            push = ExpectedPush(bytes(range(16)), (prefill.rank,), "digest")
            stranger.half.step(Step(fetches=[FetchOrder("push", push, (DST,), 0, NUM_TOKENS)]))
            assert stranger.until("received", "push").failed == {"push": set(DST)}
            assert counted(stranger)["failures"] == {
                "pull": {"auth-failed": 1},
                "push": {"auth-failed": 1},
            }
            assert np.array_equal(stranger.pages(DST), before)
            assert not prefill.half.collect({key}).sent
            assert prefill.half.take_news() is None
            assert not prefill.half._agent.peers
        decode.half.step(order(read))
        assert not decode.until("received", "a").failed
        assert np.array_equal(decode.pages(DST), prefill.pages(SRC))
        prefill.until("sent", read.request_id)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.2"])
def test_engines_whose_environment_says_where_they_listen_find_each_other(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("KVXFER_HOST", host)
    monkeypatch.setenv("KVXFER_SECRET", "a secret for tests only")
    listening = Settings.of({}, "settings").host
    with worker_of("prefill", host=listening) as prefill, worker_of("decode", host=listening) as decode:
        told = place_of(prefill.rank)
        assert not told.is_wildcard
        assert host in ("0.0.0.0", told.host)
        decode.half.step(order(granted(prefill)))
        assert not decode.until("received", "a").failed
        assert np.array_equal(decode.pages(DST), prefill.pages(SRC))


def test_a_host_that_is_not_this_one_is_named_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_SECRET", "a secret for tests only")
    with pytest.raises(kvxfer.AgentError, match=r"cannot listen on tcp://203\.0\.113\.9:0") as caught:
        worker_of("prefill", host="203.0.113.9")
    assert caught.value.__notes__ == ["The agent listens at the setting host, or KVXFER_HOST: 203.0.113.9"]


def test_both_ends_count_it(prefill: Worker, decode: Worker) -> None:
    handover = granted(prefill)
    decode.half.step(order(handover))
    decode.until("received", "a")
    again = granted(prefill)
    decode.half.step(order(replace(again, comes_back=True), "b"))
    decode.until("received", "b")
    data = counted(decode)
    for mode in ("pull", "return"):
        assert data["nbytes"][mode] == [len(SRC) * _PAGE_NBYTES * len(decode.caches)]
        assert data["num_pages"][mode] == [len(DST)]
        assert sum(data["rails"][mode].values()) >= 1
        for name in ("connect_s", "load_s", "notice_s"):
            (took_s,) = data[name][mode]
            assert took_s >= 0
    for each in (handover, again):
        prefill.until("sent", each.request_id, {each.request_id})
    data = counted(prefill)
    assert (data["receipts"], data["expired"]) == (2, 0)
    assert not counted(decode)


def test_failures_are_counted_by_their_code(prefill: Worker, decode: Worker) -> None:
    handover = granted(prefill)
    prefill.half.before_forward(Step(withdrawn=[handover.request_id]))
    decode.half.step(order(handover))
    assert decode.until("received", "a").failed == {"a": set(DST)}
    nobody = Entry("nobody", "tcp://127.0.0.1:1", bytes(16))
    decode.half.step(order(replace(handover, ranks=(nobody,)), "b"))
    decode.until("received", "b")
    decode.half.step(order(Unfetchable("what the router passed cannot be read"), "c"))
    decode.until("received", "c")
    decode.half.step(
        Step(fetches=[FetchOrder("d", Unfetchable("it names no cache", "no-handover"), (DST,), 0, 1)])
    )
    decode.until("received", "d")
    assert counted(decode)["failures"] == {
        "pull": {"lease-ended": 1, "unreachable": 1},
        "none": {"bad-handover": 1, "no-handover": 1},
    }


def test_a_prefill_that_stands_still_is_said_to_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    prefill = Process("prefill", "tcp")
    try:
        rank = Entry("prefill", prefill.address(), bytes(16))
        handover = Handover(
            "b", (rank,), (kvxfer.LeaseToken.draw(),), (SRC,), (BLOCK_SIZE,), (1,), NUM_TOKENS
        )
        prefill.stop()
        with worker_of("decode", connect_timeout_s=0.5) as decode:
            decode.half.step(order(handover))
            assert decode.until("received", "a").failed == {"a": set(DST)}
            assert counted(decode)["failures"] == {"pull": {"unreachable": 1}}
        (said,) = [line for line in caplog.messages if "request a: cache not loaded" in line]
        assert rank.address in said
        assert "it is stopped or starved" in said or "stopped, starved" in said
        assert "secret" not in said
    finally:
        prefill.finish()


def test_what_fails_at_any_moment_is_not_taken_for_loaded(prefill: Worker, decode: Worker) -> None:
    # Each fails while the engine checks it. If the engine checked twice, some would fail between the checks.
    for number in range(1000):
        handover = granted(prefill)
        prefill.half.before_forward(Step(withdrawn=[handover.request_id]))
        decode.half.step(order(handover, f"{number}"))
        assert decode.until("received", f"{number}").failed == {f"{number}": set(DST)}


def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every engine believe that its steps take 20 s."""
    monkeypatch.setattr(StepPace, "ended", lambda self, now_s, num_running: self._taken.append(20.0))


def test_what_is_expected_at_once_is_seen_in_its_step(
    prefill: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_steps(monkeypatch)
    with worker_of("decode", linger_s=20.0) as patient:
        for name in "abc":
            handover = granted(prefill)
            patient.half.step(order(handover, name))
            # The duration of the first load is unknown, so the engine does not wait for it.
            results = patient.half.collect(set()) if name != "a" else patient.until("received", name)
            assert results.received == {name}
            assert not results.failed
            prefill.until("sent", handover.request_id, {handover.request_id})


def test_what_nobody_reads_is_counted_as_kept_in_vain() -> None:
    with worker_of("prefill", lease_ttl_s=0.05) as prefill:
        handover = granted(prefill)
        prefill.until("sent", handover.request_id, {handover.request_id})
        assert counted(prefill)["expired"] == 1


# ---- sleep ------------------------------------------------------------------------------------


def test_a_prefill_that_slept_hands_over_again(prefill: Worker, decode: Worker) -> None:
    handover = granted(prefill)
    decode.half.step(order(handover))
    decode.until("received", "a")
    prefill.until("sent", handover.request_id, {handover.request_id})
    prefill.half.sleep()
    prefill.half.sleep()
    for tensor in prefill.caches.values():
        tensor.fill(0.5)  # memory that came back has other bytes
    prefill.half.wake()
    prefill.half.wake()
    again = granted(prefill)
    # Over the same session as before.
    decode.half.step(order(again, "b"))
    assert not decode.until("received", "b").failed
    assert np.array_equal(decode.pages(DST), prefill.pages(SRC))
    prefill.until("sent", again.request_id, {again.request_id})


def test_what_was_told_before_a_sleep_is_not_read_after_it(prefill: Worker, decode: Worker) -> None:
    handover = granted(prefill)
    prefill.half.sleep()
    prefill.half.wake()
    before = decode.pages(DST).copy()
    decode.half.step(order(handover))
    assert decode.until("received", "a").failed == {"a": set(DST)}
    assert np.array_equal(decode.pages(DST), before)
    prefill.until("sent", handover.request_id, {handover.request_id})


@pytest.fixture
def slow_word(prefill: Worker) -> Iterator[Proxy]:
    """A proxy that passes prefill's messages on, and can hold them back."""
    with Proxy(prefill.rank.address) as proxy:
        yield proxy


@pytest.fixture
def far_decode(prefill: Worker, slow_word: Proxy) -> Iterator[Worker]:
    """A decode that has read from prefill through that proxy only."""
    with worker_of("decode", transports=("tcp",), silent_timeout_s=10.0, connect_timeout_s=15.0) as worker:
        handover = through(slow_word, granted(prefill))
        worker.half.step(order(handover))
        assert not worker.until("received", "a").failed
        prefill.until("sent", handover.request_id, {handover.request_id})
        assert counted(worker)["num_pages"] == {"pull": [len(DST)]}
        yield worker


def through(proxy: Proxy, handover: Handover) -> Handover:
    (rank,) = handover.ranks
    return replace(handover, ranks=(replace(rank, address=proxy.address),))


def test_a_step_does_not_wait_on_for_what_was_expected_and_does_not_come(
    prefill: Worker, far_decode: Worker, slow_word: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_steps(monkeypatch)
    handover = through(slow_word, granted(prefill))
    with slow_word.control.held_back():
        far_decode.half.step(order(handover, "b"))
        assert not far_decode.half.collect(set()).received
    assert not far_decode.until("received", "b").failed
    prefill.until("sent", handover.request_id, {handover.request_id})


@pytest.mark.parametrize("heard", ["nothing", "that it slept"])
def test_who_reads_before_it_has_heard_that_prefill_is_awake_reads_again(
    prefill: Worker, far_decode: Worker, slow_word: Proxy, heard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_EARLY_S", 30.0)  # the announcement may take seconds on few cores
    if heard == "that it slept":
        prefill.half.sleep()
        (peer,) = far_decode.half._agent.peers
        until(lambda: "kv.0" not in peer.regions, "word of its sleep")
    for tensor in far_decode.caches.values():
        tensor.fill(0)
    with slow_word.control.held_back():
        prefill.half.sleep()
        prefill.half.wake()
        handover = through(slow_word, granted(prefill))
        far_decode.half.step(order(handover, "b"))
        assert not far_decode.half.collect(set()).received
    assert not far_decode.until("received", "b").failed
    assert np.array_equal(far_decode.pages(DST), prefill.pages(SRC))
    assert counted(far_decode)["num_pages"] == {"pull": [len(DST)]}
    prefill.until("sent", handover.request_id, {handover.request_id})


def test_who_reads_before_it_has_heard_that_prefill_sleeps_on_is_told_so(
    prefill: Worker, far_decode: Worker, slow_word: Proxy
) -> None:
    handover = through(slow_word, granted(prefill))
    with slow_word.control.held_back():
        prefill.half.sleep()
        far_decode.half.step(order(handover, "b"))
    assert far_decode.until("received", "b").failed == {"b": set(DST)}
    assert counted(far_decode)["failures"] == {"pull": {"region-gone": 1}}
    prefill.until("sent", handover.request_id, {handover.request_id})


def test_a_decode_that_falls_asleep_is_written_into_by_nobody(prefill: Worker, decode: Worker) -> None:
    handover = granted(prefill)
    decode.half.step(order(handover))
    decode.half.sleep()
    # The fence: no running transfer may write from here on.
    for tensor in decode.caches.values():
        tensor.fill(0)
    assert "a" in decode.half.collect(set()).received
    decode.half.wake()
    assert not decode.pages(DST).any()
    prefill.until("sent", handover.request_id, {handover.request_id})
    again = granted(prefill)
    decode.half.step(order(again, "b"))
    assert not decode.until("received", "b").failed
    assert np.array_equal(decode.pages(DST), prefill.pages(SRC))


@pytest.mark.parametrize("huge_pages", [True, False])
def test_a_cache_is_laid_in_huge_pages_where_that_is_wanted(huge_pages: bool) -> None:
    if "[madvise]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel has no huge pages, or gives them without being asked")
    before = in_huge_pages()
    with worker_of("huge", num_blocks=(16 << 20) // _PAGE_NBYTES, huge_pages=huge_pages):
        grown = in_huge_pages() - before
    assert (grown >= 12 << 20) == huge_pages


def in_huge_pages() -> int:
    """Returns bytes of this process that lie in transparent huge pages."""
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found
    return int(found[1]) * 1024


def test_requests_of_a_lost_engine_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    lines = FailedLoads()
    for number in range(40):
        lines.add(f"r{number}", "prefill-0", "peer-lost", "prefill-0 was lost")
    lines.add("a", "prefill-1", "deadline", "not loaded within 30 s")
    with caplog.at_level("INFO", "kvxfer"):
        lines.tell()
        lines.tell()
    assert len(caplog.messages) == 2
    lost, late = caplog.messages
    assert lost.startswith("kvxfer: requests r0, r1, ")
    assert lost.endswith(" and 24 more: cache not loaded: prefill-0 was lost")
    assert late == "kvxfer: request a: cache not loaded: not loaded within 30 s"
