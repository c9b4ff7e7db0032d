"""Agents with certificates: which peers are accepted or refused, and what crosses the network."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from kvxfer import Tls
from kvxfer.errors import PeerError, TransferError, UsageError
from tests.certificates import Authority
from tests.fault.node import BOUND_S, ROOT, SECRET, Local, Node, Remote, Worker
from tests.fault.proxy import Proxy
from tests.waiting import until

try:
    ctypes.CDLL("libssl.so.3")
except OSError:
    pytest.skip("OpenSSL 3 is not here: install libssl3", allow_module_level=True)


_DECODE: Final = "kvxfer://acme/decode/decode"
_PREFILL: Final = "kvxfer://acme/prefill"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls_of_decode(authority: Authority) -> Tls:
    return authority.issue(_DECODE, revoked=True)


@pytest.fixture
def decode(local: Local, tls_of_decode: Tls) -> Node:
    """The called node: memory with a pattern, and a certificate for its own name."""
    return filled(local("decode", "tcp", tls=tls_of_decode))


@pytest.fixture
def prefill(local: Local, authority: Authority) -> Node:
    return local("prefill", "tcp", tls=authority.issue(_PREFILL))


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What agents of this process log."""
    caplog.set_level(logging.INFO, "kvxfer")
    return caplog


def filled(node: Node) -> Node:
    node.fill(3)
    return node


def reads(reader: Node | Worker, **options: Any) -> None:
    """Asserts that an open session moves everything, and that every byte is right."""
    reader.set(0)
    reader.read(**options)
    assert reader.end() is None
    assert reader.holds(3)


def reads_all(reader: Node | Worker, owner: Node) -> None:
    """Asserts the same of a new session."""
    reader.connect(owner.address())
    owner.accept(reader.name_of())
    owner.grant("read")
    reads(reader)


def refusal(caller: Node, called: Node, *codes: str) -> str:
    """Asserts that no session begins, and returns why in the caller's words."""
    with pytest.raises(PeerError) as caught:
        caller.connect(called.address())
    assert caught.value.code in (codes or ("auth-failed",)), caught.value
    return str(caught.value)


def lines(log: pytest.LogCaptureFixture, *nodes: Node) -> str:
    """Returns what agents of this process have logged so far."""
    for node in nodes:
        node.agent.take_notification()
    return "\n".join(record.getMessage() for record in log.records)


def until_logged(log: pytest.LogCaptureFixture, words: str, *nodes: Node) -> None:
    until(lambda: words in lines(log, *nodes), lambda: f"no {words!r} in {lines(log, *nodes)!r}")


def until_gone(node: Node) -> None:
    """Waits until this node has dropped a session that the other end has closed."""
    until(lambda: not node.agent.peers, lambda: node.agent.peers)


# ---- those who get in -----------------------------------------------------------------------------


def test_certificates_are_made_as_the_document_says(tmp_path: Path, local: Local) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the document makes them by the program openssl")
    text = (ROOT / "docs" / "tls.md").read_text()
    commands = next(block for block in text.split("```") if "openssl req" in block)
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True, capture_output=True, timeout=BOUND_S)
    tls = Tls(tmp_path / "decode.pem", tmp_path / "decode.key", tmp_path / "authority.pem")
    decode = filled(local("decode-0", "tcp", tls=tls))
    reads_all(local("decode-1", "tcp", tls=tls), decode)
    assert decode.peers[-1].identity == "acme/decode/decode-1"


@pytest.mark.parametrize("rail", ["tcp", "shm"])
def test_pages_cross_and_each_end_knows_whose_they_are(
    local: Local, remote: Remote, authority: Authority, rail: str
) -> None:
    decode = filled(local("decode", rail, tls=authority.issue(_DECODE)))
    prefill = remote("prefill", rail, tls=authority.issue(_PREFILL))
    reads_all(prefill, decode)
    assert decode.peers[-1].identity == "acme/prefill/prefill"
    assert set(prefill.rails()) == ({"tcp"} if rail == "tcp" else {"shm", "unix"})


