"""Checks that every directory must pass, in process or remote.

Every check takes a `DirectorySubject` and raises AssertionError. ``CHECKS`` lists all of them::

    class Etcd(directories.DirectorySubject):
        ...

    @pytest.mark.parametrize("check", directories.CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(Etcd())
"""

from __future__ import annotations

import asyncio
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

from kvxfer.directory import Change, ChangeKind, Directory, Entry
from kvxfer.errors import PeerError

# Everything happens long before this; reaching it means a hang.
BOUND_S: Final = 60.0
# How long to wait for something that must not happen.
SHORT_S: Final = 0.05


class DirectorySubject(ABC):
    """A directory under test.

    Attributes
    ----------
    ttl_s
        A time to live that the directory supports; it may remove the entry later.
    seed
        Seed of random choices: print it if a check fails.
    """

    ttl_s: float = 1.0
    seed: int = 1

    @abstractmethod
    def open(self) -> AbstractContextManager[Directory]:
        """Makes an empty directory."""

    @abstractmethod
    def pass_time(self, duration_s: float) -> None:
        """Returns when this time has passed on the directory's clock."""


Check = Callable[[DirectorySubject], None]


def entry(name: str, life: int = 1, **metadata: str) -> Entry:
    """Returns an entry of one incarnation of an agent."""
    return Entry(name, f"tcp://192.0.2.7:{7000 + life}", bytes([life]) * 16, metadata)


class Follower:
    """A reader's knowledge of entries; every change must be consistent with it."""

    def __init__(self) -> None:
        self.known: dict[str, Entry] = {}

    def take(self, change: Change) -> Change:
        """Applies a change."""
        name = change.entry.name
        assert (change.kind is ChangeKind.ADDED) != (name in self.known), (
            f"{change} after {self.known.get(name)}"
        )
        if change.kind is ChangeKind.REMOVED:
            del self.known[name]
        else:
            self.known[name] = change.entry
        return change

    def take_all(self, watch: Iterator[Change]) -> int:
        """Applies changes until no more come; returns their number."""
        count = 0
        try:
            while True:
                self.take(next(watch))
                count += 1
        except TimeoutError:
            return count

    def agrees_with(self, directory: Directory) -> bool:
        """Returns whether it knows the directory's present entries."""
        return self.known == {each.name: each for each in directory.list()}


def is_unknown(directory: Directory, name: str) -> bool:
    """Returns whether looking a name up fails with the right error."""
    try:
        directory.resolve_blocking(name, 0.0)
    except PeerError as error:
        assert error.code == "no-answer"
        assert name in str(error)
        return True
    return False


# ---- one entry ----------------------------------------------------------------------------------


def check_what_is_published_is_found(subject: DirectorySubject) -> None:
    """Every verb finds a published entry, with all of its fields."""
    with subject.open() as directory:
        assert directory.list() == ()
        assert is_unknown(directory, "prefill-0")
        said = entry("prefill-0", role="prefill", Modell="größer", empty="")
        assert directory.publish(said)
        assert directory.list() == (said,)
        assert directory.resolve_blocking("prefill-0", BOUND_S) == said
        assert asyncio.run(directory.resolve("prefill-0", BOUND_S)) == said
        assert next(directory.watch_blocking("", BOUND_S)) == Change(ChangeKind.ADDED, said)


def check_resolve_waits_until_it_is_published(subject: DirectorySubject) -> None:
    """`resolve` waits on a thread and on a loop, and raises if nothing is published."""
    with subject.open() as directory:
        found: list[Entry] = []
        blocked = threading.Thread(
            target=lambda: found.append(directory.resolve_blocking("prefill-0", BOUND_S))
        )
        blocked.start()

        async def both() -> Entry:
            waiting = asyncio.create_task(directory.resolve("prefill-0", BOUND_S))
            await asyncio.sleep(0)
            await asyncio.to_thread(directory.publish, entry("other"))
            assert not waiting.done()
            await asyncio.to_thread(directory.publish, entry("prefill-0"))
            return await waiting

        assert asyncio.run(both()) == entry("prefill-0")
        blocked.join(BOUND_S)
        assert found == [entry("prefill-0")]

        async def in_vain() -> None:
            try:
                await directory.resolve("nobody", SHORT_S)
            except PeerError as error:
                assert error.code == "no-answer"
            else:
                raise AssertionError("nobody was found")

        asyncio.run(in_vain())


