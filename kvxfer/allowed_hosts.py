"""Limits the hosts that may be dialled when an outside party names them, e.g. in a request."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from kvxfer.errors import PeerError, TransferError

# Everyone who may send a request can name hosts in it. By default only these networks are dialled.
OWN_HOSTS: Final = (
    *("localhost", "127.0.0.0/8", "::1/128"),
    *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
    "100.64.0.0/10",  # shared by carriers; clouds give it to pods
)
# A cloud's metadata service gives credentials to every program of the host, so no network includes it: an
# operator who means it names the address itself.
_METADATA: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",  # most clouds, and ECS' and EKS' credentials
            "fd00:ec2::/32",  # AWS
            "fd20:ce::254/128",  # Google
            "fd00:c1::a9fe:a9fe/128",  # Oracle
            "fd00:42::42/128",  # Scaleway
            "fe80::a9fe:a9fe/128",  # OpenStack
            "100.100.100.200/32",  # Alibaba
            "168.63.129.16/32",  # Azure
        ),
    )
)
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


class AllowedHosts:
    """Hosts and networks that may be dialled.

    Addresses of clouds' metadata services are in no network; they are allowed only by their own address, or
    by ``"*"``.

    Parameters
    ----------
    hosts
        Names, addresses and networks (``"10.0.0.0/8"``); ``"*"`` means any host, and ``"*.example.org"`` any
        host whose name ends in ``.example.org``. None for addresses of this host and of private networks.

    Raises
    ------
    ValueError
        A network cannot be read.
    """

    def __init__(self, hosts: Iterable[str] | None = None) -> None:
        self._is_default = hosts is None
        #: As given; all hosts of a second `AllowedHosts` that permits the same.
        self.hosts = OWN_HOSTS if hosts is None else tuple(hosts)
        self._names = tuple(host.lower() for host in self.hosts if "/" not in host)
        self._addresses = frozenset(map(_ip_of, self._names)) - {None}
        self._networks = tuple(ipaddress.ip_network(host, strict=False) for host in self.hosts if "/" in host)

    def __str__(self) -> str:
        if self._is_default:
            return "by default only this host and addresses of private networks"
        return ", ".join(self.hosts) or "none"

    def allow(self, host: str) -> bool:
        """Returns whether `host`, numeric or a name as in `Address`, may be dialled; resolves no name."""
        address = _ip_of(host)
        if self._allows_name(host) or address in self._addresses:
            return True
        if address is None or any(address in network for network in _METADATA):
            return False
        return any(address in network for network in self._networks)

    def place_of(self, address: str) -> str:
        """Returns the address to dial for ``"tcp://host:port"``; the caller dials the result and no other.

        If the host is a name that is not allowed as a name, the result is the first allowed address that the
        name stands for. May block on a name server.

        Raises
        ------
        UsageError
            ``invalid-argument``: `address` is none.
        TransferError
            ``not-permitted``.
        PeerError
            ``unreachable``: the name stands for no address.
        """
        import socket

        from kvxfer.address import Address

        place = Address.parse(address, "the address")
        if self.allow(place.host):
            return address
        found: list[str] = []
        if _ip_of(place.host) is None and self._networks:
            try:
                rows = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                raise PeerError(f"host {place.host} has no address: {error}", code="unreachable") from None
            found = [str(row[4][0]) for row in rows]
        for host in found:
            if self.allow(host):
                return str(place._replace(host=host))
        shown = f" ({', '.join(dict.fromkeys(found))})" if found else ""
        raise TransferError(
            f"host {place.host}{shown} is not one that may be dialled for a request ({self}): see --allow of "
            "the daemon",
            code="not-permitted",
        )

    def _allows_name(self, host: str) -> bool:
        name = host.lower()
        return any(
            each in (name, "*") or (each[:2] == "*." and name.endswith(each[1:])) for each in self._names
        )


def _ip_of(host: str) -> _Ip | None:
    """Returns the address that a numeric host names, IPv4 also where IPv6 spells it; None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