def test_nothing_that_crosses_can_be_read(local: Local, authority: Authority) -> None:
    decode, prefill = (
        local(name, "tcp", tls=authority.issue(uri), transport_options={"tcp.rails": 1})
        for name, uri in (("decode", _DECODE), ("prefill", _PREFILL))
    )
    decode.set(0x4B4B)  # "KK"
    with closing(Proxy(decode.address())) as proxy:
        prefill.connect(proxy.address)
        prefill.set(0x4242)
        decode.accept("prefill")
        prefill.grant("read")
        decode.read()  # the proxy records the bytes of the dialling side
        assert decode.end() is None
        assert decode.is_all(0x4242)
        for link in proxy.links:
            assert b"\x42\x42\x42\x42" not in link.sent
            assert b"prefill" not in link.sent


@pytest.mark.parametrize(
    "allow", [(), ("acme/*/*",), ("acme/prefill/prefill",), ("other/*/*", "acme/pre*/pre*l")]
)
def test_who_is_allowed_is_said_by_patterns(
    local: Local, prefill: Node, authority: Authority, allow: tuple[str, ...]
) -> None:
    reads_all(prefill, filled(local("decode", "tcp", tls=authority.issue(_DECODE, allow=allow))))


@pytest.mark.parametrize("allow", ["acme/decode/*", "acme/prefill/other", "*/*/prefill-*"])
def test_others_are_refused_and_the_log_says_who_is_allowed(
    local: Local, prefill: Node, authority: Authority, log: pytest.LogCaptureFixture, allow: str
) -> None:
    decode = local("decode", "tcp", tls=authority.issue(_DECODE, allow=(allow,)))
    refusal(prefill, decode, "auth-failed", "peer-lost")
    until_logged(log, f" is not allowed here; allowed are {allow}", decode)
    assert not decode.agent.peers


def test_a_lease_names_whose_certificates_may_use_it(local: Local, decode: Node, prefill: Node) -> None:
    prefill.connect(decode.address())
    for allow in ("acme/prefill/*", "acme/prefill/prefill"):
        reads(prefill, lease=decode.region.grant(None, allow=allow).token)
    # Without a certificate no pattern matches.
    owner, reader = local("owner", "tcp"), local("reader", "tcp")
    reader.connect(owner.address())
    for caller, called, allow, who in (
        (prefill, decode, "acme/other/*", " (acme/prefill/prefill)"),
        (prefill, decode, "*/*/decode", " (acme/prefill/prefill)"),
        (reader, owner, "*/*/*", ""),
    ):
        caller.read(lease=called.region.grant(None, allow=allow).token)
        error = caller.end()
        assert isinstance(error, TransferError), allow
        assert error.code == "not-permitted"
        assert f"whose certificate is for {allow}" in str(error)
        assert who in str(error)


@pytest.mark.parametrize(
    "allow", ["acme", "acme/prefill", "acme//x", "a b/*/*", "\0/*/*", "*" * 600 + "/*/*"]
)
def test_what_is_no_pattern_is_refused(local: Local, authority: Authority, allow: str) -> None:
    with pytest.raises(UsageError, match="pattern"):
        local("decode", "tcp").region.grant(None, allow=allow)
    with pytest.raises(UsageError, match="pattern"):
        local("decode", "tcp", tls=authority.issue(_DECODE, allow=(allow,)))


# ---- those who do not -----------------------------------------------------------------------------

_TODAY: Final = (-1.0, 1.0)
_CLOCK: Final = "this host's clock says"
_UNTRUSTED: Final = "self-signed certificate in certificate chain|unable to get local issuer"
# The names in a stranger's certificate, its days, and the words in the log of the node that refuses it.
_REFUSED: Final[dict[str, tuple[str, tuple[float, float], str]]] = {
    "of another authority": (_PREFILL, _TODAY, _UNTRUSTED),
    "expired": (_PREFILL, (-3, -2), _CLOCK),
    "not valid yet": (_PREFILL, (1, 2), _CLOCK),
    "another tenant": ("kvxfer://other/prefill", _TODAY, "other/prefill is not allowed here"),
    "no identity": ("https://acme/prefill", _TODAY, "it names no agent"),
    "a NUL in its name": ("kvxfer://acme/prefill/prefill\0.other", _TODAY, "it names no agent"),
    "a wildcard in its name": ("kvxfer://acme/*/prefill", _TODAY, "it names no agent"),
    "a space in its name": ("kvxfer://acme/pre fill/prefill", _TODAY, "it names no agent"),
    "too few parts": ("kvxfer://acme", _TODAY, "it names no agent"),
    "revoked": (_PREFILL, _TODAY, "certificate revoked"),
    "none": ("", _TODAY, "peer did not return a certificate"),
    "older TLS": (_PREFILL, _TODAY, "unsupported protocol"),
}


