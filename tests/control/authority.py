"""An authority of a test's own for REST: the program openssl makes its files."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.control.serving import BOUND_S

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


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

    def of_node(self) -> tuple[str, str]:
        """Returns the files of a certificate of 127.0.0.1, and of its key."""
        return self.sign("node", "/CN=node", "IP:127.0.0.1")
