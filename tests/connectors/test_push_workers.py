"""Pushes between worker halves: layers that arrive during a forward, and interruptions of every kind."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.fetch import Fetch
from kvxfer.connectors.common.notes import RegistrationPart
from kvxfer.connectors.common.push_registration import Registration, Share
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.step import Chunk, Claimed, FetchOrder, Remainder, Step, Unfetchable
from kvxfer.connectors.common.worker_half import WorkerHalf
from kvxfer.connectors.common.worker_rank import WorkerRank
from tests.connectors.workers import (
    BOUND_S,
    LAYERS,
    NUM_LAYERS,
    Array,
    Clock,
    Pushed,
    Worker,
    collected,
    forward,
    prefill_knows,
    register,
    require_received,
    some_tokens,
    workers,
)
from tests.waiting import until

TOKENS = 100


def is_there(decode: list[Worker], pushed: Pushed, layer: int, whole: Array) -> bool:
    return bool(np.array_equal(pushed.arrived(decode, layer), whole[layer]))


def until_told(prefill: list[Worker], decode: list[Worker], what: str) -> None:
    """Steps both until a worker of decode has something ``"received"`` or ``"failed"``."""
    until(
        lambda: bool(prefill[0].half.collect(set())) and bool(getattr(decode[0].half.collect(set()), what)),
        what,
    )


def test_a_layer_arrives_while_the_next_is_computed() -> None:
    pushed, whole = Pushed.draw("layers", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        register(pushed, prefill, decode)
        prefill[0].half.before_forward(pushed.chunk(0, TOKENS))
        for layer, name in enumerate(LAYERS):
            pushed.compute(prefill, layer, 0, TOKENS, whole)
            prefill[0].half.layer_done(name)
            until(partial(is_there, decode, pushed, layer, whole), f"layer {layer}")
            for later in range(layer + 1, NUM_LAYERS):
                assert not pushed.arrived(decode, later).any()
        prefill[0].half.after_forward(whole=True)
        require_received(decode, {"layers"})
        assert collected(prefill, {"layers"})[0].sent == {"layers"}
        assert counted(prefill) == (1, 0)
        loaded = decode[0].half.take_statistics()
        assert loaded is not None
        assert loaded.data["load_s"].keys() == loaded.data["rails"].keys() == {"push"}


def counted(prefill: list[Worker]) -> tuple[int, int]:
    """Returns how many readers have received everything, and how many requests expired."""
    taken = prefill[0].half.take_statistics()
    assert taken is not None
    return taken.data["receipts"], taken.data["expired"]


@pytest.mark.parametrize("seed", range(36), indirect=True)
def test_chunks_and_registrations_in_any_order(seed: int) -> None:
    random_ = random.Random(seed)
    num_tokens = random_.choice([1, 31, 32, 33, 64, 200, random_.randrange(1, 1000)])
    cuts = sorted(random_.sample(range(1, num_tokens), min(random_.randrange(4), num_tokens - 1)))
    pushed, whole = Pushed.draw(f"seed {seed}", num_tokens, seed), some_tokens(num_tokens, seed)
    # Decode's prefix cache holds whole blocks, with other bytes than prefill would send.
    pushed.first_token = random_.randrange(-(-num_tokens // 32)) * 32 if random_.random() < 0.5 else 0
    # Decode may compute the last token itself.
    pushed.num_wanted = num_tokens - (random_.random() < 0.3 and num_tokens > pushed.first_token + 1)
    steps = list(zip([0, *cuts], [*cuts, num_tokens], strict=True))
    comes_at = random_.randrange(len(steps) + 1)
    with (
        workers("prefill", random_.choice([1, 2]), random_.choice([1, 2, 3])) as prefill,
        workers("decode", random_.choice([1, 2]), random_.choice([1, 2, 3])) as decode,
    ):
        received: list[set[str]] = [set() for _ in decode]

        def decode_steps() -> None:
            # Decode may have all tokens that it wants before prefill's last chunk.
            for at, worker in enumerate(decode):
                result = worker.half.collect(set())
                assert not result.failed
                received[at] |= result.received

        for at, (first, stop) in enumerate(steps):
            if at == comes_at:
                for worker in decode:
                    worker.half.step(pushed.order(prefill))
            decode_steps()
            forward(prefill, pushed, first, stop, whole)
        if comes_at == len(steps):
            for worker in decode:
                worker.half.step(pushed.order(prefill))
        sent: list[set[str]] = [set() for _ in prefill]
        finished = {pushed.name}

        def is_over() -> bool:
            decode_steps()
            for at, worker in enumerate(prefill):
                sent[at] |= worker.half.collect(finished).sent
            finished.clear()
            return all(received) and all(sent)

        until(is_over, "both sides")
        for layer in range(NUM_LAYERS):
            arrived = pushed.arrived(decode, layer)
            wanted = slice(pushed.first_token, pushed.num_wanted)
            assert np.array_equal(arrived[wanted], whole[layer, wanted])
            assert not arrived[: pushed.first_token].any()


def test_a_long_table_comes_in_parts() -> None:
    num_blocks = 6000
    pushed = Pushed.draw("long", 32 * (num_blocks - 1), num_blocks=num_blocks)
    with (
        workers("prefill", num_blocks=num_blocks, num_layers=1) as prefill,
        workers("decode", num_blocks=num_blocks, num_layers=1) as decode,
    ):
        each_its_own = np.arange(1, num_blocks + 1, dtype=np.float32)
        prefill[0].caches[LAYERS[0]][:] = each_its_own[:, None, None, None]
        decode[0].half.step(pushed.order(prefill))
        prefill[0].half.before_forward(pushed.chunk(0, pushed.num_tokens))
        prefill[0].half.after_forward(whole=True)
        until_told(prefill, decode, "received")
        src, dst = (
            cache.caches[LAYERS[0]][list(table)]
            for cache, table in ((prefill[0], pushed.src), (decode[0], pushed.dst))
        )
        assert np.array_equal(src, dst)


@pytest.mark.parametrize("how", ["withdrawn", "failed"])
def test_a_forward_that_does_not_end_is_not_taken_for_a_cache(how: str) -> None:
    pushed, whole = Pushed.draw("broken", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        register(pushed, prefill, decode)
        prefill[0].half.before_forward(pushed.chunk(0, TOKENS))
        pushed.compute(prefill, 0, 0, TOKENS, whole)
        prefill[0].half.layer_done(LAYERS[0])
        if how == "failed":
            prefill[0].half.after_forward(whole=False)
        else:
            prefill[0].half.before_forward(Step(withdrawn=["broken"]))
        (result,) = collected(decode)
        assert result.received == result.failed.keys() == {"broken"}
        # From here on, nothing reads its pages.
        for cache in prefill[0].caches.values():
            cache.fill(7)
        prefill[0].half.after_forward(whole=True)
        assert not any((cache == 7).any() for cache in decode[0].caches.values())


def test_one_that_registers_after_the_end_is_told_so() -> None:
    pushed = Pushed.draw("late", TOKENS)
    with workers("prefill") as prefill, workers("decode", push_timeout_s=60.0) as decode:
        prefill[0].half.before_forward(pushed.chunk(0, 50))
        prefill[0].half.before_forward(Step(withdrawn=["late"]))
        decode[0].half.step(pushed.order(prefill))
        until_told(prefill, decode, "failed")


def test_another_prompt_is_refused() -> None:
    pushed, whole = Pushed.draw("another", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        decode[0].half.step(pushed.order(prefill, prompt="another digest"))
        forward(prefill, pushed, 0, TOKENS, whole)
        until_told(prefill, decode, "failed")
        assert not any(cache.any() for cache in decode[0].caches.values())
        assert collected(prefill, {"another"})[0].sent == {"another"}


@pytest.mark.parametrize("has_cache", [True, False])
def test_an_engine_that_only_starts_is_not_waited_for(
    has_cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as running:
        (decode,) = running.enter_context(workers("decode"))
        if has_cache:
            half = running.enter_context(workers("prefill"))[0].half
        else:
            half = WorkerHalf(WorkerRank("prefill"), Settings())
            running.callback(half.close)
        source = ExpectedPush(bytes(16), (half._agent.entry,), "digest")
        decode.half.step(Step(fetches=[FetchOrder("early", source, ((1, 2),), 0, 64)]))
        fetch = connected(decode)
        assert not decode.half.collect(set()).failed
        fetch.begun_ns -= int(BOUND_S * 1e9)  # longer ago than connect_timeout_s
        assert decode.half.collect(set()).failed
        assert fetch.code == "unknown-region"
        assert "its engine is starting" in caplog.text
        assert "the same model" not in caplog.text


def connected(decode: Worker) -> Fetch:
    """Returns decode's fetch, once its sessions are open."""
    assert decode.half._fetches is not None
    (fetch,) = decode.half._fetches._fetches.values()
    until(lambda: all(session.done() for session in fetch.sessions), "the session")
    return fetch