def context_of(tls: Tls | None) -> ssl.SSLContext:
    """A client with Python's own TLS, which can do what kvxfer would not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


def dial(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), BOUND_S)


def is_refused(address: str, context: ssl.SSLContext) -> str:
    """Returns why a handshake, or the first read after it, failed; "" if the stranger is accepted."""
    try:
        with dial(address) as plain, context.wrap_socket(plain) as secured:
            secured.sendall(bytes(64))
            return "closed" if not secured.recv(1) else ""
    except OSError as error:
        return str(error)


@pytest.mark.parametrize("kind", _REFUSED)
def test_a_stranger_is_refused_and_the_log_says_why(
    tmp_path: Path, decode: Node, authority: Authority, log: pytest.LogCaptureFixture, kind: str
) -> None:
    uri, days, words = _REFUSED[kind]
    issuer = Authority(tmp_path, "other") if kind == "of another authority" else authority
    tls = issuer.issue(uri, days=days) if uri else None
    if kind == "revoked" and tls:
        authority.revoke(tls)
        decode.agent.reload_certificates()
    context = context_of(tls)
    if kind == "older TLS":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert is_refused(decode.address(), context)
    until(
        lambda: any(word in lines(log, decode) for word in words.split("|")),
        lambda: lines(log, decode),
    )
    assert not decode.agent.peers


@pytest.mark.parametrize(
    ("ours", "uri", "theirs", "words"),
    [
        (_TODAY, _PREFILL, (-3, -2), "out of date, so one of the two clocks"),
        (_TODAY, "kvxfer://other/prefill", _TODAY, "allows none of the names in the certificate"),
        ((-3, -2), _PREFILL, _TODAY, f"its certificate is refused: .*{_CLOCK}"),
    ],
    ids=["expired", "another-tenant", "the-called-one's-expired"],
)
def test_an_agent_reads_why_it_is_refused_and_whom_it_refuses(
    local: Local, authority: Authority, ours: Any, uri: str, theirs: Any, words: str
) -> None:
    decode = local("decode", "tcp", tls=authority.issue(_DECODE, days=ours))
    prefill = local("prefill", "tcp", tls=authority.issue(uri, days=theirs, allow=("*/*/*",)))
    assert re.search(words, refusal(prefill, decode))


def test_certificates_of_the_environment_are_as_those_of_options(
    local: Local, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_other = authority.issue("kvxfer://other/prefill", allow=("*/*/*",))
    ours = authority.issue(_DECODE, revoked=True)
    with monkeypatch.context() as environment:
        for name, value in (
            ("KVXFER_TLS_CERTIFICATE", ours.certificate),
            ("KVXFER_TLS_KEY", ours.key),
            ("KVXFER_TLS_AUTHORITIES", ours.authorities),
            ("KVXFER_TLS_REVOKED", ours.revoked or ""),
            ("KVXFER_TLS_ALLOW", "acme/*/* other/*/*"),
            ("KVXFER_TLS_KERNEL", "never"),
        ):
            environment.setenv(name, os.fspath(value))
        decode = local("decode", "tcp", secret=None)
    prefill = local("prefill", "tcp", tls=of_other)
    prefill.connect(decode.address())
    authority.revoke(of_other)
    decode.agent.reload_certificates()
    assert "revoked" in refusal(local("prefill", "tcp", tls=of_other), decode)


# ---- downgrades -----------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", ["certificates", "secret", "user"])
def test_certificates_and_secrets_never_meet(
    local: Local, authority: Authority, log: pytest.LogCaptureFixture, caller: str
) -> None:
    """Either end has certificates, and the other a secret or its user's secret, over TCP or a unix name."""
    certified = {"tls": authority.issue(_DECODE)}
    other = {"secret": SECRET} if caller == "secret" else {}
    calls, called = (
        ({"tls": authority.issue(_PREFILL)}, {"secret": SECRET})
        if caller == "certificates"
        else (other, certified)
    )
    decode = local("decode", "shm", **called)
    prefill = local("prefill", "shm", **calls)
    refusal(prefill, decode, "auth-failed", "peer-lost")
    assert not decode.agent.peers
    assert not prefill.agent.peers
    until_logged(log, "certificate" if caller != "certificates" else "TLS", decode)