def check_a_successor_stays(subject: DirectorySubject) -> None:
    """The predecessor of a restarted agent can neither withdraw nor replace the new entry."""
    with subject.open() as directory:
        assert directory.publish(entry("decode-0", 1))
        assert directory.publish(entry("decode-0", 2))
        directory.withdraw("decode-0", entry("decode-0", 1).incarnation)
        assert not directory.publish(entry("decode-0", 1), subject.ttl_s, replace=False)
        assert directory.list() == (entry("decode-0", 2),)
        for _ in range(2):
            directory.withdraw("decode-0", entry("decode-0", 2).incarnation)
            assert directory.list() == ()
        # The name is free, because the directory lost it or the successor has gone.
        assert directory.publish(entry("decode-0", 1), replace=False)
        assert directory.list() == (entry("decode-0", 1),)


def check_the_same_again_replaces(subject: DirectorySubject) -> None:
    """Publishing again replaces metadata and address."""
    with subject.open() as directory:
        directory.publish(entry("decode-0", role="decode"))
        for replace in (True, False):
            said = entry("decode-0", role="both", replace=str(replace))
            assert directory.publish(said, replace=replace)
            assert directory.list() == (said,)


def check_names_are_listed_by_prefix_and_in_order(subject: DirectorySubject) -> None:
    """A listing has the names with the prefix, in order, and no others."""
    names = ["prefill-10", "prefill-2", "decode-0", "prefill/a b", "prefil", "größe", "Prefill-1", "prefill"]
    with subject.open() as directory:
        for name in names:
            directory.publish(entry(name))
        for prefix in ("", "prefill", "prefill-1", "g", "x"):
            found = [each.name for each in directory.list(prefix)]
            assert found == sorted(name for name in names if name.startswith(prefix)), found


# ---- time to live -------------------------------------------------------------------------------


def check_entries_end_with_their_time(subject: DirectorySubject) -> None:
    """Entries end with their time; renewed ones, and ones without a time, stay."""
    ttl_s = subject.ttl_s
    with subject.open() as directory:
        directory.publish(entry("for-ever"))
        directory.publish(entry("dead"), ttl_s)
        directory.publish(entry("renewed"), ttl_s)
        directory.publish(entry("kept"), ttl_s)
        directory.publish(entry("kept"))
        for _ in range(4):
            subject.pass_time(ttl_s / 2)
            assert directory.publish(entry("renewed"), ttl_s, replace=False)
        until(directory, "dead is forgotten", lambda: is_unknown(directory, "dead"))
        assert [each.name for each in directory.list()] == ["for-ever", "kept", "renewed"]
        # First longer than before, then shorter.
        directory.publish(entry("renewed"), 8 * ttl_s)
        subject.pass_time(2 * ttl_s)
        assert not is_unknown(directory, "renewed")
        directory.publish(entry("renewed"), ttl_s)
        subject.pass_time(2 * ttl_s)
        until(directory, "renewed is forgotten", lambda: is_unknown(directory, "renewed"))


def check_who_watches_sees_an_entry_end(subject: DirectorySubject) -> None:
    """A watcher sees an entry end; a successor has a time of its own."""
    with subject.open() as directory:
        watch = directory.watch_blocking("", BOUND_S)
        directory.publish(entry("dead"), subject.ttl_s)
        assert next(watch).kind is ChangeKind.ADDED
        subject.pass_time(2 * subject.ttl_s)
        assert next(watch) == Change(ChangeKind.REMOVED, entry("dead"))
        directory.publish(entry("dead", 1), subject.ttl_s)
        directory.publish(entry("dead", 2))
        subject.pass_time(2 * subject.ttl_s)
        assert next(watch) == Change(ChangeKind.ADDED, entry("dead", 2))


# ---- watching -----------------------------------------------------------------------------------


def check_changes_are_told_after_what_is_there(subject: DirectorySubject) -> None:
    """A watch yields existing entries first, then each change, and no other names."""
    with subject.open() as directory:
        directory.publish(entry("prefill-0"))
        directory.publish(entry("decode-0"))
        watch = directory.watch_blocking("prefill", BOUND_S)
        directory.publish(entry("prefill-1"))
        assert {next(watch).entry.name for _ in range(2)} == {"prefill-0", "prefill-1"}
        directory.publish(entry("prefill-1"), subject.ttl_s * 1000)  # a renewal is not a change
        directory.publish(entry("decode-1"))
        directory.publish(entry("prefill-1", 2))
        assert next(watch) == Change(ChangeKind.CHANGED, entry("prefill-1", 2))
        directory.withdraw("prefill-0", entry("prefill-0").incarnation)
        assert next(watch) == Change(ChangeKind.REMOVED, entry("prefill-0"))


