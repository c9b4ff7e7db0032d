"""Limits the hosts that may be dialled when an outside party names them, e.g. in a request."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

# Everyone who may send a request can name hosts in it. By default only these networks are dialled; names and
# the machine's metadata service (169.254.0.0/16) are not.
OWN_HOSTS: Final = (
    *("localhost", "127.0.0.0/8", "::1/128"),
    *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
    "100.64.0.0/10",  # shared by carriers; clouds give it to pods
)


class AllowedHosts:
    """Hosts and networks that may be dialled.

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
        self._hosts = OWN_HOSTS if hosts is None else tuple(hosts)
        self._names = tuple(host.lower() for host in self._hosts if "/" not in host)
        self._networks = tuple(
            ipaddress.ip_network(host, strict=False) for host in self._hosts if "/" in host
        )

    def __str__(self) -> str:
        if self._is_default:
            return "by default only this host and addresses of private networks"
        return ", ".join(self._hosts) or "none"

    def allow(self, host: str) -> bool:
        """Returns whether `host`, numeric or a name as in `Address`, may be dialled."""
        name = host.lower()
        for each in self._names:
            if each in (name, "*") or (each[:2] == "*." and name.endswith(each[1:])):
                return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)