def test_both_at_once_are_refused_in_words(
    local: Local, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = authority.issue(_DECODE)
    with pytest.raises(UsageError, match="an agent takes only one of them"):
        local("decode", "tcp", tls=tls, secret=SECRET)
    monkeypatch.setenv("KVXFER_SECRET", "a secret of the environment")
    with pytest.raises(UsageError, match="an agent takes only one of them"):
        local("decode", "tcp", tls=tls, secret=None)
    local("decode", "tcp", tls=tls, secret=b"")


def test_an_agent_with_certificates_is_given_no_secret(prefill: Node) -> None:
    verbs: tuple[Callable[[], None], ...] = (
        lambda: prefill.agent.set_secret(SECRET),
        prefill.agent.reload_secret,
    )
    for verb in verbs:
        with pytest.raises(UsageError, match="has certificates and no secret"):
            verb()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda tls, by: Path(tls.key).write_text("no key"), "key"),
        (lambda tls, by: shutil.copy(by.issue(_DECODE).key, tls.key), "key"),
        (lambda tls, by: Path(tls.certificate).unlink(), "certificate"),
        (lambda tls, by: shutil.copy(sys.executable, tls.certificate), "certificate"),
        (
            lambda tls, by: by.issue("kvxfer://acme/decode/x", into=tls),
            "the certificate is for agent 'x', but this agent is called 'decode'",
        ),
        (lambda tls, by: Path(tls.authorities).write_text(""), "authorities"),
    ],
    ids=["no-key", "another-key", "no-certificate", "binary", "another-name", "no-authorities"],
)
def test_files_that_are_none_are_named(
    local: Local, authority: Authority, damage: Callable[[Tls, Authority], object], words: str
) -> None:
    tls = authority.issue(_DECODE)
    damage(tls, authority)
    with pytest.raises(UsageError, match=words) as caught:
        local("decode", "tcp", tls=tls)
    assert caught.value.code == "invalid-argument"


# ---- rotation -------------------------------------------------------------------------------------


def test_certificates_are_renewed_while_sessions_go_on(
    tmp_path: Path, local: Local, decode: Node, tls_of_decode: Tls, authority: Authority
) -> None:
    """An authority is replaced in three steps: all trust both, all use the new one, the old one goes."""
    first = local("first", "tcp", tls=authority.issue(_PREFILL))
    reads_all(first, decode)
    session = first.peers[-1]
    newer = Authority(tmp_path, "newer")
    shown = newer.issue(_PREFILL)
    assert "its certificate is refused" in refusal(local("early", "tcp", tls=shown), decode)
    for held, added in ((authority.authorities, newer.authorities), (authority.revoked, newer.revoked)):
        held.write_bytes(held.read_bytes() + added.read_bytes())
    decode.agent.reload_certificates()
    newer.issue(_DECODE, into=tls_of_decode)
    decode.agent.reload_certificates()
    shown = Tls(shown.certificate, shown.key, newer.authorities)
    reads_all(local("second", "tcp", tls=shown), decode)
    shutil.copy(newer.authorities, authority.authorities)
    shutil.copy(newer.revoked, authority.revoked)
    decode.agent.reload_certificates()
    late = local("late", "tcp", tls=authority.issue(_PREFILL))
    assert "certificate" in refusal(late, decode)
    assert session.state == "open"
    reads(first)


