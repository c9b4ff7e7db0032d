"""The verbs that change settings of a running agent: limits of peers, rails that are off, and secrets."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvxfer._native import NativeError
from kvxfer.arguments import check_kind, count, flag
from kvxfer.errors import invalid, translate
from kvxfer.naming import check_name
from kvxfer.peer import Peer
from kvxfer.peer_limit import LAST_PRIORITY, MOST_BYTES_PER_S, PeerLimit
from kvxfer.shared_secret import given_secrets

if TYPE_CHECKING:
    from kvxfer._native import AgentCore
    from kvxfer.session.completion import Completions


class Steering:
    """The verbs of `kvxfer.Agent` that change its settings while it runs."""

    _core: AgentCore
    _completions: Completions
    _tls: dict[str, Any] | None

    def limit(self, peer: Peer | str, *, max_bytes_per_s: int | None = None, least_priority: int = 0) -> None:
        """Limits all present and future peers of one name; replaces earlier limits.

        The agent keeps limits for its lifetime, or until `unlimit`. At least one must be named.

        Parameters
        ----------
        peer
            The name, or a `Peer` that has it. Sessions with peers of one name share the rate.
        max_bytes_per_s
            Bytes of pages a second that this agent takes from these peers, over all rails; None for no limit.
            A piece (some 512 KiB) waits for its turn and moves as a whole. The limit also applies to
            transfers that are under way. To limit what this agent sends, set a limit at the other end,
            because the owner of the destination schedules. Pages that come with the frame that offers them
            (``eager_nbytes``) cannot be delayed: they are counted, and later pieces wait longer. Messages are
            not counted.
        least_priority
            Lowest priority number of transfers that this agent posts with these peers from now on. A smaller
            ``priority`` is raised to it, so that the transfer goes no earlier. 0 changes nothing.

        Raises
        ------
        UsageError
            ``invalid-argument``: `peer` is not a name or a peer, the rate or the priority is out of range, or
            neither is given.
        ExhaustedError
            4096 other names have limits already.

        Notes
        -----
        A limit does not extend deadlines: a transfer that becomes late ends with ``deadline``, and the
        message names the rate. Leases, fences, cancelling and the loss of a peer work as without a limit. A
        peer that waits for its rate costs other peers nothing.
        """
        name = _name_of(peer)
        rate = (
            0 if max_bytes_per_s is None else count(max_bytes_per_s, "max_bytes_per_s", 1, MOST_BYTES_PER_S)
        )
        least = count(least_priority, "least_priority", 0, LAST_PRIORITY)
        if not rate and not least:
            raise invalid(
                f"no limit is given for {name!r}: name one, or call unlimit to remove all", peer=name
            )
        self._set_limits(name, rate, least)

    def unlimit(self, peer: Peer | str) -> None:
        """Removes the limits of all peers of one name; a running transfer goes on at once.

        Without limits nothing changes. Raises ``invalid-argument`` if `peer` is not a name or a peer.
        """
        self._set_limits(_name_of(peer), 0, 0)

    def _set_limits(self, name: str, rate: int, least: int) -> None:
        self._completions.check()
        try:
            self._core.limit_peer(name, rate, least)
        except NativeError as error:
            raise translate(error, peer=name) from None

    @property
    def limits(self) -> Mapping[str, PeerLimit]:
        """Limits by peer name; read-only."""
        self._completions.check()
        try:
            found = self._core.peer_limits()
        except NativeError as error:
            raise translate(error) from None
        return MappingProxyType({name: PeerLimit(rate or None, least) for name, rate, least in found})

    def switch_rails(self, transport: str, *, on: bool) -> None:
        """Switches all rails of one transport off or on, in all present and future sessions.

        Off: rails that are up go down, their pieces in progress move to other rails, and no new rail comes
        up. This agent does not dial them, and refuses them when peers dial. `Peer.notes` says so. On: this
        agent dials its own rails at once; a peer dials its own again within 30 s.

        Parameters
        ----------
        transport
            The transport's name as in `Peer.rails` and the options, e.g. ``"tcp"``.
        on
            False switches off. Nothing happens if the rails are in that state already.

        Raises
        ------
        UsageError
            ``unsupported``: a session would end, because it has no other rail or because ``require`` names
            the transport. Nothing was switched, and the message names the peers. ``invalid-argument``: the
            agent has no such transport.
        """
        check_kind(transport, "transport", str, "a transport's name, as in peer.rails")
        is_on = flag(on, "on")
        self._completions.check()
        try:
            self._core.switch_rails(transport, is_on)
        except NativeError as error:
            raise translate(error, rail=transport) from None

    def reload_certificates(self) -> None:
        """Reads the files of `AgentOptions.tls` again, for connections that begin from now on.

        Open sessions and their transfers go on. A certificate that was revoked meanwhile cannot open a new
        session.

        Raises
        ------
        UsageError
            ``invalid-argument``: the agent has no certificates, or a file cannot be used. The certificates
            that were read before stay in use.
        """
        if self._tls is None:
            raise invalid("this agent was made without certificates: give AgentOptions(tls=kvxfer.Tls(...))")
        self._completions.check()
        try:
            self._core.renew_certificates(self._tls)
        except NativeError as error:
            raise translate(error) from None

    @property
    def rails_off(self) -> tuple[str, ...]:
        """Transports whose rails are switched off (`switch_rails`)."""
        self._completions.check()
        try:
            return tuple(self._core.rails_off())
        except NativeError as error:
            raise translate(error) from None

    def set_secret(self, secret: bytes | str | tuple[bytes | str, ...]) -> None:
        """Replaces the secret for sessions that begin from now on; open sessions go on.

        To change a cluster's secret without losing a session, give every agent ``(new, old)``, one after the
        other. When all have it, give every agent ``new``. While some agents run an older release and know
        only the old secret, use ``(old, new)`` until they have the new one.

        Parameters
        ----------
        secret
            At least 16 bytes, or a tuple of two secrets: both are accepted, and the first is preferred.

        Raises
        ------
        UsageError
            ``invalid-argument``: a secret is too short, there are more than two, or the agent was made with
            certificates or without a secret (it then uses its user's own). Nothing has changed.

        Notes
        -----
        If the agent's secret came from a file, the next change of the file replaces this secret. `options`
        still shows the values with which the agent was made.
        """
        accepted = given_secrets(secret)
        self._completions.check()
        try:
            self._core.set_secrets(accepted[0], accepted[1] if len(accepted) > 1 else b"")
        except NativeError as error:
            raise translate(error) from None

    def reload_secret(self) -> None:
        """Reads the secret's file again, for sessions that begin from now on; open sessions go on.

        An agent whose secret came from a file reads the file again by itself when it changes. Call this if
        the system does not report changes of that folder (a network file system), or after `set_secret`.

        Raises
        ------
        UsageError
            ``invalid-argument``: the file cannot be read or does not hold one or two secrets, or the agent's
            secret did not come from a file. Nothing has changed.
        """
        self._completions.check()
        try:
            self._core.reload_secrets()
        except NativeError as error:
            raise translate(error) from None


def _name_of(peer: Peer | str) -> str:
    check_kind(peer, "peer", Peer | str, "a Peer, or a peer's name")
    name = peer if isinstance(peer, str) else peer.name
    check_name(name, "peer")
    return name
