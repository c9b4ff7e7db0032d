"""A daemon's certificate is renewed while it runs: real TLS, a real daemon in another process."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import httpx

from tests.control.serving import BOUND_S, program
from tests.control.test_client_certificates import Authority
from tests.control.waiting import until


def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    """Also if the pair is replaced file by file, which for a moment are of no use together."""
    issuer = Authority(tmp_path / "ca")
    files = [Path(each) for each in issuer.sign("node", "/CN=node", "IP:127.0.0.1")]
    new = [Path(each) for each in issuer.sign("renewed", "/CN=node", "IP:127.0.0.1")]
    wanted = [ssl.PEM_cert_to_DER_cert(each[0].read_text()) for each in (files, new)]
    context = ssl.create_default_context(cafile=str(issuer.file))
    with program(tmp_path, "--tls-certificate", str(files[0]), "--tls-key", str(files[1])) as daemon:
        host, port = daemon.url.removeprefix("https://").split(":")

        def shown() -> bytes | None:
            with (
                socket.create_connection((host, int(port)), BOUND_S) as plain,
                context.wrap_socket(plain, server_hostname=host) as secured,
            ):
                return secured.getpeercert(binary_form=True)

        with httpx.Client(base_url=daemon.url, verify=context, timeout=BOUND_S) as client:
            assert client.get("/healthz").status_code == 200
            assert shown() == wanted[0]
            new[0].replace(files[0])

            def has_complained() -> bool:
                assert shown() == wanted[0]
                return any("REST keeps its certificate" in line for line in daemon.said)

            until(has_complained, "it does not say that the files do not fit")
            new[1].replace(files[1])
            until(lambda: shown() == wanted[1], "the new certificate is not shown")
            assert client.get("/healthz").status_code == 200, "the open connection goes on"
        complaints = [line for line in daemon.said if "REST keeps its certificate" in line]
        assert len(complaints) == 1
        assert "is not the key of --tls-certificate" in complaints[0]
