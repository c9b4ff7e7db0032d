"""An authority of a test's own, and what it issues: files in PEM, with names as a test wants them."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvxfer import Tls

_DAY = datetime.timedelta(days=1)
_numbers = itertools.count()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Issues certificates into a folder, and revokes them."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._revoked: list[x509.RevokedCertificate] = []
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            self._name,
            self._name,
            self._key.public_key(),
            x509.random_serial_number(),
            now - _DAY,
            now + 30 * _DAY,
        )
        self._certificate = builder.add_extension(x509.BasicConstraints(True, None), True).sign(
            self._key, SHA256()
        )
        self.authorities = folder / f"{name}.pem"
        self.authorities.write_bytes(self._certificate.public_bytes(Encoding.PEM))
        self.revoked = folder / f"{name}.crl"
        self._write_revoked()

    def issue(
        self,
        *uris: str,
        days: tuple[float, float] = (-1.0, 1.0),
        allow: Sequence[str] = (),
        revoked: bool = False,
        into: Tls | None = None,
    ) -> Tls:
        """Returns a certificate with these names, valid from and until so many days from now.

        ``revoked``: the list of revoked ones is looked at. ``into``: in the files of that one.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        start, end = (now + days_from_now * _DAY for days_from_now in days)
        builder = x509.CertificateBuilder(
            self._name, _name("agent"), key.public_key(), x509.random_serial_number(), start, end
        )
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        certificate = builder.add_extension(x509.SubjectAlternativeName(names), False).sign(
            self._key, SHA256()
        )
        stem = self._folder / f"agent-{next(_numbers)}"
        tls = into or Tls(
            stem.with_suffix(".pem"),
            stem.with_suffix(".key"),
            self.authorities,
            self.revoked if revoked else None,
            tuple(allow),
        )
        Path(tls.certificate).write_bytes(certificate.public_bytes(Encoding.PEM))
        Path(tls.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return tls

    def revoke(self, tls: Tls) -> None:
        """Puts it on the list."""
        certificate = x509.load_pem_x509_certificate(Path(tls.certificate).read_bytes())
        now = datetime.datetime.now(datetime.UTC)
        self._revoked.append(x509.RevokedCertificateBuilder(certificate.serial_number, now - _DAY).build())
        self._write_revoked()

    def _write_revoked(self) -> None:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder(self._name, now - _DAY, now + 30 * _DAY)
        for entry in self._revoked:
            builder = builder.add_revoked_certificate(entry)
        self.revoked.write_bytes(builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
