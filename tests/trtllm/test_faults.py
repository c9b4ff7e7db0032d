"""Engines that die, stop, restart or are impostors: others continue to serve, nothing stays held."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvxfer
from kvxfer.connectors.common.handover import prompt_digest
from kvxfer.connectors.common.prompt_lookup import _FOUND, _HEAD
from kvxfer.connectors.trtllm.llm_request import ExecutorRequest
from tests.trtllm.cache import Options
from tests.trtllm.engines import PATIENCE, Remote, expected, free_ports, local, pair, prompt_of, require
from tests.trtllm.fake_engine import LlmRequest

# Only sockets: the memory of a stopped process could still be read, but its sockets are silent.
HASTY: dict[str, Any] = {
    "transports": ["tcp"],
    "connect_timeout_s": 3.0,
    "silent_timeout_s": 2.0,
    "lookup_timeout_s": 1.0,
    "load_timeout_s": 4.0,
    "lease_ttl_s": 3.0,
}

# Engines with two ranks run every day, those with one rank only at night.
ONE_OR_TWO = [pytest.param(1, marks=pytest.mark.slow), 2]


def killed(prefill: Remote) -> None:
    prefill.kill()


def is_stopped(prefill: Remote) -> None:
    prefill.signal(signal.SIGSTOP)


def replaced(prefill: Remote) -> Remote:
    """Replaces it with another engine that has computed nothing."""
    prefill.kill()
    return Remote(prefill.options).wait_started()


def gave_up(prefill: Remote) -> None:
    """Waits until prefill has given back its kept blocks because their lease ended."""
    prefill.wait_empty()


FAULTS: dict[str, Callable[[Remote], Remote | None]] = {
    "killed": killed,
    "stopped": is_stopped,
    "replaced": replaced,
    "lease over": gave_up,
}


@pytest.mark.parametrize(
    ("release", "tp_size", "fault"),
    [
        *(("older", 1, fault) for fault in FAULTS),
        ("newer", 2, "killed"),
        *(pytest.param("newer", 2, fault, marks=pytest.mark.slow) for fault in FAULTS if fault != "killed"),
    ],
)
def test_a_load_that_was_promised_and_fails_is_computed_on_every_rank(
    release: str, tp_size: int, fault: str, seed: int
) -> None:
    prompt, other = prompt_of(50, seed), prompt_of(30, seed + 1)
    with pair(HASTY, HASTY, release=release, tp_size=tp_size) as (prefill, decode):
        serving: list[Remote] = []
        prefill.serve(0, prompt)
        decode.before_load = lambda: serving.append(FAULTS[fault](prefill) or prefill)
        # The cache was promised; the engine computes the same tokens itself.
        require(decode.serve(0, prompt, 4), prompt, 4, 49)
        assert all(sum(each["pull"].values()) == 1 for each in decode.counts("failures"))
        # It continues to serve, regardless of prefill.
        assert decode.serve(1, other, 2).tokens == expected(other, 2)
        if fault == "killed":
            decode.wait_empty()
            return
        if fault == "stopped":
            prefill.signal(signal.SIGCONT)
        # The next prompt is fetched as usual, once decode has dialled again.
        for at in range(2, 40):
            again = prompt_of(20, seed + at)
            serving[0].serve(at, again)
            answer = decode.serve(at, again, 2)
            assert answer.tokens == expected(again, 2)
            if answer.num_matched:
                break
        assert answer.num_matched == 19
        serving[0].wait_empty()
        decode.wait_empty()
        if fault == "replaced":
            serving[0].close()


@pytest.mark.parametrize("tp_size", ONE_OR_TWO)
def test_an_engine_that_is_to_stop_says_why_on_every_rank(tp_size: int, seed: int) -> None:
    prompt = prompt_of(20, seed)
    with pair(HASTY, {**HASTY, "failed_loads": "stop"}, tp_size=tp_size) as (prefill, decode):
        prefill.serve(0, prompt)
        decode.before_load = prefill.kill
        with pytest.raises(ExceptionGroup) as raised:
            decode.serve(0, prompt)
        said = [str(each) for each in raised.value.exceptions]
        assert len(said) == tp_size
        assert all("was promised but not loaded" in each for each in said)


def test_prefill_that_dies_or_stops_before_it_is_asked_costs_a_computation(seed: int) -> None:
    with pair(HASTY, HASTY) as (prefill, decode):
        warm = prompt_of(9, seed)
        prefill.serve(0, warm)
        require(decode.serve(0, warm), warm, 1, 8)
        for at, fault in ((1, is_stopped), (2, killed)):
            prompt = prompt_of(20, seed + at)
            if at == 1:
                prefill.serve(at, prompt)
            fault(prefill)
            require(decode.serve(at, prompt, 3), prompt, 3, 0)
        decode.wait_empty()


@pytest.mark.parametrize("has_kept", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_process_ends_though_nobody_tells_its_connector(has_kept: bool, seed: int) -> None:
    prompt = prompt_of(20, seed)
    with pair(HASTY, HASTY) as (prefill, decode):
        asks = Remote(decode.options).wait_started()
        prefill.serve(0, prompt)
        if not has_kept:
            require(asks.serve(0, prompt), prompt, 1, 19)
        for each in (prefill, asks):
            each.close(leaves_open=True)


# ---- requests that end, or begin anew ---------------------------------------------------------


@pytest.mark.parametrize("tp_size", ONE_OR_TWO)
def test_blocks_of_an_aborted_load_are_given_back_when_nothing_can_land(tp_size: int, seed: int) -> None:
    prompts = [prompt_of(60, seed + at) for at in range(3)]
    with pair(HASTY, HASTY, tp_size=tp_size, num_blocks=20) as (prefill, decode):
        prefill.serve(0, prompts[0])
        decode.submit(0, prompts[0], does="aborted at once")
        # Nothing else fits beside it: the next request gets its blocks.
        decode.submit(1, prompts[1], 3)
        answer = decode.answer(0)
        assert (answer.what, answer.num_matched) == ("cancelled", 59)
        for at in (1, 2):
            if at == 2:
                decode.submit(2, prompts[2], 3)
            assert decode.answer(at).tokens == expected(prompts[at], 3)
        prefill.wait_empty()
        decode.wait_empty()


@pytest.mark.parametrize(
    ("does", "what"),
    [
        ("aborted", "cancelled"),
        ("aborted at once", "cancelled"),
        ("failed", "failed"),
        ("preempted", "done"),
        ("reset", "done"),
    ],
)
def test_what_prefill_has_not_computed_whole_is_never_told(does: str, what: str, seed: int) -> None:
    prompt, warm = prompt_of(200, seed), prompt_of(9, seed)
    with pair(HASTY, HASTY, release="newer", chunk_tokens=4) as (prefill, decode):
        prefill.serve(9, warm)
        decode.serve(9, warm)
        answer = prefill.serve(0, prompt, does=does)
        assert (answer.what, answer.tokens) == (what, expected(prompt, 1) if what == "done" else [])
        require(decode.serve(0, prompt, 2), prompt, 2, 199 if what == "done" else 0)
        prefill.wait_empty()
        decode.wait_empty()


# ---- strangers --------------------------------------------------------------------------------


def test_who_does_not_know_the_secret_is_told_nothing_and_asks_in_vain(tmp_path: Path, seed: int) -> None:
    secrets = [tmp_path / name for name in ("ours", "theirs")]
    for each in secrets:
        each.write_text(f"a secret for tests only: {each.name}")
    ours, theirs = ({**HASTY, "secret_file": str(each)} for each in secrets)
    prompt = prompt_of(20, seed)
    with pair(ours, ours) as (prefill, decode):
        stranger = Remote(Options({**decode.options.settings, **theirs})).wait_started()
        prefill.serve(0, prompt)
        require(stranger.serve(0, prompt, 2), prompt, 2, 0)
        stranger.wait_empty()
        stranger.close()
        require(decode.serve(0, prompt, 2), prompt, 2, 19)
        prefill.wait_empty()
        decode.wait_empty()


def test_engines_of_two_models_exchange_nothing(seed: int) -> None:
    prompt = prompt_of(20, seed)
    with pair({**HASTY, "lease_ttl_s": 1.0}, {**HASTY, "model": "another"}) as (prefill, decode):
        prefill.serve(0, prompt)
        require(decode.serve(0, prompt, 2), prompt, 2, 0)
        decode.wait_empty()
        prefill.wait_empty()


RANK = kvxfer.directory.Entry("nobody/0.1", "tcp://127.0.0.1:1", bytes(16)).to_dict()
PROMPT = list(range(20))
DIGEST = prompt_digest(ExecutorRequest(LlmRequest(0, PROMPT, 1, None)), len(PROMPT))


def params(**changes: Any) -> dict[str, Any]:
    """Returns prefill's parameters for a prompt of 20 tokens, with changes."""
    own: dict[str, Any] = {
        "version": 1,
        "ranks": [RANK],
        "leases": [str(kvxfer.LeaseToken.draw())],
        "block_sizes": [4],
        "pages_per_block": [1],
        "num_tokens": 20,
        "prompt": DIGEST,
        "keep_s": 1.0,
        "batch": None,
    }
    told = {"do_remote_prefill": True, "remote_request_id": "0", "remote_block_ids": [[1, 2, 3, 4, 5]]}
    return {**told, "kvxfer": {**own, **changes.pop("own", {})}, **changes}


