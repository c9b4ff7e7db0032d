"""TLS options: certificates that authenticate agents, and encryption of traffic between hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvxfer.errors import invalid

_VARIABLES: Final = {
    "certificate": "KVXFER_TLS_CERTIFICATE",
    "key": "KVXFER_TLS_KEY",
    "authorities": "KVXFER_TLS_AUTHORITIES",
    "revoked": "KVXFER_TLS_REVOKED",
    "allow": "KVXFER_TLS_ALLOW",
    "kernel": "KVXFER_TLS_KERNEL",
}
_KERNEL: Final = ("auto", "always", "never")


@dataclass(frozen=True, slots=True)
class Tls:
    """An agent's certificate files, in PEM, and the peers that it accepts.

    With certificates an agent opens and accepts sessions only over TCP with TLS 1.3, in which both ends show
    a certificate. Control frames and the pages of ``tcp`` rails are encrypted. Pages over ``shm`` and
    ``unix`` stay on one host, where the kernel protects them. ``verbs`` carries pages unencrypted. An agent
    has certificates or a secret, never both. An agent with certificates refuses a peer without one.

    Attributes
    ----------
    certificate
        The agent's own certificate, followed by those that lead to an authority. Its alternative names
        include a URI ``kvxfer://TENANT/ENGINE/AGENT``, where AGENT is the agent's name, or
        ``kvxfer://TENANT/ENGINE`` for every agent of an engine. Both calling and called agents show it, so an
        extended key usage, if present, must name both.
    key
        Its private key, without a password.
    authorities
        Certificates of the authorities that may have issued a peer's certificate.
    revoked
        Revocation lists (CRL) of each authority; None: revocation is not checked.
    allow
        Patterns ``TENANT/ENGINE/AGENT`` with stars, for peers that may open a session or be called. Empty:
        peers of the own certificate's tenant.
    kernel
        Whether the kernel encrypts pages over TCP (kTLS). "auto": if the kernel can renew a connection's
        keys, from Linux 6.14 on. "always": also with older kernels, where a rail ends and is made anew every
        256 GiB. "never": not at all. Each end decides for itself, because the bytes on the network are the
        same.

    Notes
    -----
    The agent reads the files when it is made, when `Agent.reload_certificates` is called, and when they
    change. Open sessions keep the certificates with which they began.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authorities: str | os.PathLike[str]
    revoked: str | os.PathLike[str] | None = None
    allow: tuple[str, ...] = ()
    kernel: Literal["auto", "always", "never"] = "auto"

    @classmethod
    def of_environment(cls) -> Tls | None:
        """Returns the options that ``KVXFER_TLS_CERTIFICATE``, ``_KEY``, ``_AUTHORITIES`` and the others set.

        The others are ``_REVOKED``, ``_ALLOW`` (patterns separated by spaces), and ``_KERNEL``. None if none
        of them is set.

        Raises
        ------
        UsageError
            ``invalid-argument``: one of the first three is missing.
        """
        found: dict[str, Any] = {
            name: os.environ[said] for name, said in _VARIABLES.items() if said in os.environ
        }
        if not found:
            return None
        for name in ("certificate", "key", "authorities"):
            if not found.get(name):
                others = ", ".join(_VARIABLES[other] for other in found)
                raise invalid(f"{_VARIABLES[name]} is not set, but {others} is: certificates need all three")
        if (kernel := found.get("kernel") or "auto") not in _KERNEL:
            raise invalid(f"{_VARIABLES['kernel']} is {kernel!r}, not one of {', '.join(_KERNEL)}")
        return cls(
            found["certificate"],
            found["key"],
            found["authorities"],
            found.get("revoked") or None,
            tuple(found.get("allow", "").split()),
            kernel,
        )

    def to_native(self) -> dict[str, Any]:
        """Returns the native form: absolute paths, so that a later change of folder has no effect."""
        from pathlib import Path  # an import that agents with a secret, i.e. most of them, do not need

        from kvxfer.arguments import check_kind  # loads native code, which reading options must not need

        shown = "the path of a file in PEM"
        for name in ("certificate", "key", "authorities"):
            check_kind(getattr(self, name), f"tls {name}", str | os.PathLike, shown)
        check_kind(self.revoked, "tls revoked", str | os.PathLike | None, shown + ", or None")
        check_kind(self.allow, "tls allow", tuple | list, 'patterns, such as ("acme/prefill-*/*",)')
        for pattern in self.allow:
            check_kind(pattern, "tls allow", str, 'a pattern, such as "acme/prefill-*/*"')
        if self.kernel not in _KERNEL:
            raise invalid(f"tls kernel is {self.kernel!r}, not one of {', '.join(_KERNEL)}")
        return {
            "kernel": self.kernel,
            "certificate": str(Path(self.certificate).absolute()),
            "key": str(Path(self.key).absolute()),
            "authorities": str(Path(self.authorities).absolute()),
            "revoked": "" if self.revoked is None else str(Path(self.revoked).absolute()),
            "allow": list(self.allow),
        }
