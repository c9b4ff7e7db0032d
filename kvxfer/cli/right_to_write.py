"""A lease to write blocks, granted for one command to a session of two agents, which is opened if needed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvxfer.errors import TransferError

if TYPE_CHECKING:
    from kvxfer.cli.region_reference import PlacedRegion
    from kvxfer.control import schema
    from kvxfer.control.client.rest_client import Client

_LOOK_S = 0.05
# Agents report a session within half a second.
_TOLD_S = 15.0


@contextmanager
def right_to_write(into: PlacedRegion, client: Client, writer: schema.Agent, ttl_s: float) -> Iterator[str]:
    """Lends the token of a lease to write blocks; the lease ends with the ``with`` block.

    Parameters
    ----------
    into
        The region, and which of its blocks.
    client, writer
        The daemon, and the attached agent that will write.
    """
    from kvxfer.control import schema

    lease = into.client.grant_lease(
        schema.LeaseRequest(
            agent=into.agent.id,
            region=into.region.name,
            blocks=into.blocks,
            mode="write",
            holder=_session(into, client, writer),
            ttl_s=ttl_s,
        )
    )
    try:
        yield lease.token
    finally:
        revoke_quietly(into.client, lease.id)


def revoke_quietly(client: Client, lease: str) -> None:
    """Ends a lease; reports a failure on stderr."""
    from kvxfer.control.client.client_error import ControlError

    try:
        client.revoke_lease(lease)
    except ControlError as error:
        if error.code not in ("not-found", "lease-ended"):
            print(f"kvxfer: lease {lease} could not be revoked, and will expire: {error}", file=sys.stderr)


def _session(into: PlacedRegion, client: Client, writer: schema.Agent) -> int:
    """Returns the number that the region's agent has for the session that the writer will use."""
    from kvxfer.control import schema

    if (found := _open_session(into, writer)) is None:
        remote = into.agent.address or into.agent.id
        client.connect_agent(writer.id, schema.ConnectRequest(remote_agent=remote))
    until_s = time.monotonic() + _TOLD_S
    while found is None:
        if time.monotonic() > until_s:
            raise TransferError(
                f"{into.agent.name} did not report a session with {writer.name} in time", code="deadline"
            )
        time.sleep(_LOOK_S)
        found = _open_session(into, writer)
    return found


def _open_session(into: PlacedRegion, writer: schema.Agent) -> int | None:
    from kvxfer.peer import place_of_caller

    found = [
        # A session that the region's agent has opened has the address that it dialled.
        (place_of_caller(into.agent.id, writer.id, is_ours=bool(peer.address)), peer.session)
        for peer in into.client.peers(into.agent.id)
        if peer.id == writer.id
    ]
    return min(found)[1] if found else None