HOSTILE: dict[str, bytes] = {
    "no JSON": b"\xff{",
    "no object": b"[1]",
    "another prompt": json.dumps(params(own={"prompt": "0" * 32})).encode(),
    "a foreign host": json.dumps(params(own={"ranks": [{**RANK, "address": "tcp://8.8.8.8:1"}]})).encode(),
    "absurd blocks": json.dumps(params(remote_block_ids=[[2**40]])).encode(),
    "too many blocks": json.dumps(params(remote_block_ids=[list(range(5000))])).encode(),
    "depth": b"[" * 40_000,
    "nobody": json.dumps(params()).encode(),
}


@contextmanager
def answering(port: int, answers: list[bytes]) -> Iterator[None]:
    """Answers enquiries for prompts with one given answer after the other."""
    with kvxfer.Agent("hostile/0.1", kvxfer.AgentOptions(listen=f"tcp://127.0.0.1:{port}")) as agent:

        def serve() -> None:
            for answer in answers:
                try:
                    message = agent.message_blocking()
                    _, number, _, _ = _HEAD.unpack_from(message.payload)
                    message.peer.send(_HEAD.pack(_FOUND, number, 0, 1) + answer)
                except kvxfer.KvxferError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield
    thread.join()


def test_hostile_parameters_cost_their_request_a_computation() -> None:
    port = free_ports(1)
    asks = {**PATIENCE, "role": "decode", "prefills": [f"tcp://127.0.0.1:{port}"]}
    with answering(port, list(HOSTILE.values())), local(Options(asks, "newer")) as decode:
        for at, name in enumerate(HOSTILE):
            # Readable parameters that name no living engine are detected by the dial.
            require(decode.serve(at, PROMPT, 2), PROMPT, 2, 19 if name == "nobody" else 0)
        decode.wait_empty()


