"""Texts and names that callers pass: one rule everywhere, and no value ends the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer import Agent, AgentOptions, Tls
from kvxfer.directory import Entry, InProcessDirectory
from kvxfer.errors import UsageError

# A lone surrogate is in no UTF-8, so no frame, no JSON and no log could carry it.
SURROGATES = ["\ud800", "a\udcffb"]
LONGEST = "é" * 64  # 128 bytes
NO_NAMES: list[Any] = [*SURROGATES, "", "x" * 129, LONGEST + "x"]


class Unspeakable:
    """An argument of a wrong kind whose repr is no UTF-8, or not even a text."""

    def __init__(self, spoken: Any) -> None:
        self.spoken = spoken

    def __repr__(self) -> str:
        if isinstance(self.spoken, Exception):
            raise self.spoken
        return self.spoken  # type: ignore[no-any-return]


SPOKEN = ["\ud800" * 60, 7, ValueError("no"), "é" * 99]
UNSPEAKABLE = [Unspeakable(spoken) for spoken in SPOKEN]


class World:
    """Two agents that are connected, and a region of each."""

    def __init__(self) -> None:
        self.near = Agent("near", directory=InProcessDirectory())
        self.far = Agent("far")
        self.region = self.near.register("kv", np.zeros((4, 64), np.uint8))
        self.far.register("kv", np.zeros((4, 64), np.uint8))
        self.peer = self.near.connect_blocking(self.far.address)
        self.remote = self.peer.region_blocking("kv")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.near.close()
    made.far.close()


Call = Callable[[World, Any], object]
NAMES: dict[str, Call] = {
    "agent": lambda _, name: Agent(name),
    "entry": lambda _, name: Entry(name, "", bytes(16)),
    "region": lambda world, name: world.near.register(name, np.zeros((4, 64), np.uint8)),
    "accept": lambda world, name: world.near.accept_blocking(name, 0.0),
    "connect": lambda world, name: world.near.connect_blocking(name, 0.1),
    "holder": lambda world, name: world.region.grant(name, [1]),
    "limit": lambda world, name: world.near.limit(name, least_priority=1),
}
TEXTS: dict[str, Call] = {
    "metadata": lambda _, text: Entry("a", "", bytes(16), {"role": text}),
    "metadata's name": lambda _, text: Entry("a", "", bytes(16), {text: "x"}),
    "listen": lambda _, text: Agent("x", listen=text),
    "advertise": lambda _, text: Agent("x", advertise=text),
    "address": lambda world, text: world.near.connect_blocking(f"tcp://{text}:1", 0.1),
    "transports": lambda _, text: Agent("x", AgentOptions(transports=("tcp", text))),
    "require": lambda _, text: Agent("x", AgentOptions(require=(text,))),
    "option": lambda _, text: Agent("x", AgentOptions(transport_options={"ucx.config": text})),
    "option's name": lambda _, text: Agent("x", AgentOptions(transport_options={text: 1})),
    "faults": lambda _, text: Agent("x", AgentOptions(faults=text)),
    "certificate": lambda _, text: Agent("x", AgentOptions(tls=Tls(text, text, text))),
    "allow": lambda _, text: Agent("x", AgentOptions(tls=Tls("/a", "/b", "/c", allow=(text,)))),
    "switch": lambda world, text: world.near.switch_rails(text, on=False),
    "context": lambda world, text: world.near.write(world.region, world.remote, [1], [2], context=text),
    "pool": lambda _, text: kvxfer.Pool(1, 4096, name=text),
}
NUMBERS: dict[str, Call] = {
    "seconds": lambda world, value: world.near.close(value),
    "blocks": lambda world, value: world.near.write(world.region, world.remote, value, [2]),
    "priority": lambda world, value: world.near.write(world.region, world.remote, [1], [2], priority=value),
    "context": lambda world, value: world.near.write(world.region, world.remote, [1], [2], context=value),
    "notify": lambda world, value: world.near.write(world.region, world.remote, [1], [2], notify=value),
    "option": lambda _, value: Agent("x", AgentOptions(transport_options={"tcp.rails": value})),
    "count": lambda _, value: Agent("x", AgentOptions(copy_threads=value)),
    "name": lambda _, value: Agent(value),
    "target": lambda world, value: world.near.connect_blocking(value),
    "message": lambda world, value: world.peer.send(value),
}


def refused(call: Call, world: World, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        call(world, value)
    assert caught.value.code == "invalid-argument"
    str(caught.value).encode()  # the sentence can be logged


@pytest.mark.parametrize("place", NAMES)
def test_a_name_that_a_frame_cannot_carry_is_refused_everywhere(place: str, world: World) -> None:
    for name in NO_NAMES:
        refused(NAMES[place], world, name)


@pytest.mark.parametrize("place", TEXTS)
def test_a_text_without_utf8_is_refused_in_words(place: str, world: World) -> None:
    for text in SURROGATES:
        refused(TEXTS[place], world, text)


@pytest.mark.parametrize("place", NUMBERS)
def test_an_argument_that_cannot_be_shown_is_refused_like_any_other(place: str, world: World) -> None:
    for value in UNSPEAKABLE:
        refused(NUMBERS[place], world, value)


def test_the_longest_names_go_to_the_other_end_and_back() -> None:
    with Agent(LONGEST) as near, Agent(LONGEST[::-1]) as far:
        region = near.register(LONGEST, np.ones((4, 64), np.uint8))
        far.limit(LONGEST, least_priority=1)
        region.grant(far.name, [1])
        peer = far.connect_blocking(near.address)
        assert peer.name == LONGEST
        assert peer.region_blocking(LONGEST).name == LONGEST
        assert near.accept_blocking(far.name).name == far.name