def test_an_engine_that_begins_to_step_is_registered_with() -> None:
    pushed, whole = Pushed.draw("begins", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        decode[0].half.step(pushed.order(prefill))
        fetch = connected(decode[0])
        assert not decode[0].half.collect(set()).failed
        assert not fetch.is_posted
        forward(prefill, pushed, 0, TOKENS, whole)
        stepped_until(prefill[0], decode[0])
        assert all(is_there(decode, pushed, layer, whole) for layer in range(NUM_LAYERS))


@pytest.mark.parametrize("num_shares", [2, 4096])
def test_a_registration_costs_one_write_of_each_group(num_shares: int) -> None:
    pushed = Pushed.draw("costly", TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        registration = Registration(
            tag="ab" * 16,
            prompt="digest",
            first_token=0,
            num_tokens=TOKENS,
            tables=(pushed.dst,),
            block_sizes=(32,),
            pages_per_block=(1,),
            shares=(Share(group=0, layers=(0, NUM_LAYERS), heads=(0, 4)),),
        )
        greedy = registration.model_copy(update={"shares": registration.shares * num_shares})
        peer = decode[0].half._agent.connect_blocking(prefill[0].rank)
        # A later note from the same peer shows that prefill has read both.
        later = replace(pushed, key=bytes(16))
        for key, each in ((pushed.key, greedy), (later.key, registration)):
            for part in RegistrationPart.split(key, 0, 1, each.model_dump_json().encode()):
                decode[0].half._mail.send(peer, part)
        until(lambda: prefill_knows(prefill, later), "the second registration")
        prefill[0].half.before_forward(pushed.chunk(0, TOKENS))
        assert prefill[0].half._pushes is not None
        posted = prefill[0].half._pushes._pushes[pushed.key].readers.values()
        assert sum(len(reader.writes.members) for reader in posted) <= 1


def test_engines_that_the_router_does_not_name_are_refused() -> None:
    pushed, whole = replace(Pushed.draw("named", TOKENS), readers=("decode",)), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode, workers("thief") as thief:
        prefill[0].half.before_forward(pushed.chunk(0, 64))
        prefill[0].half.after_forward(whole=True)
        thief[0].half.step(pushed.order(prefill))
        until_told(prefill, thief, "failed")
        assert not any(cache.any() for cache in thief[0].caches.values())
        decode[0].half.step(pushed.order(prefill))
        forward(prefill, pushed, 64, TOKENS, whole)
        assert stepped_until(prefill[0], decode[0])[1] == {pushed.name}


@pytest.mark.parametrize("how", ["claimed", "named", "may come", "does not come"])
def test_engines_that_share_a_push_all_have_it_before_it_is_given_back(how: str) -> None:
    pushed, whole = Pushed.draw("shared", TOKENS), some_tokens(TOKENS)
    if how == "named":
        pushed = replace(pushed, readers=("decode", "other"))
    with workers("prefill") as prefill, workers("decode") as decode, workers("other") as other:
        step = pushed.order(prefill, may_be_shared="come" in how)
        if how == "claimed":
            claim = pushed.order(prefill).fetches[0].source
            assert isinstance(claim, ExpectedPush)
            other[0].half.step(Step(claimed=[Claimed(pushed.name, claim)]))
            until(lambda: bool(prefill[0].half.collect(set())) and has_claim(prefill[0], pushed), "a claim")
        decode[0].half.step(step)
        forward(prefill, pushed, 0, TOKENS, whole)
        finished = {pushed.name}
        sent, _ = stepped_until(prefill[0], decode[0], finished)
        for _ in range(3):
            sent |= prefill[0].half.collect(finished).sent
        assert not sent
        if how != "does not come":
            other[0].half.step(pushed.order(prefill))
            sent, _ = stepped_until(prefill[0], other[0], finished)
            for worker in (*decode, *other):
                assert all(is_there([worker], pushed, layer, whole) for layer in range(NUM_LAYERS))
        if "come" in how:
            assert not sent
            until(lambda: may_go(prefill[0], pushed), "word of that")
            prefill[0].half.before_forward(Step(given_way=[pushed.name]))
        assert sent or collected(prefill)[0].sent == finished
        statistics = prefill[0].half.take_statistics()
        assert statistics is not None
        assert not statistics.data["expired"]
        assert not statistics.data["gave_way"]


def stepped_until(
    prefill: Worker, decode: Worker, finished: set[str] | None = None
) -> tuple[set[str], set[str]]:
    """Steps both until decode has received something; returns the sent and the received requests."""
    sent: set[str] = set()
    received: set[str] = set()

    def has_come() -> bool:
        sent.update(prefill.half.collect(finished or set()).sent)
        results = decode.half.collect(set())
        assert not results.failed
        received.update(results.received)
        return bool(received)

    until(has_come, "what decode waits for")
    return sent, received


def may_go(prefill: Worker, pushed: Pushed) -> bool:
    """Steps once; returns whether prefill reports that all known readers have it."""
    assert not prefill.half.collect(set()).sent
    news = prefill.half.take_news()
    return news is not None and pushed.name in news.read


def has_claim(prefill: Worker, pushed: Pushed) -> bool:
    """Whether a claim waits for a prompt that is not computed yet."""
    assert prefill.half._pushes is not None
    return pushed.key in prefill.half._pushes._claimed


def test_a_second_request_of_one_engine_is_refused_its_key_at_once() -> None:
    pushed, whole = Pushed.draw("twice", 100), some_tokens(100)
    again = Pushed("again", pushed.src, tuple(block % 63 + 1 for block in pushed.dst), 100, pushed.key)
    with workers("prefill") as prefill, workers("decode") as decode:
        register(pushed, prefill, decode)
        prefill[0].half.before_forward(pushed.chunk(0, 64))
        prefill[0].half.after_forward(whole=True)
        decode[0].half.step(again.order(prefill))
        failed: dict[str, set[int]] = {}

        def is_refused() -> bool:
            prefill[0].half.collect(set())
            failed.update(decode[0].half.collect(set()).failed)
            return bool(failed)

        until(is_refused, "refusal")
        assert failed.keys() == {"again"}
        forward(prefill, pushed, 64, 100, whole)
        require_received(decode, {"twice"})


def test_a_reader_that_leaves_holds_nothing() -> None:
    pushed, whole = Pushed.draw("left", TOKENS), some_tokens(TOKENS)
    with workers("prefill", lease_ttl_s=600.0) as prefill, workers("decode") as decode:
        register(pushed, prefill, decode)
        prefill[0].half.before_forward(pushed.chunk(0, 64))
        decode[0].half.step(Step(abandoned=["left"]))
        (result,) = collected(decode)
        assert result.failed.keys() == {"left"}
        # From here on its pages are another's.
        for cache in decode[0].caches.values():
            cache.fill(7)
        prefill[0].half.after_forward(whole=True)
        forward(prefill, pushed, 64, TOKENS, whole)
        assert collected(prefill, {"left"})[0].sent == {"left"}
        assert all((cache == 7).all() for cache in decode[0].caches.values())


def test_a_write_that_has_failed_is_not_taken_for_a_reader_that_has_all() -> None:
    pushed, whole = Pushed.draw("lost", TOKENS), some_tokens(TOKENS)
    with workers("prefill", load_timeout_s=0.2) as prefill, workers("decode") as decode:
        register(pushed, prefill, decode)
        decode[0].half.step(Step(abandoned=["lost"]))  # its note about that arrives later
        forward(prefill, pushed, 0, TOKENS, whole)
        assert prefill[0].half._pushes is not None
        reader = prefill[0].half._pushes._pushes[pushed.key].readers["decode", 0]
        until(lambda: reader.writes.state in ("failed", "cancelled"), "the write's end")
        # So the reader may end right after it was checked.
        assert not reader.has_ended
        assert collected(prefill, {"lost"})[0].sent == {"lost"}
        assert prefill[0].half.take_statistics() is None  # nobody has all


def test_one_that_decode_holds_already_is_given_back() -> None:
    pushed, whole = Pushed.draw("held", TOKENS), some_tokens(TOKENS)
    with workers("prefill", lease_ttl_s=600.0) as prefill, workers("decode") as decode:
        forward(prefill, pushed, 0, TOKENS, whole)
        source = pushed.order(prefill).fetches[0].source
        assert not isinstance(source, Unfetchable)
        decode[0].half.step(Step(released=[source]))
        assert collected(prefill, {"held"})[0].sent == {"held"}


def test_a_key_that_comes_again_is_no_push(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pushed, whole = Pushed.draw("first", TOKENS), some_tokens(TOKENS)
    again = Pushed.draw("second", TOKENS, seed=9, beside=pushed)
    again.key = pushed.key
    with workers("prefill") as prefill, workers("decode") as decode:
        forward(prefill, pushed, 0, 64, whole)
        forward(prefill, again, 0, TOKENS, some_tokens(TOKENS, 9))
        forward(prefill, pushed, 64, TOKENS, whole)
        decode[0].half.step(pushed.order(prefill))
        sent: set[str] = set()

        def is_over() -> bool:
            sent.update(prefill[0].half.collect({"first", "second"} - sent).sent)
            return bool(decode[0].half.collect(set()).received)

        until(is_over, "the first")
        assert all(is_there(decode, pushed, layer, whole) for layer in range(NUM_LAYERS))
        clock.now += 600.0  # the second has no reader
        until(lambda: is_over() or sent == {"first", "second"}, "both given back")


def test_a_prefill_that_is_gone_ends_the_wait() -> None:
    pushed = Pushed.draw("gone", TOKENS)
    with workers("decode", push_timeout_s=600.0) as decode:
        with workers("prefill") as prefill:
            register(pushed, prefill, decode)
        (result,) = collected(decode)
        assert result.failed.keys() == {"gone"}


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_engine_that_sleeps_lets_go_and_comes_back(who: str) -> None:
    pushed, whole = Pushed.draw("asleep", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        register(pushed, prefill, decode)
        prefill[0].half.before_forward(pushed.chunk(0, 64))
        sleeper = prefill[0] if who == "prefill" else decode[0]
        sleeper.half.sleep()
        # Its memory now belongs to another program.
        for cache in sleeper.caches.values():
            cache.fill(7)
        prefill[0].half.after_forward(whole=True)
        (result,) = collected(decode)
        assert result.failed.keys() == {"asleep"}
        if who == "decode":
            assert all((cache == 7).all() for cache in decode[0].caches.values())
        else:
            assert not any((cache == 7).any() for cache in decode[0].caches.values())
        sleeper.half.wake()
        assert collected(prefill, {"asleep"})[0].sent == {"asleep"}
        # Regions that are registered again are announced.
        others = [prefill[0].half._agent, decode[0].half._agent]
        until(lambda: all("kv.0" in peer.regions for agent in others for peer in agent.peers), "its region")
        again = Pushed.draw("awake", TOKENS, seed=3, beside=pushed)
        decode[0].half.step(again.order(prefill))
        forward(prefill, again, 0, TOKENS, whole)
        until_told(prefill, decode, "received")
        assert all(is_there(decode, again, layer, whole) for layer in range(NUM_LAYERS))


def test_pages_that_are_needed_are_let_go_first() -> None:
    pushed, whole = Pushed.draw("preempted", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        register(pushed, prefill, decode)
        forward(prefill, pushed, 0, 64, whole)
        prefill[0].half.before_forward(Step(preempted=["preempted"]))
        for cache in prefill[0].caches.values():
            cache.fill(7)
        # The request runs again with other blocks, and is computed from the start.
        again = Pushed.draw("preempted", TOKENS, seed=5, beside=pushed)
        again.key, again.dst = pushed.key, pushed.dst
        forward(prefill, again, 0, 70, whole)
        forward(prefill, again, 70, TOKENS, whole)
        (result,) = collected(decode)
        assert not result.failed
        for layer in range(NUM_LAYERS):
            assert is_there(decode, pushed, layer, whole)


def test_what_another_request_computes_in_this_step_is_not_pushed_before_it_is_there() -> None:
    """The scheduler may continue a prompt from blocks that another request computes in this same forward."""
    pushed, whole = Pushed.draw("b", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        half = prefill[0].half
        for cache in prefill[0].caches.values():
            cache.fill(-1.0)  # what was in these blocks before
        register(pushed, prefill, decode)
        other = Chunk("a", b"a" * 16, "another", (pushed.src[:2],), 0, 64, 70)
        half.before_forward(Step(chunks=[other, *pushed.chunk(64, TOKENS).chunks]))
        for _ in range(20):
            half.collect(set())
            decode[0].half.collect(set())
            # A write that was posted as computed would land meanwhile.
            time.sleep(0.005)
        assert not any(cache.any() for cache in decode[0].caches.values())
        for layer, name in enumerate(LAYERS):
            pushed.compute(prefill, layer, 0, TOKENS, whole)
            half.layer_done(name)
        half.after_forward(whole=True)
        half.collect(set())
        (result,) = collected(decode)
        assert not result.failed
        assert all(is_there(decode, pushed, layer, whole) for layer in range(NUM_LAYERS))


def test_a_reader_that_comes_while_its_request_is_preempted_has_nobody_elses_bytes() -> None:
    pushed, whole = Pushed.draw("late", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        half = prefill[0].half
        forward(prefill, pushed, 0, 64, whole)
        # Its blocks now belong to another request, which overwrites them in this step.
        half.before_forward(Step(preempted=["late"]))
        for cache in prefill[0].caches.values():
            cache.fill(-1.0)
        half.after_forward(whole=True)
        decode[0].half.step(pushed.order(prefill))
        until(lambda: bool(decode[0].half.collect(set())) and served(prefill, pushed), "its reader")
        again = Pushed.draw("late", TOKENS, seed=5, beside=pushed)
        again.key, again.dst = pushed.key, pushed.dst
        forward(prefill, again, 0, TOKENS, whole)
        (result,) = collected(decode)
        assert not result.failed
        assert all(is_there(decode, pushed, layer, whole) for layer in range(NUM_LAYERS))


def served(prefill: list[Worker], pushed: Pushed) -> bool:
    """Whether a reader has registered at every worker of prefill and was sent all computed tokens."""
    for worker in prefill:
        worker.half.collect(set())
        assert worker.half._pushes is not None
        if not worker.half._pushes._pushes[pushed.key].readers:
            return False
    return True


def test_a_reader_that_asks_for_what_has_left_a_window_is_refused() -> None:
    pushed, whole = Pushed.draw("left", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        forward(prefill, pushed, 0, TOKENS, whole)
        left = Remainder("left", ((0, *pushed.src[1:]),))
        prefill[0].half.before_forward(Step(remainders=[left]))
        for cache in prefill[0].caches.values():
            cache[pushed.src[0]] = -1.0  # another's by now
        decode[0].half.step(pushed.order(prefill))
        until(lambda: bool(decode[0].half.collect(set())) and served(prefill, pushed), "its reader")
        (result,) = collected(decode)
        assert result.failed == {"left": set(pushed.dst)}
        assert not any(cache.any() for cache in decode[0].caches.values())


def test_a_push_that_goes_on_after_sleep_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lease_ttl_s = Clock(monkeypatch), 30.0
    pushed, whole = Pushed.draw("kept", TOKENS), some_tokens(TOKENS)
    with workers("prefill", lease_ttl_s=lease_ttl_s) as prefill:
        half = prefill[0].half
        forward(prefill, pushed, 0, 64, whole)
        half.sleep()
        half.wake()
        half.before_forward(Step(preempted=["kept"]))
        forward(prefill, pushed, 0, TOKENS, whole)
        # The request has finished; if no reader fetches it, its blocks are given back at its deadline, not
        # before.
        assert not half.collect({"kept"}).sent
        clock.now += 0.9 * lease_ttl_s
        assert not half.collect(set()).sent
        clock.now += 0.2 * lease_ttl_s
        assert half.collect(set()).sent == {"kept"}
        # It is not given back once more.
        clock.now += 2 * lease_ttl_s
        assert not half.collect(set()).sent
