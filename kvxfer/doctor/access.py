"""Who may connect to agents of this user, and read their pages."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from kvxfer.doctor.finding import Finding, State
from kvxfer.errors import UsageError, invalid
from kvxfer.session.user_secret import SECRET_FILE, existing_secret, secret_folder
from kvxfer.shared_secret import FILE_VARIABLE, VALUE_VARIABLE, find_secrets
from kvxfer.tls import Tls

SUBJECT = "access"

_WHY = "a peer that is handed shared memory can read every page of it without a lease"

_INHERITED = Finding(
    SUBJECT,
    "who is told the secret",
    State.NOTE,
    f"every program that an engine starts: it is in the environment ({VALUE_VARIABLE})",
    "a value in the environment is inherited, shown by /proc, and cannot be changed while agents run",
    f"{FILE_VARIABLE}, naming a file of mode 0600; agents read it again where it changes",
)


def kernel_tls() -> tuple[str, str]:
    """What the kernel offers, and why it is nothing."""
    try:
        found: tuple[str, str] = importlib.import_module("kvxfer._native").kernel_tls()
    except ImportError as error:  # another finding says it
        return "nothing", str(error)
    return found


def _who_encrypts(tls: Tls) -> Finding:
    """Says it of pages over TCP."""
    offer, why = kernel_tls()
    what = "who encrypts pages over TCP"
    if tls.kernel == "always" and offer == "nothing":
        return Finding(
            SUBJECT,
            what,
            State.BLOCKS,
            f"nobody, agents do not start: the kernel is to, and does not: {why}",
            "KVXFER_TLS_KERNEL is always",
            "modprobe tls, or KVXFER_TLS_KERNEL=auto",
        )
    if tls.kernel == "always" or (tls.kernel == "auto" and offer == "new-keys"):
        said = "the kernel (kTLS)"
        if offer == "one-key":
            said += "; it renews no keys, so a rail ends, and is made anew, every 256 GiB"
        return Finding(SUBJECT, what, State.GOOD, said, "no copy is made in between")
    reason = {
        "nothing": why,
        "one-key": "the kernel renews no keys (6.14 does)",
        "new-keys": "as asked",
    }
    return Finding(
        SUBJECT, what, State.NOTE, f"this process: {reason[offer]}", "each page is copied once on its way out"
    )


def examine(root: Path) -> list[Finding]:
    """Says it of agents that are made in this environment without options; makes no secret."""
    try:
        given, own, tls = find_secrets(None), existing_secret(), Tls.of_environment()
        if tls is not None and given.accepted:
            raise invalid("certificates (KVXFER_TLS_CERTIFICATE) and a secret are both given: unset one")
    except UsageError as error:
        return [
            Finding(
                SUBJECT,
                "who may connect",
                State.BLOCKS,
                f"nobody, agents do not start: {error}",
                _WHY,
                "do what the message says",
            )
        ]
    user = f"user {os.geteuid()}"
    if tls is not None:
        allowed = ", ".join(tls.allow) or "its own tenant"
        return [
            Finding(
                SUBJECT,
                "who may connect",
                State.GOOD,
                f"agents with certificates of {tls.authorities}, of {allowed}",
                "what goes over TCP is encrypted; pages over RDMA (verbs), UCX, libfabric or on one host "
                "are not",
            ),
            Finding(
                SUBJECT,
                "who can read every page",
                State.NOTE,
                f"processes of {user} on this host that it allows; others read leased pages alone",
                _WHY,
            ),
            _who_encrypts(tls),
        ]
    if given.accepted:
        by_value = given.variable == VALUE_VARIABLE
        known = "one of the two secrets" if given.second else "the secret"
        return [
            Finding(
                SUBJECT,
                "who may connect",
                State.NOTE,
                f"whoever knows {known} of {given.variable}, as any user, "
                "from any host that reaches an agent",
                "peers prove the secret; what crosses the network is not encrypted",
            ),
            *([_INHERITED] if by_value else []),
            Finding(
                SUBJECT,
                "who can read every page",
                State.NOTE,
                f"processes of {user} on this host; others that know the secret read leased pages alone",
                _WHY,
                'AgentOptions(shm_peers="secret") hands it to other users of this host that know the secret',
            ),
        ]
    kept = f"{secret_folder() / SECRET_FILE} ({'there' if own else 'made by the first agent'})"
    return [
        Finding(
            SUBJECT,
            "who may connect",
            State.GOOD,
            f"processes of {user} on this host, by {kept}",
            "other users and other hosts need a secret that both ends are given",
            "for others: openssl rand -hex 32 > secret, and KVXFER_SECRET_FILE at both ends",
        ),
        Finding(SUBJECT, "who can read every page", State.NOTE, f"processes of {user} on this host", _WHY),
    ]
