"""A directory in etcd, whose servers are killed, stopped, emptied and cut off: agents continue."""

from __future__ import annotations

import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, KVLayout
from kvxfer.directory import Entry
from kvxfer.directory.etcd import EtcdDirectory
from kvxfer.errors import PeerError
from kvxfer.testing.directories import BOUND_S, entry
from tests.control.authority import Authority
from tests.etcd_server import Cluster, Member, free_ports
from tests.fault.cable import Cable, why_not
from tests.fork_server import Forked
from tests.waiting import until


def names(directory: EtcdDirectory) -> list[str]:
    return [each.name for each in directory.list()]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take longer to connect than a product waits; no test here is about that."""
    monkeypatch.setattr("kvxfer.directory.etcd_gateway._CONNECT_S", 10.0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


def test_etcd_is_killed_and_costs_no_session_and_no_transfer(cluster: Cluster) -> None:
    """Meanwhile known names are found, and others are refused with the reason."""
    (etcd,) = cluster.members
    pages = [np.zeros((4, 1024), np.uint8) for _ in range(2)]
    pages[0][:] = 7
    with (
        EtcdDirectory(cluster.url()) as one,
        EtcdDirectory(cluster.url()) as other,
        Agent("prefill", directory=one) as prefill,
        Agent("decode", directory=other) as decode,
    ):
        layout = KVLayout.from_tensor(pages[0].reshape(1, 4, 1, 1, 1024), axes="lbthd")
        source, destination = (
            agent.register("kv", cache, layout) for agent, cache in zip((prefill, decode), pages, strict=True)
        )
        until(lambda: "prefill" in names(other), "prefill is known")
        peer = decode.connect_blocking("prefill")
        etcd.kill()
        until(lambda: other.away, "it is noticed")
        source.grant(prefill.peers[0], blocks=[1, 2], mode="read", ttl_s=BOUND_S)
        decode.read(destination, peer.regions["kv"], src_blocks=[1, 2], dst_blocks=[0, 3]).wait(BOUND_S)
        assert pages[1][0].all()
        assert other.resolve_blocking("prefill", 0.0) == prefill.entry

        def why_not_found() -> str:
            with pytest.raises(PeerError) as refused:
                decode.connect_blocking("nobody", 1.5)
            return str(refused.value)

        # On a loaded machine the time to connect may be over before the look-up has said why.
        silent = re.compile(r"etcd at 127\.0\.0\.1:\d+ is silent for .* s: etcd does not")
        until(lambda: silent.search(why_not_found()), "the reason is told")
        with pytest.raises(PeerError, match="etcd does not answer") as refused:
            other.publish(entry("late"))
        assert refused.value.code == "unreachable"
        etcd.start()
        until(lambda: not one.away and not other.away, "it is heard again")
        assert names(one) == names(other) == ["decode", "prefill"]


@pytest.mark.slow
def test_a_minute_without_etcd_under_two_hundred_agents(cluster: Cluster, seed: int) -> None:
    """Sessions and transfers continue; afterwards exactly the agents that ended are gone."""
    rng = random.Random(seed)
    (etcd,) = cluster.members
    layout = KVLayout.from_tensor(np.zeros((1, 4, 1, 1, 1024), np.uint8), axes="lbthd")
    with ExitStack() as ended:
        directories = [ended.enter_context(EtcdDirectory(cluster.url())) for _ in range(10)]
        agents = {}
        for number in range(200):
            name = f"agent-{number:03}"
            options = AgentOptions(directory_ttl_s=20.0, daemon="", connect_timeout_s=BOUND_S)
            agents[name] = Agent(name, options, directory=directories[number % 10])
            ended.callback(agents[name].close)
        everybody = sorted(agents)
        for directory in directories:
            until(lambda directory=directory: names(directory) == everybody, "all are known")  # type: ignore[misc]
        callers = rng.sample(everybody, 40)
        pairs = list(zip(callers[:20], callers[20:], strict=True))
        caches, moves = {}, []
        for name in callers:
            caches[name] = np.full((1, 4, 1, 1, 1024), 7 if name in callers[20:] else 0, np.uint8)
            agents[name].register("kv", caches[name], layout)
        for reader, owner in pairs:
            peer = agents[reader].connect_blocking(owner)
            agents[owner].regions["kv"].grant(agents[owner].accept_blocking(reader, BOUND_S), ttl_s=600)
            moves.append((reader, peer, peer.region_blocking("kv", BOUND_S)))
        etcd.kill()
        pause, stopped_at = threading.Event(), time.monotonic()
        leavers = rng.sample(sorted(set(everybody) - set(callers)), 10)
        while time.monotonic() < stopped_at + 60:
            for reader, _, region in moves:
                caches[reader][:] = 0
                own = agents[reader].regions["kv"]
                agents[reader].read(own, region, src_blocks=[0, 3], dst_blocks=[1, 2]).wait(BOUND_S)
                assert caches[reader][0, 1:3].all()
            if leavers:
                everybody.remove(name := leavers.pop())
                with suppress(PeerError):  # it cannot be withdrawn now; its lease ends instead
                    agents[name].close()
            pause.wait(1)
        etcd.start()
        for directory in directories:
            until(lambda directory=directory: names(directory) == everybody, "who ended is gone")  # type: ignore[misc]
        assert all(peer.state == "open" for _, peer, _ in moves)
        at = agents[rng.choice(everybody)]
        assert directories[0].resolve_blocking(at.name, BOUND_S) == at.entry


@pytest.mark.parametrize("how", ["kept its data", "lost its data"])
def test_what_changed_while_etcd_was_away_is_right_afterwards(cluster: Cluster, how: str) -> None:
    """Agents that closed meanwhile are forgotten, living ones are listed, and a successor keeps its name."""
    (etcd,) = cluster.members
    with EtcdDirectory(cluster.url()) as stays, EtcdDirectory(cluster.url()) as loses:
        goes = EtcdDirectory(cluster.url())
        for directory, name in ((stays, "stays"), (loses, "moves"), (goes, "goes")):
            directory.publish(entry(name))
        until(lambda: len(names(stays)) == 3, "all are known")
        etcd.kill()
        until(lambda: stays.away and loses.away, "it is noticed")
        goes.close()
        etcd.start(empty=how == "lost its data")
        with EtcdDirectory(cluster.url()) as successor:
            until(lambda: _tries(successor, entry("moves", 2)), "a successor has the name")
            for directory in (stays, loses, successor):
                until(partial(_agrees, directory), "they agree")
        until(lambda: names(stays) == ["stays"], "the successor has gone")


def _agrees(directory: EtcdDirectory) -> bool:
    return directory.list() == (entry("moves", 2), entry("stays"))


def _has(directory: EtcdDirectory, *entries: Entry) -> bool:
    return set(entries) <= set(directory.list())


def _tries(directory: EtcdDirectory, said: Entry) -> bool:
    try:
        return directory.publish(said)
    except PeerError:
        return False


def test_a_server_that_stops_is_given_up_and_comes_back(cluster: Cluster) -> None:
    """Its sockets stay open but are silent."""
    (etcd,) = cluster.members
    with EtcdDirectory(cluster.url()) as directory:
        directory.publish(entry("a"))
        until(lambda: not directory.away, "it is heard")
        etcd.stop()
        until(lambda: directory.away, "it is noticed")
        assert names(directory) == ["a"]
        with pytest.raises(PeerError, match="etcd does not answer"):
            directory.publish(entry("b"))
        etcd.go_on()
        until(lambda: not directory.away, "it is heard again")
        directory.publish(entry("b"))
        assert "b" in names(directory)


def test_an_entry_whose_process_is_killed_is_forgotten(cluster: Cluster) -> None:
    program = (
        "import sys\n"
        "from kvxfer.directory.etcd import EtcdDirectory\n"
        "from kvxfer.testing.directories import entry\n"
        "EtcdDirectory(sys.argv[1]).publish(entry('dead'))\n"
        "print('published', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with EtcdDirectory(cluster.url()) as reader:
        child = Forked(program, cluster.url(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"published\n"
            until(lambda: names(reader) == ["dead"], "it is known")
        finally:
            child.kill()
            child.communicate()
        until(lambda: not names(reader), "it is forgotten")


def test_one_of_three_servers_dies_and_the_others_are_followed(seed: int) -> None:
    """Each in turn is killed or stopped, and returns; entries that are published meanwhile are seen."""
    with Cluster(3) as cluster, EtcdDirectory(cluster.url()) as one, EtcdDirectory(cluster.url()) as other:
        one.publish(entry("stays"))
        for turn, member in enumerate(cluster.members):
            is_killed = bool((seed >> turn) & 1)
            member.kill() if is_killed else member.stop()
            said = entry(f"a{turn}")
            until(partial(_tries, one, said), "it is written elsewhere")
            until(partial(_has, other, said), "it is seen elsewhere")
            member.start() if is_killed else member.go_on()
            member.until_healthy()
        assert names(other) == ["a0", "a1", "a2", "stays"]


def _is(ask: Callable[[int, str], list[str]], number: int, wanted: list[str]) -> bool:
    return ask(number, "list") == wanted


def test_a_partition_is_survived() -> None:
    """etcd is on another host, and the cable is cut for longer than leases hold."""
    if reason := why_not():
        pytest.skip(f"two hosts on this one: {reason}")
    with Cable() as cable:
        port = free_ports(1)[0]
        there = ("nsenter", "-t", str(cable.there.pid), "-n")
        etcd = Member("m0", {"m0": "http://127.0.0.1:2380"}, port, host=cable.there.ipv4, inside=there)
        program = (
            "import sys\n"
            "from kvxfer.directory.etcd import EtcdDirectory\n"
            "from kvxfer.testing.directories import entry\n"
            "with EtcdDirectory(sys.argv[1]) as directory:\n"
            "    for line in sys.stdin:\n"
            "        verb, _, name = line.strip().partition(' ')\n"
            "        if verb == 'publish':\n"
            "            directory.publish(entry(name))\n"
            "        if verb == 'away':\n"
            "            print('yes' if directory.away else 'no', flush=True)\n"
            "        else:\n"
            "            print(*(each.name for each in directory.list()), flush=True)\n"
        )
        url = f"etcd://{etcd.at}/test"
        hosts = [
            subprocess.Popen(
                ["nsenter", "-t", str(host.pid), "-n", sys.executable, "-c", program, url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in (cable.here, cable.there)
        ]

        def ask(number: int, line: str) -> list[str]:
            host = hosts[number]
            assert host.stdin is not None
            assert host.stdout is not None
            host.stdin.write(line + "\n")
            host.stdin.flush()
            return host.stdout.readline().split()

        etcd.start()
        try:
            assert ask(1, "publish near") == ["near"]
            ask(0, "publish far")
            for number in (0, 1):
                until(partial(_is, ask, number, ["far", "near"]), "both are known")
            cable.cut()
            until(lambda: ask(0, "away") == ["yes"], "it is noticed")
            until(lambda: ask(1, "list") == ["near"], "its lease has ended")
            assert ask(1, "publish new") == ["near", "new"]
            assert ask(0, "list") == ["far", "near"]
            cable.mend()
            until(lambda: ask(0, "list") == ["far", "near", "new"], "all is known there")
            until(lambda: ask(1, "list") == ["far", "near", "new"], "all is known here")
        finally:
            for host in hosts:
                host.kill()
                host.communicate()
            etcd.end()


# ---- TLS ------------------------------------------------------------------------------------------


def test_tls_with_certificates_of_both(tmp_path: Path) -> None:
    """A certificate of another authority, or none, is refused; a renewed one is read again."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    certificate, key = ours.of_node()
    tls = (f"--cert-file={certificate}", f"--key-file={key}", f"--trusted-ca-file={ours.file}",
           "--client-cert-auth")  # fmt: skip
    with Cluster(tls=tls) as cluster:
        client, client_key = ours.sign("client", "/CN=client", "IP:127.0.0.1")
        foreign, foreign_key = others.sign("client", "/CN=client", "IP:127.0.0.1")
        options = f"ca={ours.file}&certificate={client}&key={client_key}"
        with EtcdDirectory(f"{cluster.url()}?{options}") as directory:
            directory.publish(entry("a"))
            assert names(directory) == ["a"]
        refused = {
            "": "etcd does not answer",
            f"?ca={ours.file}": "etcd does not answer",
            f"?ca={others.file}&certificate={client}&key={client_key}": "certificate verify failed",
            f"?ca={ours.file}&certificate={foreign}&key={foreign_key}": "etcd does not answer",
            f"?ca={tmp_path}/none&certificate={client}&key={client_key}": "certificates for etcd",
        }
        for wrong, words in refused.items():
            with (
                EtcdDirectory(cluster.url() + wrong) as directory,
                pytest.raises(PeerError, match=words),
            ):
                directory.publish(entry("b"))
        # The file was wrong, and is corrected while the directory is open.
        mended = tmp_path / "mended.pem"
        shutil.copy(foreign, mended)
        with EtcdDirectory(
            f"{cluster.url()}?ca={ours.file}&certificate={mended}&key={tmp_path}/mended.key"
        ) as late:
            shutil.copy(foreign_key, tmp_path / "mended.key")
            until(lambda: "etcd does not answer" in late.away, "it has been tried")
            for source, target in ((client, mended), (client_key, tmp_path / "mended.key")):
                shutil.copy(source, f"{target}.new")
                Path(f"{target}.new").replace(target)
            until(lambda: not late.away, "it is heard")
            late.publish(entry("c"))


def test_a_server_that_is_no_etcd_is_refused(tmp_path: Path) -> None:
    """The server answers nonsense, nothing, or without end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers = [
            b"",
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
            b"HTTP/1.1 404 no\r\n\r\n",
            b"\xff" * 64,
        ]

        def serve() -> None:
            for turn in range(1 << 20):
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.sendall(answers[turn % len(answers)])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with EtcdDirectory(f"etcd://127.0.0.1:{server.getsockname()[1]}") as directory:
            for _ in answers:
                with pytest.raises(PeerError) as refused:
                    directory.publish(entry("a"))
                assert refused.value.code == "unreachable"
            assert directory.away
        server.shutdown(socket.SHUT_RDWR)
    thread.join(BOUND_S)
