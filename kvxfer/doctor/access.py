"""Which processes may connect to agents of this user, and read their pages."""

from __future__ import annotations

import importlib
import os
import shlex
import stat
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
    "programs that inherit the secret",
    State.NOTE,
    f"every program that an engine starts: it is in the environment ({VALUE_VARIABLE})",
    "a value in the environment is inherited, shown by /proc, and cannot be changed while agents run",
    f"set {FILE_VARIABLE} to a file of mode 0600 instead; agents read it again when it changes",
)


def _open_file(path: Path) -> list[Finding]:
    """Reports a file of secrets that every user of this host can read."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:  # another finding reports it
        return []
    if not mode & stat.S_IROTH:
        return []
    return [
        Finding(
            SUBJECT,
            "who can read the secret",
            State.LIMITS,
            f"every user of this host: {path} has mode {mode:04o}",
            "a user that knows the secret can connect to every agent that accepts it, and name any peer",
            f"chmod 600 {shlex.quote(str(path))}",
        )
    ]


def kernel_tls() -> tuple[str, str]:
    """Returns what the kernel offers for TLS, and why it offers nothing."""
    try:
        found: tuple[str, str] = importlib.import_module("kvxfer._native").kernel_tls()
    except ImportError as error:  # another finding reports it
        return "nothing", str(error)
    return found


def _who_encrypts(tls: Tls) -> Finding:
    """Says whether the kernel or the process encrypts pages over TCP."""
    offer, why = kernel_tls()
    what = "who encrypts pages over TCP"
    if tls.kernel == "always" and offer == "nothing":
        return Finding(
            SUBJECT,
            what,
            State.BLOCKS,
            f"agents do not start: the kernel must encrypt, and cannot: {why}",
            "KVXFER_TLS_KERNEL is always",
            "modprobe tls, or KVXFER_TLS_KERNEL=auto",
        )
    if tls.kernel == "always" or (tls.kernel == "auto" and offer == "new-keys"):
        said = "the kernel (kTLS)"
        if offer == "one-key":
            said += "; it does not renew keys, so each rail is replaced every 256 GiB"
        return Finding(SUBJECT, what, State.GOOD, said, "pages are sent without an extra copy")
    reason = {
        "nothing": why,
        "one-key": "the kernel does not renew keys (Linux 6.14 does)",
        "new-keys": "as asked",
    }
    return Finding(
        SUBJECT, what, State.NOTE, f"this process: {reason[offer]}", "each page is copied once on its way out"
    )


def examine(root: Path) -> list[Finding]:
    """Examines agents that are made in this environment without options; does not make a secret."""
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
                f"agents do not start: {error}",
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
                f"agents with a certificate issued by {tls.authorities} for {allowed}",
                "traffic over TCP is encrypted; pages over RDMA (verbs), UCX, libfabric or on one "
                "host are not",
            ),
            Finding(
                SUBJECT,
                "who can read every page",
                State.NOTE,
                f"processes of {user} on this host with an allowed certificate; other peers read "
                "leased pages only",
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
                f"any process that knows {known} of {given.variable}, of any user, on any host that "
                "reaches an agent",
                "peers prove that they know the secret; traffic over the network is not encrypted",
            ),
            *([_INHERITED] if by_value else []),
            *(_open_file(Path(given.file)) if given.file else ()),
            Finding(
                SUBJECT,
                "who can read every page",
                State.NOTE,
                f"processes of {user} on this host; other peers that know the secret read leased pages only",
                _WHY,
                'AgentOptions(shm_peers="secret") also hands it to other users of this host that know '
                "the secret",
            ),
        ]
    kept = f"{secret_folder() / SECRET_FILE}{'' if own else ', which the first agent makes'}"
    return [
        Finding(
            SUBJECT,
            "who may connect",
            State.GOOD,
            f"processes of {user} on this host, which read the secret in {kept}",
            "for other users and other hosts, both ends need the same secret",
            "for others: openssl rand -hex 32 > secret, and KVXFER_SECRET_FILE at both ends",
        ),
        Finding(SUBJECT, "who can read every page", State.NOTE, f"processes of {user} on this host", _WHY),
    ]
