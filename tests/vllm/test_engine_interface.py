"""Checks that vLLM's classes still have what the connector needs, with the same signatures.

`tests/vllm/contracts/` has what each release promised. The tests compare the installed engine with the newest
contract that is not newer than it. They fail for changes in what the connector overrides, calls, reads or
must implement, and only report other changes.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from itertools import pairwise
from pathlib import Path

import pytest
import vllm

import kvxfer.connectors.vllm
from kvxfer.connectors.vllm.connector import KvxferConnector
from tests.engine_contract import Contract, concerns, describe, drift, misfits, names_in
from tests.vllm.engine_contract import ENGINE

CONTRACTS = ENGINE.recorded()
BASES = "KVConnectorBase_V1", "SupportsHMA"


def names_in_use() -> set[str]:
    """Returns the engine's names that the connector's sources may refer to."""
    return names_in(Path(kvxfer.connectors.vllm.__file__).parent)


def overrides(contract: Contract) -> dict[str, str]:
    """Returns the methods of its bases that the connector implements."""
    own = vars(KvxferConnector).keys() & {name for base in BASES for name in contract[base]}
    return {name: what for name, what in describe(KvxferConnector, with_private=True).items() if name in own}


def base_of(contract: Contract) -> dict[str, str]:
    return {name: what for base in BASES for name, what in contract[base].items()}


def test_the_installed_engine_is_as_it_was_written_down() -> None:
    release = max(each for each in CONTRACTS if each <= ENGINE.release_of(vllm.__version__))
    before, now = CONTRACTS[release], ENGINE.installed()
    found = drift(before, now)
    ours = concerns(found, names_in_use(), set(overrides(now)))
    for each in set(found) - set(ours):
        warnings.warn(f"vLLM {vllm.__version__}: {each}", stacklevel=1)
    assert not ours, f"since vLLM {'.'.join(map(str, release))}: " + "; ".join(map(str, ours))


@pytest.mark.parametrize("release", CONTRACTS, ids=lambda release: ".".join(map(str, release)))
def test_every_recorded_release_can_call_the_connector(release: tuple[int, ...]) -> None:
    contract = CONTRACTS[release]
    base = base_of(contract)
    given = overrides(contract)
    assert not misfits(given, {name: base[name] for name in given})
    must_be_given = {name for name, what in base.items() if what.startswith("abstract ")}
    assert not must_be_given - given.keys()


def test_the_installed_engine_can_call_the_connector() -> None:
    base = base_of(ENGINE.installed())
    given = overrides(ENGINE.installed())
    assert len(given) > 15
    assert not misfits(given, {name: base[name] for name in given})
    assert not KvxferConnector.__abstractmethods__


def test_recorded_releases_differ_in_nothing_that_is_used() -> None:
    releases = list(CONTRACTS)
    for older, newer in pairwise(releases):
        found = drift(CONTRACTS[older], CONTRACTS[newer])
        assert not concerns(found, names_in_use(), set(overrides(CONTRACTS[newer])))


# ---- the finder itself ------------------------------------------------------------------------


class Engine:
    """An interface, before."""

    def kept(self, request: object, *, urgent: bool = False) -> None: ...

    def renamed(self, request: object, num_tokens: int) -> None: ...

    def shortened(self, request: object, num_tokens: int) -> None: ...

    def lengthened(self, request: object) -> None: ...

    def stricter(self, request: object, num_tokens: int = 0) -> None: ...

    def gone(self) -> None: ...

    def method(self, request: object) -> None: ...

    @abstractmethod
    def given(self) -> None: ...


class LaterEngine:
    """The same, after."""

    def kept(self, request: object, *, urgent: bool = False) -> None: ...

    def renamed(self, request: object, token_count: int) -> None: ...

    def shortened(self, request: object) -> None: ...

    def lengthened(self, request: object, priority: int = 0) -> None: ...

    def stricter(self, request: object, num_tokens: int) -> None: ...

    @classmethod
    def method(cls, request: object) -> None: ...

    @abstractmethod
    def given(self) -> None: ...

    @abstractmethod
    def new(self) -> None: ...

    def harmless(self) -> None: ...


ALL_DRIFT = {
    "Engine.renamed calls its parameter num_tokens token_count now",
    "Engine.shortened has no parameter num_tokens any more",
    "Engine.lengthened has a new parameter priority, which may be left out",
    "Engine.stricter needs its parameter num_tokens, which could be left out",
    "Engine.gone was removed (it was method (self))",
    "Engine.method is classmethod now, it was method",
    "Engine.new is new: abstract method (self)",
    "Engine.harmless is new: method (self)",
}


def test_drift_is_found_and_said_in_words() -> None:
    before, after = {"Engine": describe(Engine)}, {"Engine": describe(LaterEngine)}
    assert {str(each) for each in drift(before, after)} == ALL_DRIFT
    assert not drift(before, before)
    assert [str(each) for each in drift(before, {})] == ["Engine is gone"]


def test_only_what_is_used_or_must_be_given_concerns() -> None:
    found = drift({"Engine": describe(Engine)}, {"Engine": describe(LaterEngine)})
    ours = concerns(found, names={"kept", "renamed", "harmless"}, given={"given"})
    assert {each.member for each in ours} == {"renamed", "new"}
    assert not concerns(found, names={"kept"}, given={"given", "new"})


def test_a_field_that_must_be_given_concerns_who_makes_the_class() -> None:
    before: Contract = {"Results": {"sent": "field ="}}
    found = drift(before, {"Results": {"sent": "field =", "lost": "field", "late": "field ="}})
    assert {each.member for each in found} == {"lost", "late"}
    assert [each.member for each in concerns(found, names={"Results"}, given=set())] == ["lost"]
    assert not concerns(found, names={"sent"}, given=set())
    stricter = drift(before, {"Results": {"sent": "field"}})
    assert [each.words for each in stricter] == ["needs its parameter value, which could be left out"]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("method (self, request)", "method (self, request)", ""),
        ("method (self, request, more=)", "method (self, request)", ""),
        ("method (self, request, **kwargs)", "abstract method (self, request, **kwargs)", ""),
        ("method (self, a)", "method (self, b)", "takes (self, a), the engine gives (self, b)"),
        ("method (self)", "method (self, b)", "takes (self), the engine gives (self, b)"),
        ("method (self, b, c)", "method (self, b)", "needs c, which the engine does not give"),
        ("method (self, b)", "method (self, b=)", "needs b, which the engine may leave out"),
        ("method (self)", "classmethod (self)", "is a method, the engine's a classmethod"),
    ],
)
def test_overrides_that_do_not_fit_are_found(ours: str, theirs: str, said: str) -> None:
    assert misfits({"verb": ours}, {"verb": theirs}) == ([f"verb {said}"] if said else [])
