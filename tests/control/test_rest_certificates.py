"""Certificates over REST, by real TLS: whom a client's lets in, and how the daemon's own is renewed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from kvxfer.control import Client, ControlError, schema
from kvxfer.control.http.shown_certificates import ShownCertificates, expiry_of
from kvxfer.control.schema.client_certificate import ClientCertificate, plain_name
from kvxfer.control.state.tokens import TokenRecord, Tokens
from tests.certificates import Authority as AgentAuthority
from tests.control.authority import Authority
from tests.control.serving import BOUND_S, DIGEST, SALT, Program, Served, program
from tests.waiting import until

SPIFFE = "spiffe://cluster/decode"
GAUGE = re.compile(r'^kvxfer_certificate_expires_seconds\{use="(\w+)"\} (\S+)$', re.MULTILINE)


def uri_der(text: bytes) -> str:
    """Returns a subjectAltName of one URI with any bytes."""
    names = bytes([0x86, len(text)]) + text
    return "DER:" + (bytes([0x30, len(names)]) + names).hex(":")


def digest_of(file: str) -> str:
    return ClientCertificate.read(ssl.PEM_cert_to_DER_cert(Path(file).read_text()), None).digest


@dataclass
class Place:
    """A daemon that requires certificates, and two authorities, of which it trusts one."""

    daemon: Program
    trusted: Authority
    foreign: Authority

    def client(self, files: tuple[str, str] | None, token: str | None = None) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.trusted.file))
        if files is not None:
            context.load_cert_chain(*files)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.daemon.url, headers=headers, verify=context, timeout=BOUND_S)

    def role(self, files: tuple[str, str] | None, token: str | None = None) -> str:
        """Returns the role by whoami, or "" if it is nobody's; "refused" if the handshake fails."""
        with self.client(files, token) as client:
            try:
                answer = client.get("/v1/whoami")
            except httpx.TransportError:
                return "refused"
        assert answer.status_code in (200, 401)
        return str(answer.json().get("role", ""))

    def make(self, certificate: str, role: Any = "read", **more: Any) -> schema.TokenMade:
        with Client(self.daemon.folder / "run/api.sock") as admin:
            return admin.create_token(
                schema.TokenRequest(name=f"for {role}", role=role, certificate=certificate, **more)
            )

    def revoke(self, *tokens: schema.TokenMade) -> None:
        with Client(self.daemon.folder / "run/api.sock") as admin:
            for token in tokens:
                admin.revoke_token(token.id)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("tls")
    trusted, foreign = Authority(folder / "trusted"), Authority(folder / "foreign")
    cert, key = trusted.of_node()
    tls = ("--tls-certificate", cert, "--tls-key", key, "--tls-client-ca", str(trusted.file))
    with program(folder, *tls) as daemon:
        yield Place(daemon, trusted, foreign)


def test_which_certificates_let_in_whom(place: Place) -> None:
    names = ("CN:client", "CN:one", f"URI:{SPIFFE}", "DNS:a.example", "DNS:b.example")
    made = [place.make(name) for name in names]
    for subject, alternative, role in (
        ("/CN=client", "", "read"),
        ("/CN=stranger", "", ""),
        ("/CN=one/CN=two", "", ""),  # two common names count as none
        ("/CN=a.example", uri_der(SPIFFE.encode()), "read"),
        ("/CN=a.example", uri_der(SPIFFE.encode() + b"\0.evil.example"), ""),
        ("/CN=a.example", uri_der(SPIFFE.encode() + b"\n"), ""),
        ("/CN=a.example", uri_der(SPIFFE.encode() + b"\xff"), "refused"),
        ("/CN=a.example", "DNS:*.example", ""),
        ("/CN=a.example", "DNS:a.example.evil", ""),
        ("/CN=a.example", "DNS:a.example,DNS:b.example", ""),
        ("/CN=a.example", "DNS:A.Example", "read"),
        ("/CN=a.example", "DNS:x.example,email:a@a.example", ""),
    ):
        assert place.role(place.trusted.sign("x", subject, alternative)) == role, (subject, alternative)
    refused = {
        "none": None,
        "foreign": place.foreign.sign("client", "/CN=client"),
        "expired": place.trusted.sign("expired", "/CN=client", days=-1),
        "signed itself": (str(place.foreign.file), str(place.foreign.folder / "ca.key")),
    }
    for kind, files in refused.items():
        for token in (None, place.daemon.token):
            assert place.role(files, token) == "refused", kind
    # A token beside a certificate says who asks; a wrong one is not mended by the certificate.
    known = place.trusted.sign("x", "/CN=client")
    assert place.role(known, place.daemon.token) == "admin"
    assert place.role(known, "kvx_0000000000000000_x") == ""
    place.revoke(*made)


