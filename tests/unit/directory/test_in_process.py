"""directory: what every directory does, and what one in this process costs."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.directory import Change, ChangeKind, Entry, InProcessDirectory
from kvxfer.errors import PeerError, UsageError
from kvxfer.testing import directories
from kvxfer.testing.directories import BOUND_S, entry
from tests.waiting import until


class InProcess(directories.DirectorySubject):
    """A directory whose clock stands still until the test advances it."""

    def __init__(self, seed: int = 1) -> None:
        self.now_s = 1000.0
        self.seed = seed

    @contextmanager
    def open(self) -> Iterator[InProcessDirectory]:
        yield InProcessDirectory(clock=lambda: self.now_s)

    def pass_time(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.mark.parametrize("check", directories.CHECKS, ids=lambda check: str(check.__name__))
def test_contract(check: directories.Check, seed: int) -> None:
    check(InProcess(seed))


@pytest.mark.parametrize("how", ["entry ends", "sooner than another"])
def test_who_sleeps_is_woken_by_the_end_of_an_entry(how: str) -> None:
    """The entry ends by the clock alone, without any other call."""
    directory = InProcessDirectory()
    directory.publish(entry("a"), 0.01 if how == "entry ends" else 3600)
    watch = directory.watch_blocking("a", BOUND_S)
    assert next(watch).kind is ChangeKind.ADDED
    sleeper = Sleeper(lambda: next(watch))
    if how != "entry ends":
        sleeper.until_asleep(directory)
        directory.publish(entry("b"))  # another's
        directory.publish(entry("a"), 0.01)
    assert sleeper.found() == Change(ChangeKind.REMOVED, entry("a"))


class Sleeper:
    """A call on its own thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(call()))
        self._thread.start()

    def until_asleep(self, directory: InProcessDirectory) -> None:
        until(lambda: any(watch.waiter for watch in directory._watches), "its sleep")

    def found(self) -> Any:
        self._thread.join(BOUND_S)
        assert self._found, "it still waits"
        return self._found[0]


def test_nothing_is_left_of_those_who_came_and_went() -> None:
    subject = InProcess()
    with subject.open() as directory:
        with pytest.raises(PeerError, match="known: nobody"):
            directory.resolve_blocking("nobody", 0.001)
        watch = directory.watch_blocking()
        for number in range(1000):
            said = entry(f"agent-{number}")
            directory.publish(said, 3600)
            for _ in range(3):
                directory.publish(said, 3600 - number)  # each ends sooner than it would have
            directory.withdraw(said.name, said.incarnation)
        assert not directory._waiting
        assert not directory._held
        assert len(directory._deadlines) < 200
        (held,) = directory._watches
        assert len(held.pending) == 0
        del watch, held
        gc.collect()
        assert not directory._watches


# ---- entries --------------------------------------------------------------------------------------

PLAIN = Entry("decode-0", "tcp://[fd00::1]:7301", bytes(range(16)), {"role": "decode"})


def test_an_entry_travels() -> None:
    for said in (PLAIN, replace(PLAIN, address="", metadata={}), replace(PLAIN, name="ä" * 64)):
        assert Entry.from_bytes(said.to_bytes()) == said
        assert Entry.from_dict(said.to_dict()) == said
        assert pickle.loads(pickle.dumps(said)) == said  # noqa: S301
        assert len({said, Entry.from_bytes(said.to_bytes())}) == 1
    assert Entry.from_dict({**PLAIN.to_dict(), "kvxfer_agent": 9, "load": 0.5}) == PLAIN
    with pytest.raises(UsageError, match="of version 9 needs zone"):
        Entry.from_dict({**PLAIN.to_dict(), "kvxfer_agent": 9, "zone": "a", "needs": ["zone"]})


def test_an_entry_is_read_only() -> None:
    metadata = {"role": "decode"}
    said = replace(PLAIN, metadata=metadata)
    metadata["role"] = "prefill"
    assert said.metadata["role"] == "decode"
    with pytest.raises(TypeError):
        said.metadata["role"] = "prefill"  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "1 to 128 bytes"),
        ({"name": "ä" * 65}, "1 to 128 bytes"),
        ({"address": "10.0.0.7:7301"}, 'write "tcp://host:port"'),
        ({"address": "tcp://10.0.0.7"}, 'write "tcp://host:port"'),
        ({"address": "tcp://user@10.0.0.7:1"}, 'write "tcp://host:port"'),
        ({"address": "tcp://0.0.0.0:7301"}, "all addresses of a host"),
        ({"address": "tcp://[::]:7301"}, "all addresses of a host"),
        ({"address": "tcp://[::ffff:0.0.0.0]:7301"}, "all addresses of a host"),
        ({"incarnation": "00" * 15}, "16 bytes"),
        ({"metadata": []}, "is a list, not an object"),
        ({"metadata": {"role": 1}}, "names to texts"),
        ({"metadata": {str(n): "" for n in range(33)}}, "at most 32 items"),
        ({"metadata": {"a": "ä" * 2048}}, "4096 bytes, not 1 and 4097"),
        ({"kvxfer_agent": None}, "has no version"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        Entry.from_dict({**PLAIN.to_dict(), **changes})
    assert caught.value.code == "invalid-argument"
    assert len(str(caught.value)) < 600
