"""Certificates by which agents prove who they are, and that encrypt what goes between hosts."""

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
    """Files of an agent's certificates, in PEM, and the peers that it has to do with.

    With them an agent takes and makes sessions over TCP alone, by TLS 1.3, where both ends show a
    certificate; control frames and the pages of ``tcp`` rails are encrypted. Pages that go by ``shm`` and
    ``unix`` stay on one host, where the kernel keeps them; ``verbs`` carries pages as they are. An agent has
    certificates or a secret, never both, and one that has certificates refuses a peer that has none.

    Attributes
    ----------
    certificate
        The agent's own, and then those that lead to an authority. Among its alternative names is a URI
        ``kvxfer://TENANT/ENGINE/AGENT``, or ``kvxfer://TENANT/ENGINE`` for every agent of an engine: the
        agent's name is that AGENT. It is shown by an agent that calls and by one that is called: an extended
        key usage, where there is one, names both.
    key
        Its private key, without a password.
    authorities
        Certificates of those who may have issued a peer's.
    revoked
        Lists (CRL) of what each of them has revoked; None: none is looked at.
    allow
        Patterns ``TENANT/ENGINE/AGENT`` with stars, of peers that may open a session or be called. Empty:
        those of the own certificate's tenant.
    kernel
        Whether the kernel encrypts pages over TCP (kTLS): "auto" where it renews a connection's keys, from
        Linux 6.14 on; "always" also before, where a rail ends, and is made anew, every 256 GiB; "never". Each
        end decides for itself: what goes over the network is the same.

    Notes
    -----
    The files are read when the agent is made, and again by `Agent.reload_certificates` and where they change.
    Sessions that are open go on with what they began with.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authorities: str | os.PathLike[str]
    revoked: str | os.PathLike[str] | None = None
    allow: tuple[str, ...] = ()
    kernel: Literal["auto", "always", "never"] = "auto"

    @classmethod
    def of_environment(cls) -> Tls | None:
        """Returns what ``KVXFER_TLS_CERTIFICATE``, ``_KEY``, ``_AUTHORITIES`` and the others say.

        These are ``_REVOKED``, ``_ALLOW``, which has patterns with spaces between, and ``_KERNEL``. None
        where none of them is set.

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
        return cls(
            found["certificate"],
            found["key"],
            found["authorities"],
            found.get("revoked") or None,
            tuple(found.get("allow", "").split()),
            found.get("kernel") or "auto",
        )

    def to_native(self) -> dict[str, Any]:
        """Returns what native code takes: absolute paths, so that a change of folder changes nothing."""
        from pathlib import Path  # which costs more than most agents, who have a secret, need

        from kvxfer.arguments import check_kind  # by native code, without which options can be read

        shown = "the path of a file in PEM"
        for name in ("certificate", "key", "authorities"):
            check_kind(getattr(self, name), f"tls {name}", str | os.PathLike, shown)
        check_kind(self.revoked, "tls revoked", str | os.PathLike | None, shown + ", or None")
        check_kind(self.allow, "tls allow", tuple | list, 'patterns, such as ("acme/prefill-*/*",)')
        for pattern in self.allow:
            check_kind(pattern, "tls allow", str, 'a pattern, such as "acme/prefill-*/*"')
        if self.kernel not in _KERNEL:
            raise invalid(f"tls kernel is {self.kernel!r}, and not one of {', '.join(_KERNEL)}")
        return {
            "kernel": self.kernel,
            "certificate": str(Path(self.certificate).absolute()),
            "key": str(Path(self.key).absolute()),
            "authorities": str(Path(self.authorities).absolute()),
            "revoked": "" if self.revoked is None else str(Path(self.revoked).absolute()),
            "allow": list(self.allow),
        }