def test_a_certificate_has_the_role_and_tenants_of_its_token_until_that_is_revoked(place: Place) -> None:
    mine = place.trusted.sign("mine", "/CN=ignored", f"URI:{SPIFFE}")
    made = place.make(f"URI:{SPIFFE}", "transfer", tenants=["red"])
    assert made.secret is None
    with place.client(mine) as client:
        who = client.get("/v1/whoami").json()
        assert who == {"name": "for transfer", "role": "transfer", "tenants": ["red"]}
        assert client.get("/v1/tokens").status_code == 403
        pin = {**SALT, "layout": DIGEST, "tenant": "red"}
        assert client.post("/v1/pages/pin", json=pin).status_code == 404, "no pool: it got as far"
        assert client.post("/v1/pages/pin", json={**pin, "tenant": "blue"}).status_code == 403
        # A renewed certificate with the same name is accepted without a change.
        assert place.role(place.trusted.sign("renewed", "/CN=ignored", f"URI:{SPIFFE}")) == "transfer"
        with client.stream("GET", "/v1/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith(": events from")
            place.revoke(made)
            assert not [line for line in lines if line.startswith("data")], "the stream ends"
        # Also on a connection that is already open.
        assert client.get("/v1/whoami").status_code == 401
    line = json.loads((place.daemon.folder / "state/audit.log").read_text().splitlines()[-3])
    assert (line["who"], line["name"]) == (f"token:{made.id}", "for transfer")
    assert line["certificate"] == digest_of(mine[0])


def test_a_digest_names_one_certificate_alone_and_before_its_names(place: Place) -> None:
    first, second = (place.trusted.sign(name, "/CN=twice") for name in ("first", "second"))
    by_name, exact = place.make("CN:twice", "read"), place.make(f"SHA256:{digest_of(first[0])}", "admin")
    assert [place.role(files) for files in (first, second)] == ["admin", "read"]
    with pytest.raises(ControlError, match="already") as caught:
        place.make("CN:twice")
    assert caught.value.code == "conflict"
    place.revoke(by_name, exact)
    again = place.make("CN:twice")
    assert place.role(second) == "read"
    place.revoke(again)


async def test_what_names_no_certificate_is_no_token(served: Served) -> None:
    async with served.unix() as client:
        for name in (
            *("", "CN:", "DNS:*.example", "URI:spiffe://*", "CN:a\0b"),
            *("SHA256:00", "IP:1.2.3.4", "decode", "CN:a\n"),
        ):
            answer = await client.post("/v1/tokens", json={"name": "x", "certificate": name})
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid-argument"), name
            assert plain_name(name) is None


def test_commands_and_clients_take_certificates_from_the_environment(place: Place) -> None:
    mine = place.trusted.sign("eyes", "/CN=eyes")
    files = {"KVXFER_CERTIFICATE_FILE": mine[0], "KVXFER_KEY_FILE": mine[1]}
    tls = (place.daemon.url, "--ca-file", str(place.trusted.file))
    create = ("--create", "eyes", "--role", "admin", "--certificate", "CN:eyes")
    for arguments, environment, status, words in (
        ((str(place.daemon.folder / "run/api.sock"), *create), {}, 0, "is for certificate CN:eyes"),
        (tls, files, 0, "CN:eyes"),
        (tls, {"KVXFER_CERTIFICATE_FILE": "/nowhere"}, 2, "/nowhere"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvxfer", "tokens", "--daemon", *arguments],
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
            env={**os.environ, **environment},
        )
        assert done.returncode == status, done.stderr
        assert words in done.stdout + done.stderr


async def test_a_certificate_that_expires_is_nobodys_from_then_on(served: Served) -> None:
    """Also what was opened with it ends."""
    async with served.unix() as client:
        made = (await client.post("/v1/tokens", json={"name": "x", "certificate": "CN:a"})).json()
    durable = served.daemon.tokens
    mine = ClientCertificate("d" * 64, frozenset({"CN:a"}), 1e12)
    caller = durable.of_certificate(mine)
    assert caller is not None
    assert (caller.key, durable.is_valid(caller)) == (f"token:{made['id']}", True)
    assert not durable.is_valid(replace(caller, until_s=1.0))
    kept = TokenRecord("1" * 16, "x", "read", None, "", 0.0, 50.0, "CN:a")
    tokens = Tokens([TokenRecord.from_dict(json.loads(json.dumps(kept.to_dict())))])
    for until_s, now_s, is_let_in in ((100.0, 10.0, True), (10.0, 10.0, False), (100.0, 50.0, False)):
        found = tokens.of_certificate(ClientCertificate("d" * 64, frozenset({"CN:a"}), until_s), now_s)
        assert (found is not None) == is_let_in, (until_s, now_s)
    for secret in ("", f"kvx_{'1' * 16}_", f"kvx_{'1' * 16}_x"):
        assert tokens.find(secret, 1.0) is None, "it has no secret"
    # A token stored by a version without certificates.
    old = {name: value for name, value in kept.to_dict().items() if name != "certificate"}
    assert TokenRecord.from_dict(old).certificate is None


# ---- the daemon's own -----------------------------------------------------------------------------


def ends(*files: str | os.PathLike[str]) -> float:
    """Returns the first end of the files' certificates, as another library reads it."""
    pem = b"".join(Path(each).read_bytes() for each in files)
    return min(each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(pem))


def test_other_hosts_and_plain_http_are_refused(tmp_path: Path) -> None:
    issuer = Authority(tmp_path / "ca")
    cert, key = issuer.of_node()
    listen = ("--listen", "0.0.0.0:0", "--tls-certificate", cert, "--tls-key", key)
    with program(tmp_path, *listen, "--host-name", "127.0.0.1") as daemon:
        url = daemon.url.replace("0.0.0.0", "127.0.0.1")
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(issuer.file))
        header = {"Authorization": f"Bearer {daemon.token}"}
        with httpx.Client(base_url=url, verify=trusted, timeout=BOUND_S) as client:
            assert client.get("/v1/node").status_code == 401
            assert client.get("/v1/node", headers=header).status_code == 200
            assert client.get("/v1/node", headers={**header, "Host": "node.evil.example"}).status_code == 403
        plain = url.replace("https", "http")
        with httpx.Client(base_url=plain, timeout=5) as client, pytest.raises(httpx.TransportError):
            client.get("/healthz")


def test_renewed_certificates_are_shown_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REST's pair is replaced file by file, which for a moment are of no use together; and the agent's."""
    issuer, agents = Authority(tmp_path / "ca"), AgentAuthority(tmp_path)
    files = [Path(each) for each in issuer.of_node()]
    new = [Path(each) for each in issuer.sign("renewed", "/CN=node", "IP:127.0.0.1", days=50)]
    tls = agents.issue("kvxfer://acme/daemons", days=(-1.0, 2.0))
    for name in ("certificate", "key", "authorities"):
        monkeypatch.setenv(f"KVXFER_TLS_{name.upper()}", str(getattr(tls, name)))
    for name in ("KVXFER_SECRET", "KVXFER_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    wanted = [ssl.PEM_cert_to_DER_cert(each[0].read_text()) for each in (files, new)]
    context = ssl.create_default_context(cafile=str(issuer.file))
    options = ("--tls-certificate", str(files[0]), "--tls-key", str(files[1]))
    with program(tmp_path, *options, agent=True) as daemon:
        host, port = daemon.url.removeprefix("https://").split(":")

        def shown() -> bytes | None:
            with (
                socket.create_connection((host, int(port)), BOUND_S) as plain,
                context.wrap_socket(plain, server_hostname=host) as secured,
            ):
                return secured.getpeercert(binary_form=True)

        def told() -> dict[str, float]:
            headers = {"Authorization": f"Bearer {daemon.token}"}
            return {use: float(s) for use, s in GAUGE.findall(client.get("/metrics", headers=headers).text)}

        def has_complained() -> bool:
            assert shown() == wanted[0]
            return any("REST keeps its certificate" in line for line in daemon.said)

        with httpx.Client(base_url=daemon.url, verify=context, timeout=BOUND_S) as client:
            assert shown() == wanted[0]
            first = told()
            assert first == {"rest": ends(files[0]), "agent": ends(tls.certificate)}
            new[0].replace(files[0])
            until(has_complained, "it does not say that the files do not fit")
            new[1].replace(files[1])
            until(lambda: shown() == wanted[1], "the new certificate is not shown")
            agents.issue("kvxfer://acme/daemons", days=(-1.0, 9.0), into=tls)
            then = {"rest": ends(files[0]), "agent": ends(tls.certificate)}
            assert all(then[use] > first[use] for use in first)
            # The open connection goes on.
            until(lambda: told() == then, "the ends of the new certificates are not told")
        complaints = [line for line in daemon.said if "REST keeps its certificate" in line]
        assert len(complaints) == 1
        assert "is not the key of --tls-certificate" in complaints[0]


def test_the_end_of_a_certificate_is_read_from_its_file(tmp_path: Path) -> None:
    """From 2050 on a certificate writes its times in another form; of a chain the first end counts."""
    authority = AgentAuthority(tmp_path)
    spans_days = (-0.5, 0.01, 2.0, 20.0, 9_000.0, 365.0 * 500)
    files = [Path(authority.issue("URI:a", days=(-1.0, days)).certificate) for days in spans_days]
    assert [expiry_of(file) for file in files] == [ends(file) for file in files]
    chain = tmp_path / "chain.pem"
    for order in (files[2:], files[:1:-1]):
        chain.write_text("text before\n" + "\n".join(file.read_text() for file in order))
        assert expiry_of(chain) == ends(files[2])
    with pytest.raises(ValueError, match="holds no certificate"):
        expiry_of(authority.revoked)
    whole = ssl.PEM_cert_to_DER_cert(files[2].read_text())
    for length in range(len(whole)):  # cut anywhere, it has an end or is refused
        chain.write_text(ssl.DER_cert_to_PEM_cert(whole[:length]))
        with suppress(ValueError):
            assert expiry_of(chain) == ends(files[2])


def test_what_was_read_last_stays_and_the_reason_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(AgentAuthority(tmp_path).issue("URI:a").certificate)
    certificates = ShownCertificates()
    asyncio.run(certificates.add_agent(file))
    before = dict(certificates.expires_at_s)
    file.write_text("half of it")
    with caplog.at_level(logging.WARNING):
        asyncio.run(certificates.refresh())
        asyncio.run(certificates.refresh())
    assert certificates.expires_at_s == before == {"agent": before["agent"]}
    (line,) = caplog.records
    assert str(file) in line.getMessage()