# ---- many requests ----------------------------------------------------------------------------


def many_requests(num_requests: int, seed: int, num_blocks: int, **options: Any) -> None:
    """Sends requests, most of which are aborted at either end at some time, and checks what is left."""
    random_ = random.Random(seed)
    # A failed load ends an engine with layer groups, even if only the machine stalled for a second.
    is_layout = options["kind"] == "layout"
    hasty = {
        **HASTY,
        "silent_timeout_s": 20.0,
        "lookup_timeout_s": 10.0,
        "load_timeout_s": 20.0,
        "lease_ttl_s": 6.0 if is_layout else 1.0,
        "claim_within_s": 0.2,
    }
    with pair(hasty, hasty, num_blocks=num_blocks, chunk_tokens=16, **options) as (prefill, decode):
        prompts = {at: prompt_of(random_.randrange(2, 60), seed + at) for at in range(num_requests)}
        at_decode: dict[int, int] = {}
        for at, prompt in prompts.items():
            prefill.submit(at, prompt, random_.choice([1, 1, 1, 3]), does=drawn(random_, 0.3))
            if random_.random() < 0.5:
                decode.until(lambda at=at: prefill.ask("outcome", at), "prefill's answer")  # type: ignore[misc]
            if random_.random() < 0.8:
                at_decode[at] = random_.randrange(1, 6)
                decode.submit(at, prompt, at_decode[at], does=drawn(random_, 0.4))
        answers = {at: decode.answer(at) for at in at_decode}
        for at, answer in answers.items():
            assert answer.what == "cancelled" or answer.tokens == expected(prompts[at], at_decode[at])
            prefill.answer(at)
        assert sum(bool(each.num_matched) for each in answers.values()) > num_requests / 10
        prefill.wait_empty()
        decode.wait_empty()
        # All blocks were given back: one prompt can use the whole cache. (The layer group with a window has
        # half of the blocks.)
        prompt = prompt_of((2 if is_layout else 4) * num_blocks - 14, seed)
        prefill.serve(num_requests, prompt)
        require(decode.serve(num_requests, prompt, 3), prompt, 3, len(prompt) - 1)
        prefill.wait_empty()
        decode.wait_empty()


def drawn(random_: random.Random, share: float) -> str:
    """Returns a sequence: a share of requests is aborted at some time."""
    return random_.choice(["aborted", "aborted at once"]) if random_.random() < share else "served"


@pytest.mark.parametrize(
    ("release", "kind", "tp_size", "num_blocks"),
    [
        ("older", "tensor", 2, 96),
        # So few that prompts without a decode keep others waiting.
        pytest.param("older", "tensor", 1, 32, marks=pytest.mark.slow),
        pytest.param("newer", "latent", 2, 48, marks=pytest.mark.slow),
        pytest.param("newer", "layout", 1, 96, marks=pytest.mark.slow),
        pytest.param("newer", "layout", 2, 96, marks=pytest.mark.slow),
    ],
)
def test_200_requests_with_random_aborts_leave_nothing(
    release: str, kind: str, tp_size: int, num_blocks: int, seed: int
) -> None:
    many_requests(200, seed, num_blocks, release=release, kind=kind, tp_size=tp_size)
