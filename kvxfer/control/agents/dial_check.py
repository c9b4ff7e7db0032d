"""Whether the daemon may have an agent dial the address that a request names."""

from __future__ import annotations

from kvxfer.address import SCHEME, Address
from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.control.schema.problems import Refusal
from kvxfer.errors import UsageError


def require_allowed(allowed: AllowedHosts, agent: str) -> None:
    """Refuses an address that is not permitted; accepts a name or an id, because it is not dialled here.

    Raises
    ------
    Refusal
        ``forbidden``; also for an address that is not of an agent.
    """
    if "://" not in agent:
        return
    if not agent.startswith(SCHEME):
        raise Refusal("forbidden", f"{agent!r} is not an agent's address: write {SCHEME}host:port")
    try:
        host = Address.parse(agent, "the address").host
    except UsageError as error:
        raise Refusal("forbidden", str(error)) from None
    if not allowed.allow(host):
        raise Refusal(
            "forbidden", f"host {host} is not one that this daemon may dial ({allowed}): see --allow"
        )
