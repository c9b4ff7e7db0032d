"""Workers beside peers that send anything, and orders that cannot be carried out: the engine steps on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import kvxfer
from kvxfer.connectors.common import ending
from kvxfer.connectors.common.notes import Heartbeat, Leaving, Receipt, RegistrationPart, digest_of
from kvxfer.connectors.common.prompt_lookup import PromptLookup, PromptRegister
from kvxfer.connectors.common.push_registration import Registration, Share
from kvxfer.connectors.common.step import Grant, Step
from tests.connectors.workers import NUM_LAYERS, Pushed, Worker, workers
from tests.waiting import until

KEYS = [bytes([at]) * 16 for at in range(3)]


@pytest.fixture
def prefill() -> Iterator[Worker]:
    with workers("prefill") as (worker,):
        yield worker


def test_peers_that_leave_at_once_end_no_engine(prefill: Worker) -> None:
    note = Leaving(KEYS[0], 0, 1).encode()
    for at in range(80):
        with kvxfer.Agent(f"decode/{at}") as agent:
            agent.connect_blocking(prefill.rank.address).send(note)
    with kvxfer.Agent("decode/last") as agent:
        agent.connect_blocking(prefill.rank.address).send(Leaving(KEYS[1], 0, 1).encode())
        until(lambda: bool(prefill.half.collect(set())) and has_come(prefill, KEYS[1]), "the last note")


def has_come(prefill: Worker, key: bytes) -> bool:
    assert prefill.half._pushes is not None
    return key in prefill.half._pushes._registrations._keys


@pytest.mark.parametrize("seed", range(20), indirect=True)
def test_notes_of_any_content_end_no_engine(prefill: Worker, seed: int) -> None:
    random_ = random.Random(seed)
    pushed = Pushed("pushed", (1, 2, 3), (4, 5, 6), 90, KEYS[0])
    prefill.half.step(Step(grants=[Grant("granted", (kvxfer.LeaseToken.draw(),), ((4, 5),))]))
    with kvxfer.Agent("decode/0.0") as agent:
        peer = agent.connect_blocking(prefill.rank.address)
        for stop in (32, 64, 90):
            for _ in range(100):
                try:
                    peer.send(drawn(random_))
                except kvxfer.ExhaustedError:
                    break
            prefill.half.before_forward(pushed.chunk(stop - 32 if stop < 90 else 64, stop))
            prefill.half.after_forward(whole=random_.random() < 0.8)
            prefill.half.collect({"pushed", "granted"})
        prefill.half.before_forward(Step(withdrawn=["pushed", "granted"]))


def drawn(random_: random.Random) -> bytes:
    """Returns a note with some of its fields, or of its bytes, replaced."""
    key, content = random_.choice(KEYS), registration(random_)

    def number() -> int:
        return random_.choice([0, 1, 2, 255, 65535])

    payload = random_.choice(
        [
            Receipt(digest_of("granted"), random_.randbytes(16), number(), number()).encode(),
            Heartbeat(
                random_.choice([key, digest_of("granted")]), bytes(16), random_.random() < 0.5
            ).encode(),
            Leaving(key, number(), number(), random_.random() < 0.5).encode(),
            *(part.encode() for part in RegistrationPart.split(key, number(), number(), content)),
        ]
    )
    if random_.random() < 0.2:
        at = random_.randrange(len(payload))
        payload = payload[:at] + random_.randbytes(random_.randrange(3)) + payload[at + 1 :]
    return payload


def registration(random_: random.Random) -> bytes:
    document: dict[str, Any] = json.loads(
        Registration(
            tag="ab" * 16,
            prompt="digest",
            first_token=0,
            num_tokens=90,
            tables=((4, 5, 6),),
            block_sizes=(32,),
            pages_per_block=(1,),
            shares=(Share(group=0, layers=(0, NUM_LAYERS), heads=(0, 4)),),
        ).model_dump_json()
    )
    junk: list[Any]
    for _ in range(random_.randrange(3)):
        junk = [None, True, -1, 0, 1, 2**31, 2**63, 2**70, 0.5, "", "x", "\ud800", [], [[1, -1]], [[]], {}]
        document[random_.choice(list(document))] = random_.choice(junk)
    return json.dumps(document).encode()


@pytest.mark.parametrize("why", ["its engine sleeps", "the blocks do not exist"])
def test_a_grant_that_fails_fails_its_request_alone(prefill: Worker, why: str) -> None:
    blocks = (1, 2) if "sleeps" in why else (1, 1 << 20)
    if "sleeps" in why:
        prefill.half.sleep()
    prefill.half.step(Step(grants=[Grant("a", (kvxfer.LeaseToken.draw(),), (blocks,))]))
    assert prefill.half.collect(set()).sent == set()
    assert prefill.half.collect({"a"}).sent == {"a"}


def test_mail_that_cannot_be_taken_ends_neither_engine_nor_thread(
    prefill: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = kvxfer.Agent.take_message, kvxfer.Agent.message_blocking
    failures = iter([KeyError("identity"), KeyError("identity"), OSError(24, "too many open files")])

    def failing(method: Any) -> Any:
        def take(agent: kvxfer.Agent, *limits: float) -> Any:
            if (error := next(failures, None)) is not None:
                raise error
            return method(agent, *limits)

        return take

    for method in taken:
        monkeypatch.setattr(kvxfer.Agent, method.__name__, failing(method))
    for _ in range(2):
        prefill.half.collect(set())
    with ExitStack() as running:
        register = PromptRegister(kvxfer.Agent("prefill/prompts"))
        running.callback(register.close)
        lookup = PromptLookup(kvxfer.Agent("decode/prompts"), [register.address], 15.0)
        running.callback(lookup.close)
        register.coming("request", KEYS[0])
        register.ready("request", {"a": 1})
        assert lookup.ask(KEYS[0]) == {"a": 1}
    assert sum("could not be" in line for line in caplog.messages) == 3


class Endless:
    """Work of a GPU that hangs."""

    def wait(self, timeout_s: float | None) -> None:
        assert timeout_s is not None, "nothing bounds the wait"
        raise TimeoutError

    def revoke_blocking(self, timeout_s: float | None = None) -> None:
        self.wait(timeout_s)


def test_work_that_never_ends_ends_the_engine_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_GPU_S", 0.01)
    endless: Any = Endless()
    with pytest.raises(kvxfer.AgentError, match="Restart this engine"):
        ending.quiesce(endless, (), 0.0)
    with pytest.raises(kvxfer.AgentError, match="Restart this engine"):
        ending.revoke([endless])
    assert not ending.has_ended(endless)
