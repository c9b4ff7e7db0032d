"""Who may connect to agents of this user, and read their pages."""

from __future__ import annotations

import os
from pathlib import Path

from kvxfer.doctor.finding import Finding, State
from kvxfer.errors import UsageError
from kvxfer.options import find_secret
from kvxfer.session.user_secret import SECRET_FILE, existing_secret, secret_folder

SUBJECT = "access"

_WHY = "a peer that is handed shared memory can read every page of it without a lease"


def examine(root: Path) -> list[Finding]:
    """Says it of agents that are made in this environment without options; makes no secret."""
    try:
        given, own = find_secret(None), existing_secret()
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
    if given:
        origin = "KVXFER_SECRET" if "KVXFER_SECRET" in os.environ else "KVXFER_SECRET_FILE"
        return [
            Finding(
                SUBJECT,
                "who may connect",
                State.NOTE,
                f"whoever knows the secret of {origin}, as any user, from any host that reaches an agent",
                "peers prove the secret; what crosses the network is not encrypted",
            ),
            Finding(
                SUBJECT,
                "who can read every page",
                State.NOTE,
                f"processes of {user} on this host; others that know the secret read leased pages alone",
                _WHY,
                'shm_peers="secret" hands it to other users of this host that know the secret',
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
