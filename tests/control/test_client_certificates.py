"""Clients that authenticate by real certificates of an authority, over real TLS."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvxfer.control import Client, ControlError, schema
from kvxfer.control.state.client_certificate import ClientCertificate, plain_name
from kvxfer.control.state.tokens import TokenRecord, Tokens
from tests.control.serving import BOUND_S, Program, Served, program

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
SPIFFE = "spiffe://cluster/decode"


def openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["openssl", *arguments], cwd=folder, capture_output=True, check=False, timeout=BOUND_S
    )
    if done.returncode:
        pytest.skip(f"openssl makes no such certificate here: {done.stderr.decode()[-200:]}")


@dataclass
class Authority:
    """An authority with its files in a folder; it signs certificates."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        ca = ("-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
        openssl(self.folder, "req", "-x509", *EC, "-days", "2", *ca)

    @property
    def file(self) -> Path:
        return self.folder / "ca.pem"

    def sign(self, name: str, subject: str, alternative: str = "", days: int = 2) -> tuple[str, str]:
        """Returns the files of a new certificate and its key."""
        files = (self.folder / f"{name}.pem", self.folder / f"{name}.key")
        csr = ("-subj", subject, "-keyout", files[1].name, "-out", "csr")
        openssl(self.folder, "req", *EC, *csr)
        (self.folder / "ext").write_text(f"subjectAltName={alternative}\n" if alternative else "")
        by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext")
        openssl(self.folder, "x509", "-req", "-in", "csr", *by, "-days", str(days), "-out", files[0].name)
        return str(files[0]), str(files[1])


def uri_der(text: bytes) -> str:
    """Returns a subjectAltName of one URI with any bytes."""
    names = bytes([0x86, len(text)]) + text
    return "DER:" + (bytes([0x30, len(names)]) + names).hex(":")


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

    def status(self, files: tuple[str, str] | None, token: str | None = None) -> int:
        """Returns what whoami answers; 0 if the handshake fails."""
        with self.client(files, token) as client:
            try:
                return client.get("/v1/whoami").status_code
            except httpx.TransportError:
                return 0

    def make(self, certificate: str, role: Any = "read", **more: Any) -> schema.TokenMade:
        with Client(self.daemon.folder / "run/api.sock") as admin:
            return admin.create_token(
                schema.TokenRequest(name=f"for {role}", role=role, certificate=certificate, **more)
            )

    def revoke(self, token: schema.TokenMade) -> None:
        with Client(self.daemon.folder / "run/api.sock") as admin:
            admin.revoke_token(token.id)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("tls")
    trusted, foreign = Authority(folder / "trusted"), Authority(folder / "foreign")
    cert, key = trusted.sign("node", "/CN=node", "IP:127.0.0.1")
    tls = ("--tls-certificate", cert, "--tls-key", key, "--tls-client-ca", str(trusted.file))
    with program(folder, *tls) as daemon:
        yield Place(daemon, trusted, foreign)


