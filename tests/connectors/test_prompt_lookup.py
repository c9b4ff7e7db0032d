"""Prompts that engines ask each other for, over real agents."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvxfer
from kvxfer.connectors.common.prompt_lookup import _ASK, _HEAD, _QUESTION, PromptLookup, PromptRegister
from tests.waiting import until

KEY, OTHER = bytes(range(16)), bytes(16)
PATIENCE_S = 20.0
_numbers = itertools.count()


@pytest.fixture
def register() -> Iterator[PromptRegister]:
    made = PromptRegister(kvxfer.Agent("prefill/prompts"))
    yield made
    made.close()


@pytest.fixture
def lookup(register: PromptRegister) -> Iterator[PromptLookup]:
    made = lookup_of(register.address)
    yield made
    made.close()


def lookup_of(*addresses: str, timeout_s: float = PATIENCE_S) -> PromptLookup:
    options = kvxfer.AgentOptions(listen="")
    return PromptLookup(kvxfer.Agent(f"decode/lookup.{next(_numbers)}", options), addresses, timeout_s)


def keep(register: PromptRegister, request_id: str, key: bytes = KEY) -> None:
    register.coming(request_id, key)
    register.ready(request_id, {"request": request_id})


def test_each_prompt_is_told_once_and_the_oldest_first(
    register: PromptRegister, lookup: PromptLookup
) -> None:
    for name in ("a", "b"):
        keep(register, name)
    assert [lookup.ask(KEY) for _ in range(3)] == [{"request": "a"}, {"request": "b"}, None]
    assert lookup.ask(OTHER) is None
    register.ended("a")
    register.ended("b")
    assert len(register) == 0
    keep(register, "c")
    register.ended("c")
    assert lookup.ask(KEY) is None


@pytest.mark.parametrize("becomes_ready", [True, False])
def test_who_asks_while_a_prompt_is_computed_waits_for_its_end(
    register: PromptRegister, lookup: PromptLookup, becomes_ready: bool
) -> None:
    register.coming("a", KEY)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(lookup.ask, KEY)
        until(lambda: register._num_waiting == 1, "an enquiry that waits")
        if becomes_ready:
            register.ready("a", {"request": "a"})
        else:
            register.ended("a")
        assert asked.result() == ({"request": "a"} if becomes_ready else None)
    assert register._num_waiting == 0
    assert not register._waiting


def test_parameters_longer_than_a_message_arrive_whole(
    register: PromptRegister, lookup: PromptLookup
) -> None:
    params = {"blocks": list(range(100_000))}
    register.coming("a", KEY)
    register.ready("a", params)
    assert lookup.ask(KEY) == params


def test_what_is_told_too_late_is_given_back(register: PromptRegister) -> None:
    register.coming("a", KEY)
    hasty, patient = lookup_of(register.address, timeout_s=0.05), lookup_of(register.address)
    try:
        source = hasty._sources[0]
        until(lambda: source.peer is not None, "a session")
        assert hasty.ask(KEY) is None  # and is not asked again for a moment
        # As if it had been slow on its way.
        with register._lock:
            for waiting in register._waiting.values():
                enquiry = waiting.popleft()
                register._num_waiting -= 1
            register._listed["a"].params = b"{}"
            register._tell(enquiry, register._listed["a"])
        assert register._listed["a"].told is not None

        def is_free() -> bool:
            hasty.drain()
            return register._listed["a"].told is None

        until(is_free, "what was told is free again")
        assert patient.ask(KEY) == {}
    finally:
        hasty.close()
        patient.close()


def test_engines_are_asked_in_their_order_and_lost_ones_are_left_out(register: PromptRegister) -> None:
    with kvxfer.Agent("silent/prompts") as silent:
        lookup = lookup_of("tcp://127.0.0.1:1", silent.entry.address, register.address, timeout_s=1.0)
        try:
            until(lambda: lookup._sources[2].peer is not None, "a session")
            for name in ("a", "b"):
                keep(register, name)
            assert [lookup.ask(KEY) for _ in range(2)] == [{"request": "a"}, {"request": "b"}]
        finally:
            lookup.close()


def test_a_register_that_was_replaced_is_dialled_again(register: PromptRegister) -> None:
    first = PromptRegister(kvxfer.Agent("prefill/first"))
    address = first.address
    lookup = lookup_of(address)
    try:
        keep(first, "a")
        assert lookup.ask(KEY) == {"request": "a"}
        first.close()
        until(lambda: lookup._sources[0].peer is None, "word of the end")
        second = PromptRegister(kvxfer.Agent("prefill/second", listen=address))
        try:
            keep(second, "b")
            assert lookup.ask(KEY) == {"request": "b"}
        finally:
            second.close()
    finally:
        lookup.close()


def test_absurd_enquiries_cost_nobody_anything(register: PromptRegister, lookup: PromptLookup) -> None:
    question = _QUESTION.pack(KEY, 1.0)
    absurd = [
        b"",
        b"\x01",
        _HEAD.pack(_ASK, 1, 0, 1),
        _HEAD.pack(_ASK, 1, 0, 1) + question + b"x",
        _HEAD.pack(_ASK, 1, 0, 1) + _QUESTION.pack(KEY, float("nan")),
        _HEAD.pack(_ASK, 1, 0, 1) + _QUESTION.pack(KEY, 1e9),
        _HEAD.pack(99, 1, 0, 1) + question,
        _HEAD.pack(4, 77, 0, 1),
    ]
    with kvxfer.Agent("absurd") as agent:
        peer = agent.connect_blocking(register.address)
        for payload in absurd:
            peer.send(payload)
        # A thousand enquiries wait, which is the bound: the next one is answered with "none" at once.
        register.coming("a", KEY)
        for number in range(1100):
            try:
                peer.send(_HEAD.pack(_ASK, number, 0, 1) + _QUESTION.pack(KEY, 30.0))
            except kvxfer.ExhaustedError:
                break
        until(lambda: register._num_waiting > 100, "enquiries that wait")
        assert register._num_waiting <= 1024
    register.ended("a")
    keep(register, "b", OTHER)
    assert lookup.ask(OTHER) == {"request": "b"}


def test_many_threads_list_and_one_answers(register: PromptRegister, lookup: PromptLookup) -> None:
    def churn(at: int) -> None:
        for turn in range(100):
            name = f"{at}.{turn}"
            keep(register, name, struct.pack("<16s", name.encode()))
            if turn % 2:
                register.ended(name)

    threads = [threading.Thread(target=churn, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in range(4):
        for turn in range(0, 100, 25):
            name = f"{at}.{turn}"
            told = lookup.ask(struct.pack("<16s", name.encode()))
            assert told == (None if turn % 2 else {"request": name})
