"""What an agent is set to while it runs: limits of peers, rails that are off, and its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvxfer._native import NativeError
from kvxfer.arguments import check_kind, count, flag
from kvxfer.errors import invalid, translate
from kvxfer.peer import Peer
from kvxfer.peer_limit import LAST_PRIORITY, MOST_BYTES_PER_S, PeerLimit
from kvxfer.shared_secret import given_secrets

if TYPE_CHECKING:
    from kvxfer._native import AgentCore
    from kvxfer.session.completion import Completions

_MAX_NAME_NBYTES: Final = 128


class Steering:
    """The verbs of `kvxfer.Agent` that change what holds while it runs."""

    _core: AgentCore
    _completions: Completions
    _tls: dict[str, Any] | None

    def limit(self, peer: Peer | str, *, max_bytes_per_s: int | None = None, least_priority: int = 0) -> None:
        """Limits peers of one name, those that are connected and those that come; replaces what held before.

        ``agent.limit(peer)`` takes the limits away. They are kept as long as the agent.

        Parameters
        ----------
        peer
            Its name, or a `Peer` that has it. Sessions with peers of one name share the rate.
        max_bytes_per_s
            How many bytes of pages a second this agent takes from them, over all rails; None for any. A piece
            (some 512 KiB) waits for its turn and goes whole. It holds for transfers that are under way, too.
            What this agent sends is limited at the other end, since the owner of the destination schedules.
            Pages that come with the frame that offers them (``eager_nbytes``) cannot be held back: they are
            counted, and pieces wait for them. Messages are not counted.
        least_priority
            Of transfers that this agent posts with them from now on: a ``priority`` below it is raised to it,
            so that they go no earlier. 0 leaves what is asked.

        Raises
        ------
        UsageError
            ``invalid-argument``: no name of a peer, no such rate or priority.
        ExhaustedError
            4096 other names are limited.

        Notes
        -----
        Deadlines go on meanwhile: a transfer that the rate makes late ends with ``deadline``, in words that
        name the rate. Leases, fences, cancelling and the peer's loss are as without a limit. While it waits a
        peer costs others nothing.
        """
        check_kind(peer, "peer", Peer | str, "a Peer, or a peer's name")
        name = peer if isinstance(peer, str) else peer.name
        if not 0 < len(name.encode()) <= _MAX_NAME_NBYTES:
            raise invalid(f"peer is {name[:40]!r}: a name has 1 to {_MAX_NAME_NBYTES} bytes")
        rate = (
            0 if max_bytes_per_s is None else count(max_bytes_per_s, "max_bytes_per_s", 1, MOST_BYTES_PER_S)
        )
        least = count(least_priority, "least_priority", 0, LAST_PRIORITY)
        self._completions.check()
        try:
            self._core.limit_peer(name, rate, least)
        except NativeError as error:
            raise translate(error, peer=name) from None

    @property
    def limits(self) -> Mapping[str, PeerLimit]:
        """What peers are limited to, by their names; read-only."""
        self._completions.check()
        try:
            found = self._core.peer_limits()
        except NativeError as error:
            raise translate(error) from None
        return MappingProxyType({name: PeerLimit(rate or None, least) for name, rate, least in found})

    def switch_rails(self, transport: str, *, on: bool) -> None:
        """Switches all rails of one transport off or on, in all sessions; for those that come, too.

        Off: those that are up go down, what they had under way goes over others, and none comes up: this
        agent does not dial them, and refuses them to peers. `Peer.notes` says so. On: those that this agent
        dialled are dialled at once; a peer dials its own again within 30 s.

        Parameters
        ----------
        transport
            As `Peer.rails` and the options name it: ``"tcp"``.
        on
            False switches off. What is so already stays.

        Raises
        ------
        UsageError
            ``unsupported``: a session would end, since it has no other rail or ``require`` names the
            transport; nothing was switched, and the message names the peers. ``invalid-argument``: the agent
            has no such transport.
        """
        check_kind(transport, "transport", str, "a transport's name, as peer.rails has it")
        is_on = flag(on, "on")
        self._completions.check()
        try:
            self._core.switch_rails(transport, is_on)
        except NativeError as error:
            raise translate(error, rail=transport) from None

    def reload_certificates(self) -> None:
        """Reads the files of `AgentOptions.tls` again; connections that begin from now on use what they say.

        Sessions that are open, and transfers, go on. A certificate that was revoked meanwhile opens none any
        more.

        Raises
        ------
        UsageError
            ``invalid-argument``: the agent has none, or a file cannot be used; what was read before stays.
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
        """Replaces the secret for sessions that begin from now on; those that are open go on.

        A cluster changes its secret without losing a session: every agent gets ``(new, old)``, one after the
        other, and when all have it every agent gets ``new``. Where agents of a release before this are left,
        which know the old one, it is ``(old, new)`` until they have the new one.

        Parameters
        ----------
        secret
            At least 16 bytes; or a tuple of two, which are both accepted: the first is preferred.

        Raises
        ------
        UsageError
            ``invalid-argument``: it is too short, there are more than two, or the agent was made with
            certificates, or without a secret: it uses its user's own then. Nothing has changed.

        Notes
        -----
        Where the agent's secret came from a file, that counts again when it changes next. `options` shows
        what the agent was made with.
        """
        accepted = given_secrets(secret)
        self._completions.check()
        try:
            self._core.set_secrets(accepted[0], accepted[1] if len(accepted) > 1 else b"")
        except NativeError as error:
            raise translate(error) from None

    def reload_secret(self) -> None:
        """Reads the secret's file again, for sessions that begin from now on; those that are open go on.

        An agent whose secret came from a file does so by itself where the file changes: this is for a folder
        whose changes the system does not tell (a network's file system), or after `set_secret`.

        Raises
        ------
        UsageError
            ``invalid-argument``: the file cannot be read or does not hold one or two secrets, or the agent's
            secret came from no file. Nothing has changed.
        """
        self._completions.check()
        try:
            self._core.reload_secrets()
        except NativeError as error:
            raise translate(error) from None
