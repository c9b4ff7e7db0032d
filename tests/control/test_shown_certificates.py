"""When the daemon's certificates expire: real ones, as their files say it and as /metrics tells it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from kvxfer.control.shown_certificates import ShownCertificates, expiry_of
from tests.certificates import Authority
from tests.control.serving import BOUND_S, Program, program
from tests.control.test_client_certificates import Authority as Issuer
from tests.control.waiting import until

GAUGE = re.compile(r'^kvxfer_certificate_expires_seconds\{use="(\w+)"\} (\S+)$', re.MULTILINE)


def ends(*files: str | os.PathLike[str]) -> float:
    """Returns the first end of the files' certificates, as another library reads it."""
    pem = b"".join(Path(each).read_bytes() for each in files)
    return min(each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(pem))


def shown(daemon: Program, authorities: Path | None = None) -> dict[str, float]:
    verify = ssl.create_default_context(cafile=authorities) if authorities else True
    headers = {"Authorization": f"Bearer {daemon.token}"}
    with httpx.Client(base_url=daemon.url, verify=verify, headers=headers, timeout=BOUND_S) as client:
        return {use: float(at_s) for use, at_s in GAUGE.findall(client.get("/metrics").text)}


@pytest.mark.parametrize("days", [-0.5, 0.01, 20.0, 9_000.0, 365.0 * 500], ids=str)
def test_it_is_when_openssl_says(tmp_path: Path, days: float) -> None:
    """From 2050 on a certificate writes its times in another form."""
    file = Path(Authority(tmp_path).issue("URI:node", days=(-1.0, days)).certificate)
    told = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", file], capture_output=True, text=True, check=True
    )
    end = told.stdout.strip().removeprefix("notAfter=")
    assert expiry_of(file) == ends(file)
    assert expiry_of(file) == ssl.cert_time_to_seconds(end)


@pytest.mark.parametrize("first", [0, 1])
def test_of_a_chain_the_first_that_ends_counts(tmp_path: Path, first: int) -> None:
    authority = Authority(tmp_path)
    files = [authority.issue("URI:a", days=(-1.0, days)).certificate for days in (3.0, 2.0)]
    chain = tmp_path / "chain.pem"
    chain.write_text(
        "text before\n" + "\n".join(Path(files[each]).read_text() for each in (first, 1 - first))
    )
    assert expiry_of(chain) == ends(files[1])


def test_a_file_that_holds_none_is_refused_in_words(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("URI:a")
    with pytest.raises(ValueError, match="holds no certificate"):
        expiry_of(Path(tls.key))
    whole = ssl.PEM_cert_to_DER_cert(Path(tls.certificate).read_text())
    for length in range(len(whole)):  # cut anywhere, it has an end or is refused
        (tmp_path / "cut.pem").write_text(ssl.DER_cert_to_PEM_cert(whole[:length]))
        found = ends(tls.certificate)
        with suppress(ValueError):
            found = expiry_of(tmp_path / "cut.pem")
        assert found == ends(tls.certificate)


def test_what_was_read_last_stays_and_the_reason_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(Authority(tmp_path).issue("URI:a").certificate)
    certificates = ShownCertificates()
    asyncio.run(certificates.add_agent(file))
    before = dict(certificates.expires_at_s)
    file.write_text("half of it")
    with caplog.at_level(logging.WARNING):
        asyncio.run(certificates.refresh())
        asyncio.run(certificates.refresh())
    assert certificates.expires_at_s == before == {"agent": before["agent"]}
    assert [line.getMessage() for line in caplog.records] == [
        f"kvxfer_certificate_expires_seconds of agent is not up to date: {file} holds no certificate in PEM"
    ]


def test_metrics_have_both_and_follow_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = Issuer(tmp_path / "rest")
    cert, key = issuer.sign("node", "/CN=node", "IP:127.0.0.1", days=5)
    authority = Authority(tmp_path)
    tls = authority.issue("kvxfer://acme/daemons", days=(-1.0, 2.0))
    monkeypatch.setenv("KVXFER_TLS_CERTIFICATE", str(tls.certificate))
    monkeypatch.setenv("KVXFER_TLS_KEY", str(tls.key))
    monkeypatch.setenv("KVXFER_TLS_AUTHORITIES", str(tls.authorities))
    for name in ("KVXFER_SECRET", "KVXFER_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    with program(tmp_path, "--tls-certificate", cert, "--tls-key", key, agent=True) as daemon:
        first = {"rest": ends(cert), "agent": ends(tls.certificate)}
        assert shown(daemon, issuer.file) == first
        authority.issue("kvxfer://acme/daemons", days=(-1.0, 9.0), into=tls)
        issuer.sign("node", "/CN=node", "IP:127.0.0.1", days=50)
        assert ends(cert) > first["rest"]
        assert ends(tls.certificate) > first["agent"]
        then = {"rest": ends(cert), "agent": ends(tls.certificate)}
        until(lambda: shown(daemon, issuer.file) == then, "the new certificates are not shown")


def test_a_daemon_without_certificates_shows_none(tmp_path: Path) -> None:
    with program(tmp_path) as daemon:
        assert shown(daemon) == {}