def test_a_certificate_has_the_role_and_tenants_of_its_token_until_that_is_revoked(place: Place) -> None:
    mine = place.trusted.sign("mine", "/CN=ignored", f"URI:{SPIFFE}")
    assert place.status(mine) == 401, "it is of the authority, and nobody's yet"
    made = place.make(f"URI:{SPIFFE}", "transfer", tenants=["red"])
    assert made.secret is None
    with place.client(mine) as client:
        who = client.get("/v1/whoami").json()
        assert who == {"name": "for transfer", "role": "transfer", "tenants": ["red"]}
        assert client.get("/v1/tokens").status_code == 403
        pin = {"model": "m", "keys": ["k"], "layout": "0" * 64, "tenant": "red"}
        assert client.post("/v1/pages/pin", json=pin).status_code == 404, "no pool: it got as far"
        assert client.post("/v1/pages/pin", json={**pin, "tenant": "blue"}).status_code == 403
        # A renewed certificate with the same name is accepted without a change.
        renewed = place.trusted.sign("renewed", "/CN=ignored", f"URI:{SPIFFE}")
        assert place.status(renewed) == 200
        with client.stream("GET", "/v1/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith(": events from")
            place.revoke(made)
            assert not [line for line in lines if line.startswith("data")], "the stream ends"
        # Also on a connection that is already open.
        assert client.get("/v1/whoami").status_code == 401
    line = json.loads((place.daemon.folder / "state/audit.log").read_text().splitlines()[-3])
    digest = ssl.PEM_cert_to_DER_cert(Path(mine[0]).read_text())
    assert (line["who"], line["name"]) == (f"token:{made.id}", "for transfer")
    assert line["certificate"] == ClientCertificate.read(digest, None).digest


def test_a_token_beside_a_certificate_says_who_asks(place: Place) -> None:
    mine = place.trusted.sign("beside", "/CN=beside")
    made = place.make("CN:beside", "read")
    with place.client(mine, place.daemon.token) as client:
        assert client.get("/v1/whoami").json()["role"] == "admin"
    assert place.status(mine, "kvx_0000000000000000_x") == 401, "a wrong token is not mended by a certificate"
    assert place.status(mine) == 200
    place.revoke(made)


@pytest.mark.parametrize("kind", ["none", "foreign", "expired", "signed itself"])
def test_what_the_authority_did_not_sign_for_today_ends_in_the_handshake(place: Place, kind: str) -> None:
    made = place.make("CN:client", "admin")
    files: dict[str, Any] = {
        "none": None,
        "foreign": place.foreign.sign("client", "/CN=client"),
        "expired": place.trusted.sign("expired", "/CN=client", days=-1),
        "signed itself": (str(place.foreign.file), str(place.foreign.folder / "ca.key")),
    }
    assert place.status(files[kind]) == 0
    assert place.status(files[kind], place.daemon.token) == 0
    assert place.status(place.trusted.sign("client", "/CN=client")) == 200
    place.revoke(made)


def test_names_that_name_no_client_let_nobody_in(place: Place) -> None:
    made = [place.make(f"URI:{SPIFFE}"), place.make("DNS:a.example"), place.make("DNS:b.example")]
    files = place.trusted.sign
    for name, alternative, status in (
        ("zero", uri_der(SPIFFE.encode() + b"\0.evil.example"), 401),
        ("newline", uri_der(SPIFFE.encode() + b"\n"), 401),
        ("no text", uri_der(SPIFFE.encode() + b"\xff"), 0),
        ("star", "DNS:*.example", 401),
        ("longer", "DNS:a.example.evil", 401),
        ("of two", "DNS:a.example,DNS:b.example", 401),
        ("other letters", "DNS:A.Example", 200),
        ("another kind", "DNS:x.example,email:a@a.example", 401),
    ):
        assert place.status(files("x", "/CN=a.example", alternative)) == status, name
    # Two common names count as none.
    made.append(place.make("CN:one"))
    assert place.status(files("x", "/CN=one/CN=two")) == 401
    for each in made:
        place.revoke(each)


def test_a_digest_names_one_certificate_alone_and_before_its_names(place: Place) -> None:
    first, second = (place.trusted.sign(name, "/CN=twice") for name in ("first", "second"))
    by_name = place.make("CN:twice", "read")
    digest = ClientCertificate.read(ssl.PEM_cert_to_DER_cert(Path(first[0]).read_text()), None).digest
    exact = place.make(f"SHA256:{digest}", "admin")
    roles = []
    for files in (first, second):
        with place.client(files) as client:
            roles.append(client.get("/v1/whoami").json()["role"])
    assert roles == ["admin", "read"]
    with pytest.raises(ControlError, match="already") as caught:
        place.make("CN:twice")
    assert caught.value.code == "conflict"
    for each in (by_name, exact):
        place.revoke(each)
    again = place.make("CN:twice")
    assert place.status(second) == 200
    place.revoke(again)


@pytest.mark.parametrize(
    "name",
    ["", "CN:", "DNS:*.example", "URI:spiffe://*", "CN:a\0b", "SHA256:00", "IP:1.2.3.4", "decode", "CN:a\n"],
)
def test_what_names_no_certificate_is_no_token(place: Place, name: str) -> None:
    with place.client(place.trusted.sign("any", "/CN=any"), place.daemon.token) as client:
        answer = client.post("/v1/tokens", json={"name": "x", "certificate": name})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-argument")
    assert plain_name(name) is None


def test_commands_and_clients_take_certificates_from_the_environment(place: Place) -> None:
    mine = place.trusted.sign("eyes", "/CN=eyes")
    ask = [sys.executable, "-P", "-m", "kvxfer", "tokens", "--daemon"]
    socket = str(place.daemon.folder / "run/api.sock")
    done = subprocess.run(
        [*ask, socket, "--create", "eyes", "--role", "admin", "--certificate", "CN:eyes"],
        **(run := {"capture_output": True, "text": True, "timeout": BOUND_S, "check": False}),  # type: ignore[call-overload]
    )
    assert (done.returncode, "is for certificate CN:eyes" in done.stdout) == (0, True), done.stderr
    files = {"KVXFER_CERTIFICATE_FILE": mine[0], "KVXFER_KEY_FILE": mine[1]}
    for more, status, words in (
        (files, 0, "CN:eyes"),
        ({"KVXFER_CERTIFICATE_FILE": "/nowhere"}, 2, "/nowhere"),
    ):
        done = subprocess.run(
            [*ask, place.daemon.url, "--ca-file", str(place.trusted.file)],
            **run,  # type: ignore[call-overload]
            env={**os.environ, **more},
        )
        assert done.returncode == status, done.stderr
        assert words in done.stdout + done.stderr


async def test_what_was_opened_with_a_certificate_ends_when_that_expires(served: Served) -> None:
    asked = {"name": "x", "certificate": "CN:a"}
    async with served.unix() as client:
        made = (await client.post("/v1/tokens", json=asked)).json()
    access = served.daemon.access
    caller = access.of_certificate(ClientCertificate("d" * 64, frozenset({"CN:a"}), 1e12))
    assert caller is not None
    assert (caller.key, access.is_valid(caller)) == (f"token:{made['id']}", True)
    assert not access.is_valid(replace(caller, until_s=1.0))


def test_a_certificate_that_expires_is_nobodys_from_then_on() -> None:
    kept = TokenRecord("1" * 16, "x", "read", None, "", 0.0, 50.0, "CN:a")
    tokens = Tokens([TokenRecord.from_dict(json.loads(json.dumps(kept.to_dict())))])
    for until_s, now_s, is_let_in in ((100.0, 10.0, True), (10.0, 10.0, False), (100.0, 50.0, False)):
        certificate = ClientCertificate("d" * 64, frozenset({"CN:a"}), until_s)
        caller = tokens.of_certificate(certificate, now_s)
        assert (caller is not None) == is_let_in, (until_s, now_s)
    for secret in ("", f"kvx_{'1' * 16}_", f"kvx_{'1' * 16}_x"):
        assert tokens.find(secret, 1.0) is None, "it has no secret"
    # A token stored by a version without certificates.
    old = {name: value for name, value in kept.to_dict().items() if name != "certificate"}
    assert TokenRecord.from_dict(old).certificate is None