def test_what_changes_on_the_disk_is_read_again(
    local: Local, decode: Node, tls_of_decode: Tls, authority: Authority, log: pytest.LogCaptureFixture
) -> None:
    tls = authority.issue(_PREFILL)
    prefill = local("prefill", "tcp", tls=tls)
    reads_all(prefill, decode)
    authority.issue("kvxfer://acme/decode/other", into=tls_of_decode)
    until_logged(log, "the previous ones stay in use: the certificate is for agent 'other'", decode)
    authority.issue(_DECODE, into=tls_of_decode)
    until_logged(log, "certificates have changed: new connections", decode)
    authority.revoke(tls)
    context = context_of(tls)
    # The log may have said twice that they have changed: each of the two files is watched.
    until(
        lambda: is_refused(decode.address(), context) and "certificate revoked" in lines(log, decode),
        lambda: lines(log, decode),
    )
    reads(prefill)  # the session outlives the revocation
    prefill.disconnect()
    refusal(prefill, decode)


def test_what_cannot_be_read_again_changes_nothing(decode: Node, prefill: Node, authority: Authority) -> None:
    authority.revoked.write_text("no list")
    with pytest.raises(UsageError, match="list of revoked certificates"):
        decode.agent.reload_certificates()
    reads_all(prefill, decode)


# ---- attacks --------------------------------------------------------------------------------------


def test_a_session_that_is_played_again_is_none(decode: Node, prefill: Node) -> None:
    with closing(Proxy(decode.address())) as proxy:
        prefill.connect(proxy.address)
        decode.accept("prefill")
        decode.grant("read")
        reads(prefill)
        recorded = [bytes(link.sent) for link in proxy.links]
        assert len(recorded) == 3
        for _ in range(3):
            for said in recorded:
                with dial(decode.address()) as stranger, suppress(OSError):
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1 << 16):
                        pass
        assert [peer.name for peer in decode.agent.peers] == ["prefill"]
        reads(prefill)


def test_what_is_altered_on_its_way_never_lands_unseen(
    local: Local, decode: Node, authority: Authority, seed: int
) -> None:
    """Random bits of the owner's bytes are flipped: a transfer ends with the right bytes, or in an error."""
    rng = random.Random(seed)
    prefill = local("prefill", "tcp", tls=authority.issue(_PREFILL), connect_timeout_s=BOUND_S)
    for round_ in range(6):
        with closing(Proxy(decode.address())) as proxy:
            # One of two rails carries at least half of the 2 MiB, so each round flips a bit.
            proxy.flip_after_nbytes = rng.randrange(4_000, 1_000_000)
            with suppress(PeerError):
                prefill.connect(proxy.address)
                decode.accept("prefill")
                decode.grant("read")
                prefill.set(0)
                prefill.read()
                assert prefill.end() is not None or prefill.holds(3), round_
                prefill.disconnect()
                decode.wait_lost()
            assert proxy.flip_after_nbytes == -1, round_
    reads_all(prefill, decode)


def test_a_peer_that_stops_in_its_handshake_costs_nobody(
    local: Local, prefill: Node, authority: Authority, seed: int
) -> None:
    rng = random.Random(seed)
    decode = filled(local("decode", "tcp", tls=authority.issue(_DECODE), handshake_timeout_s=3.0))
    hello = ssl.MemoryBIO()
    greeting = context_of(authority.issue(_PREFILL)).wrap_bio(ssl.MemoryBIO(), hello)
    with pytest.raises(ssl.SSLWantReadError):
        greeting.do_handshake()
    said = hello.read()
    stopped = [dial(decode.address()) for _ in range(50)]
    for stranger in stopped:
        stranger.sendall(said[: rng.randrange(len(said) + 1)])
    reads_all(prefill, decode)
    for stranger in stopped:
        with suppress(ConnectionResetError):
            while stranger.recv(1 << 16):  # until its connection is closed
                pass
        stranger.close()
    until(lambda: not decode.stats()["strangers"]["descriptors"][0], lambda: decode.stats()["strangers"])


def test_an_acceptor_that_says_nothing_is_given_up(prefill: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerError) as caught:
            prefill.connect(address, timeout_s=1.0)
    assert caught.value.code == "no-answer"


