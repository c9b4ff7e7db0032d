"""A directory in a real etcd: what every directory does, and what several of them on one etcd see."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvxfer import Agent
from kvxfer.directory import Change, ChangeKind, Directory
from kvxfer.directory.etcd import EtcdDirectory, EtcdUrl
from kvxfer.errors import PeerError, UsageError
from kvxfer.testing import directories
from kvxfer.testing.directories import BOUND_S, Follower, entry
from tests.etcd_server import Cluster


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take longer to answer than a product waits; no test here is about that."""
    for name in ("_CONNECT_S", "_ANSWER_S"):
        monkeypatch.setattr(f"kvxfer.directory.etcd_gateway.{name}", BOUND_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


@pytest.fixture
def url(cluster: Cluster) -> str:
    """One's own part of etcd."""
    return cluster.url(secrets.token_hex(8))


class InEtcd(directories.DirectorySubject):
    """Its time is etcd's, which knows whole seconds and makes none shorter than two."""

    ttl_s = 2.0

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self.seed = seed

    @contextmanager
    def open(self) -> Iterator[Directory]:
        with EtcdDirectory(self._cluster.url(secrets.token_hex(8))) as directory:
            yield directory

    def pass_time(self, duration_s: float) -> None:
        threading.Event().wait(duration_s)


@pytest.mark.parametrize("check", directories.CHECKS, ids=lambda check: str(check.__name__))
def test_contract(check: directories.Check, cluster: Cluster, seed: int) -> None:
    check(InEtcd(cluster, seed))


def test_what_one_publishes_others_see_until_it_is_closed(url: str) -> None:
    with EtcdDirectory(url) as reader:
        watch = reader.watch_blocking("", BOUND_S)
        with EtcdDirectory(url) as one, EtcdDirectory(url) as other:
            for number, directory in enumerate((one, other)):
                directory.publish(entry(f"agent-{number}"))
                assert next(watch) == Change(ChangeKind.ADDED, entry(f"agent-{number}"))
            # It moves: its successor is elsewhere.
            other.publish(entry("agent-0", 2))
            assert next(watch) == Change(ChangeKind.CHANGED, entry("agent-0", 2))
            # A predecessor takes nothing with it.
            one.close()
            assert reader.resolve_blocking("agent-0", BOUND_S) == entry("agent-0", 2)
        assert {next(watch) for _ in range(2)} == {
            Change(ChangeKind.REMOVED, entry("agent-0", 2)),
            Change(ChangeKind.REMOVED, entry("agent-1")),
        }


def test_prefixes_do_not_meet_and_strangers_keys_are_no_entries(cluster: Cluster, url: str) -> None:
    with EtcdDirectory(url) as one, EtcdDirectory(f"{url}0") as other:
        one.publish(entry("a"))
        other.publish(entry("b"))
        distant = one._distant
        write = distant._gateway.put_if  # type: ignore[attr-defined]
        for key, value in (("junk", b"\xff\x00"), ("of-another", entry("x").to_bytes()), ("", b"{}")):
            one._call(write(distant._key(key), value, 0, 0))  # type: ignore[attr-defined]
        one.publish(entry("c"))
        assert one.list() == (entry("a"), entry("c"))
        assert other.list() == (entry("b"),)
        # An agent of that name takes the place.
        one.publish(entry("junk"))
        assert one.resolve_blocking("junk", BOUND_S) == entry("junk")


def test_agents_come_and_go_by_the_hundred(url: str, seed: int) -> None:
    """Several workers start and end at once, some under one name; watchers and new queries agree."""
    with EtcdDirectory(url) as reader:
        watch, follower = reader.watch_blocking("", 0.5), Follower()

        def worker(number: int) -> None:
            for life in range(1, 11):
                with EtcdDirectory(url) as own:
                    own.publish(entry(f"agent-{(seed + number + life) % 8}", life))
                    if (seed >> life) % 2:
                        own.publish(entry(f"agent-{number}-{life}", life), 60.0)

        threads = [threading.Thread(target=worker, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        follower.take_all(watch)
        for thread in threads:
            thread.join(BOUND_S)
        follower.take_all(watch)
        with EtcdDirectory(url) as anew:
            left = anew.list()
        assert follower.known == {each.name: each for each in left}
        assert all("-" in each.name.removeprefix("agent-") for each in left), "kept by nobody"


def test_agents_find_each_other(url: str) -> None:
    """An old entry leads to no other agent: tests/conformance/test_directories.py."""
    with (
        EtcdDirectory(url) as one,
        EtcdDirectory(url) as other,
        Agent("prefill", directory=one) as prefill,
        Agent("decode", directory=other) as decode,
    ):
        assert other.resolve_blocking("prefill", BOUND_S) == prefill.entry
        peer = decode.connect_blocking("prefill")
        assert peer.incarnation == prefill.incarnation


def test_who_waits_is_told_of_the_end(url: str) -> None:
    directory = EtcdDirectory(url)
    watch = directory.watch_blocking("x")
    told: list[str] = []

    def wait(call: str) -> None:
        try:
            next(watch) if call == "watch" else directory.resolve_blocking("nobody", BOUND_S)
        except PeerError as error:
            told.append(str(error))

    threads = [threading.Thread(target=wait, args=(call,)) for call in ("watch", "resolve")]
    for thread in threads:
        thread.start()
    assert directory.list() == ()
    directory.close()
    directory.close()
    for thread in threads:
        thread.join(BOUND_S)
    assert len(told) == 2
    assert all("was closed" in words for words in told)
    for call in (lambda: directory.publish(entry("a")), lambda: directory.resolve_blocking("a", 1.0)):
        with pytest.raises(PeerError, match="was closed"):
            call()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "is not a directory"),
        ("http://a:1", "is not a directory"),
        ("etcd://a", "is not a directory"),
        ("etcd://a:1,", "is not a directory"),
        ("etcd://user@a:1", "is not a directory"),
        ("etcd://a:1?user=x", "not one of ca, certificate, key, tls"),
        ("etcd://a:1?key=x", "no certificate"),
    ],
)
def test_urls_are_refused_in_words(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        EtcdDirectory(url)


def test_urls_are_read() -> None:
    assert EtcdUrl.parse("etcd://a:1,[::1]:2") == (("a:1", "[::1]:2"), "kvxfer", None)
    place = EtcdUrl.parse("etcd://a:1/x/y?ca=/ca.pem&certificate=/c.pem&key=/k.pem")
    assert place.prefix == "x/y"
    assert place.certificates is not None
    assert (place.certificates.ca, place.certificates.key) == ("/ca.pem", "/k.pem")
