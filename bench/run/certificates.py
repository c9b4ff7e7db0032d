"""A certificate for both ends of one measurement, which believe nobody else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kvxfer import Tls
from kvxfer.bench.errors import BenchError


def self_signed(folder: Path) -> Tls:
    """Makes it in a folder, for agents of any name, valid for a day.

    Raises
    ------
    BenchError
        There is no ``openssl`` program, or it is older than 1.1.1.
    """
    if (program := shutil.which("openssl")) is None:
        raise BenchError("the openssl program makes the certificates: install openssl")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=kvxfer bench", "-keyout", str(key), "-out", str(certificate)]
    command += ["-addext", "subjectAltName=URI:kvxfer://bench/pages"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise BenchError(f"{program} made no certificate: {made.stderr.strip()}")
    return Tls(certificate, key, certificate)