def test_strangers_that_shake_hands_without_end_hold_up_no_peer(
    tmp_path: Path, decode: Node, prefill: Node
) -> None:
    reads_all(prefill, decode)
    context = context_of(Authority(tmp_path, "other").issue(_PREFILL))
    ended, refused = threading.Event(), []

    def shake_hands() -> None:
        while not ended.is_set():
            refused.append(is_refused(decode.address(), context))

    with ThreadPoolExecutor(4) as threads:
        strangers = [threads.submit(shake_hands) for _ in range(4)]
        try:
            for _ in range(20):
                reads(prefill)
            until(lambda: len(refused) >= 200, lambda: f"{len(refused)} handshakes")
        finally:
            ended.set()
        for stranger in strangers:
            stranger.result(BOUND_S)
    assert all(refused)
    assert prefill.peer_state() == ("open", "")
    assert [peer.name for peer in decode.agent.peers] == ["prefill"]


class Interceptor:
    """Stands between two agents with its own valid certificate and passes on the bytes of each. It does not
    touch the first `let_through` connections.
    """

    def __init__(self, address: str, tls: Tls, let_through: int = 0) -> None:
        self._address, self._client, self._let_through = address, context_of(tls), let_through
        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server.load_cert_chain(tls.certificate, tls.key)
        self._server.load_verify_locations(tls.authorities)
        self._server.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.heard = bytearray()
        self._start(self._accept)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _start(self, body: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=body, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._ends.append(self._listener.accept()[0])
                self._ends.append(dial(self._address))
                if len(self._ends) > 2 * self._let_through:
                    self._ends[-2] = self._server.wrap_socket(self._ends[-2], server_side=True)
                    self._ends[-1] = self._client.wrap_socket(self._ends[-1])
                near, far = self._ends[-2:]
                self._start(self._pump, near, far)
                self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if isinstance(source, ssl.SSLSocket):
                    self.heard += data
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("let_through", [0, 1], ids=["session", "rails"])
def test_nobody_with_a_certificate_stands_between_two_others(
    decode: Node, prefill: Node, authority: Authority, log: pytest.LogCaptureFixture, let_through: int
) -> None:
    """Its certificate names any agent of an engine, the worst case: each end would take it for the other."""
    between = Interceptor(decode.address(), authority.issue("kvxfer://acme/any"), let_through)
    with closing(between):
        with pytest.raises(PeerError):
            prefill.connect(between.address)
        assert between.heard  # TLS accepted it
    if let_through:
        until_logged(log, "RAIL_HELLO whose proof is wrong", decode)
    until_gone(decode)
    reads_all(prefill, decode)


# ---- the library ----------------------------------------------------------------------------------

_MAKE_ONE: Final = """
import sys
from kvxfer import AgentOptions, Tls
from kvxfer.agent import Agent
from kvxfer.errors import UsageError
try:
    Agent("decode", AgentOptions(listen="", daemon="", tls=Tls(*sys.argv[1:4])))
except UsageError as error:
    print(error.code, error)
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [(None, "OpenSSL cannot be loaded"), ("int nothing;", "this OpenSSL is too old: it has no ")],
    ids=["absent", "too-old"],
)
def test_without_openssl_it_says_what_to_install(
    tmp_path: Path, authority: Authority, source: str | None, words: str
) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for library in (libraries / "libssl.so.3", libraries / "libcrypto.so.3"):
        library.write_text("no library")
        if source is not None:
            (libraries / "nothing.cpp").write_text(source)
            command = ("c++", "-shared", "-o", str(library), str(libraries / "nothing.cpp"))
            subprocess.run(command, check=True, timeout=BOUND_S)
    tls = authority.issue(_DECODE)
    told = subprocess.run(
        [sys.executable, "-c", _MAKE_ONE, tls.certificate, tls.key, tls.authorities],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert told.stdout.startswith("unsupported"), told
    assert words in told.stdout
    assert "libssl3" in told.stdout


def test_nothing_of_a_key_is_shown(authority: Authority) -> None:
    tls = authority.issue(_DECODE)
    assert "BEGIN" not in repr(tls)
