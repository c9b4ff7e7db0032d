"""Addresses: where an agent listens, and where peers reach it, as ``"tcp://host:port"``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvxfer.errors import UsageError, invalid

#: Scheme of the addresses that agents listen on.
SCHEME: Final = "tcp://"
#: A host's name has 253 bytes at most.
MAX_NBYTES: Final = 300
# The same grammar here and in the code that dials: no user part, no path, no control character.
_PATTERN: Final = re.compile(
    r"tcp://(?:\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?"
)
_WITHOUT_SCHEME: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):[0-9]{1,5}")
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# Addresses for documentation (RFC 5737, RFC 3849). No host has them, so their route is the default route.
_ANYWHERE: Final = {"0.0.0.0": ("192.0.2.1",), "::": ("2001:db8::1", "192.0.2.1")}


def is_without_scheme(text: str) -> bool:
    """Whether a text looks like an address without its scheme, e.g. ``"node-a:7301"``."""
    return _WITHOUT_SCHEME.fullmatch(text) is not None


class Address(NamedTuple):
    """A host, numeric or a name, without brackets; and its port, or None."""

    host: str
    port: int | None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}" if self.port is None else f"{SCHEME}{host}:{self.port}"

    @classmethod
    def parse(cls, text: str, what: str, *, port_needed: bool = True) -> Address:
        """Reads ``"tcp://host:port"``; `what` begins the error message.

        Raises
        ------
        UsageError
            ``invalid-argument``: `text` is not an address.
        """
        found = _PATTERN.fullmatch(text) if isinstance(text, str) and len(text) <= MAX_NBYTES else None
        if found is None or int(found[3] or 0) > 65535 or (port_needed and found[3] is None):
            form = '"tcp://host:port"' if port_needed else '"tcp://host:port" or "tcp://host"'
            raise invalid(f"{what} is {text!r:.300}: write {form}")
        host: str = found[1] or found[2]
        if host.lower().startswith("::ffff:") and "." in host:
            host = host[7:]  # IPv4, as a socket of IPv6 spells it
        return cls(host, None if found[3] is None else int(found[3]))

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every address of the host, so that it cannot be dialled."""
        import socket

        for family, read in ((socket.AF_INET6, socket.inet_pton), (socket.AF_INET, _inet_aton)):
            try:
                return not any(read(family, self.host))
            except OSError:
                pass
        return False

    @property
    def is_loopback(self) -> bool:
        """Whether only this host reaches it.

        Names other than ``localhost`` are not resolved here; for them it is False.
        """
        from ipaddress import ip_address

        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def published(listening: str, advertise: str | None) -> tuple[str, str]:
    """Returns the address at which peers reach an agent, and a note for its user.

    Parameters
    ----------
    listening
        The native agent's address; ``""`` for none.
    advertise
        The checked option. If it names no port, the port is the one that the agent listens on.
    """
    if not listening:
        return "", ""
    here = Address.parse(listening, "address")
    if advertise is not None:
        told = Address.parse(advertise, "option advertise", port_needed=False)
        return str(told._replace(port=here.port) if told.port is None else told), ""
    if not here.is_wildcard:
        return listening, ""
    for far in _ANYWHERE[here.host]:
        if (host := _route_to(here, far)) is not None:
            return str(here._replace(host=host)), ""
    attached = (host for far in _attached() if (host := _route_to(here, far)) is not None)
    host = next(attached, _LOOPBACK[here.host])
    return str(here._replace(host=host)), (
        f"it listens on {listening}, and this host has no default route that tells the address at which "
        f"peers reach it: it publishes {host}; set advertise= if peers cannot reach that"
    )


def published_towards(listening: str, far: Address) -> str:
    """Returns the address at which `far` reaches an agent that listens on a wildcard, by the route to `far`.

    Raises
    ------
    UsageError
        ``invalid-argument``: `far` is a name. ``unsupported``: there is no route to it.
    """
    here = Address.parse(listening, "address")
    from ipaddress import ip_address

    try:
        ip_address(far.host)
    except ValueError:
        raise invalid(f"{far.host!r} is a name, so its route is not known: give a numeric address") from None
    if (host := _route_to(here, far.host)) is None:
        raise UsageError(
            f"{far.host} cannot reach an agent that listens on {listening}: there is no route between them, "
            "or the agent listens on IPv4 or IPv6 only",
            code="unsupported",
        )
    return str(here._replace(host=host))


def _attached() -> Iterator[str]:
    """Yields an address in each IPv4 network of this host, ordered by the routes' metrics."""
    import socket
    from pathlib import Path

    try:
        rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return
    for row in sorted(rows, key=lambda row: int(row[6])):
        # In host byte order. The network's own address is not a host's.
        network = socket.ntohl(int(row[1], 16))
        if row[0] != "lo" and network:
            yield socket.inet_ntoa((network + 1).to_bytes(4, "big"))


def _inet_aton(family: int, host: str) -> bytes:
    """Accepts what dialling would accept, including ``"0"`` and ``"0x0.0"``."""
    import socket

    return socket.inet_aton(host)


def _route_to(here: Address, far: str) -> str | None:
    """Returns the address of this host from which packets to `far` leave; sends none."""
    import socket

    family = socket.AF_INET6 if ":" in far else socket.AF_INET
    listens_on = socket.AF_INET6 if ":" in here.host else socket.AF_INET
    if family != listens_on and (listens_on == socket.AF_INET or _is_ipv6_alone()):
        return None
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 1))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_ipv6_alone() -> bool:
    """Returns whether a socket that listens on ``[::]`` refuses IPv4."""
    from pathlib import Path

    try:
        return Path("/proc/sys/net/ipv6/bindv6only").read_text().strip() == "1"
    except OSError:
        return False