def check_a_reader_may_give_up_and_go_on(subject: DirectorySubject) -> None:
    """A reader may time out or be cancelled, and loses no change."""
    with subject.open() as directory:
        blocking = directory.watch_blocking("", SHORT_S)
        assert Follower().take_all(blocking) == 0
        directory.publish(entry("a"))
        assert next(blocking) == Change(ChangeKind.ADDED, entry("a"))

        async def on_a_loop() -> None:
            watch: AsyncIterator[Change] = directory.watch("", BOUND_S)
            assert (await anext(watch)).entry.name == "a"
            for number in range(8):
                waiting = asyncio.ensure_future(anext(watch))
                await asyncio.sleep(0)
                if number % 2:
                    await asyncio.to_thread(directory.publish, entry(f"b{number}"))
                waiting.cancel()
                (got,) = await asyncio.gather(waiting, return_exceptions=True)
                if number % 2:
                    change = got if isinstance(got, Change) else await anext(watch)
                    assert change == Change(ChangeKind.ADDED, entry(f"b{number}"))
            short = directory.watch("x", SHORT_S)
            for _ in range(2):
                try:
                    await anext(short)
                except TimeoutError:
                    continue
                raise AssertionError("nothing had changed")

        asyncio.run(on_a_loop())


def check_a_slow_reader_is_told_how_things_stand(subject: DirectorySubject) -> None:
    """A slow reader gets one change for each name, and ends up with the present entries."""
    print(f"seed {subject.seed}")
    rng = random.Random(subject.seed)
    with subject.open() as directory:
        watch, slow = directory.watch_blocking("", SHORT_S), Follower()
        for _ in range(8):
            for _ in range(100):
                said = entry(f"agent-{rng.randrange(5)}", rng.randrange(1, 4), n=str(rng.randrange(2)))
                if rng.random() < 0.6:
                    directory.publish(said)
                    continue
                directory.withdraw(said.name, said.incarnation)
                for there in directory.list(said.name):
                    directory.withdraw(there.name, there.incarnation)
            assert slow.take_all(watch) <= 2 * 5 + 5, "what a slow reader is told grows with what happens"
            assert slow.agrees_with(directory)


def check_many_threads_and_readers_agree(subject: DirectorySubject) -> None:
    """Agents come and go at once, also under shared names; every reader ends up with the same entries."""
    print(f"seed {subject.seed}")
    with subject.open() as directory:
        watches = [directory.watch_blocking("", SHORT_S) for _ in range(3)]
        followers = [Follower() for _ in watches]
        failures: list[BaseException] = []

        def come_and_go(number: int) -> None:
            rng = random.Random(subject.seed + number)
            try:
                for _ in range(50):
                    said = entry(f"agent-{rng.randrange(3)}", 1 + number)
                    directory.publish(said, None if rng.random() < 0.5 else 1000 * subject.ttl_s)
                    if rng.random() < 0.5:
                        directory.withdraw(said.name, said.incarnation)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        followers[0].take_all(watches[0])  # meanwhile
        for thread in threads:
            thread.join(BOUND_S)
        assert not failures, failures
        for watch, follower in zip(watches, followers, strict=True):
            follower.take_all(watch)
            assert follower.agrees_with(directory)


def until(directory: Directory, what: str, is_so: Callable[[], bool]) -> None:
    """Waits until `is_so`; a remote directory may remove entries late."""
    watch = directory.watch_blocking("", BOUND_S)
    while not is_so():
        try:
            next(watch)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {BOUND_S:g} s") from None


CHECKS: Final[tuple[Check, ...]] = (
    check_what_is_published_is_found,
    check_resolve_waits_until_it_is_published,
    check_a_successor_stays,
    check_the_same_again_replaces,
    check_names_are_listed_by_prefix_and_in_order,
    check_entries_end_with_their_time,
    check_who_watches_sees_an_entry_end,
    check_changes_are_told_after_what_is_there,
    check_a_reader_may_give_up_and_go_on,
    check_a_slow_reader_is_told_how_things_stand,
    check_many_threads_and_readers_agree,
)
