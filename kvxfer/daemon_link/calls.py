"""Carries out the daemon's requests to an agent, as far as the agent's owner permits."""

from __future__ import annotations

import base64
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvxfer._native import CODES, AgentCore, NativeError
from kvxfer.address import Address
from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.arguments import check_kind, count, flag, seconds
from kvxfer.daemon_link.agent_state import AgentState, lease_id
from kvxfer.errors import ExhaustedError, PeerError, TransferError, UsageError, invalid, listed, translate
from kvxfer.lease_token import LeaseToken
from kvxfer.log import logger
from kvxfer.peer import session_with

if TYPE_CHECKING:
    from kvxfer.directory.entry import Entry
    from kvxfer.peer import Peer
    from kvxfer.region import Region
    from kvxfer.region_descriptor import RegionDescriptor
    from kvxfer.session.drain import Drain
    from kvxfer.session.name_lookup import NameLookup
    from kvxfer.transfer import Transfer

#: An answer: a JSON object.
Answer = dict[str, Any]
#: Work that takes longer than a post, for a thread of its own.
Later = Callable[[], Answer]

#: Base64 makes records 1.4 times as long; this many fit into a frame.
_MOST_OPEN: Final = 1024
_MOST_POSTED: Final = 65_536
_MOST_LEASES: Final = 1 << 20
# A host that does not answer keeps few of the threads for calls.
_MOST_DIALS_OF_HOST: Final = 8
_LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
# Keywords of `Agent.write` and `Agent.read`, besides those for regions and blocks.
_SPANS: Final = ("layers", "heads", "tokens")
_TERMS: Final = frozenset({*_SPANS, "timeout_s", "priority", "context"})
_MOVE: Final = frozenset({"region", "remote_agent", "remote_region", "src_blocks", "dst_blocks"})
_MOVE_MAY: Final = _TERMS | {"lease", "notify", "allow"}


class Verbs(Protocol):
    """The agent's own verbs, which carry out the daemon's requests."""

    @property
    def name(self) -> str: ...
    @property
    def regions(self) -> Mapping[str, Region]: ...
    @property
    def peers(self) -> tuple[Peer, ...]: ...
    @property
    def read(self) -> Callable[..., Transfer]: ...
    @property
    def write(self) -> Callable[..., Transfer]: ...
    @property
    def limit(self) -> Callable[..., None]: ...
    @property
    def unlimit(self) -> Callable[..., None]: ...
    @property
    def switch_rails(self) -> Callable[..., None]: ...
    @property
    def _names(self) -> NameLookup: ...
    def connect_blocking(self, target: str | Entry, timeout_s: float | None = None) -> Peer: ...


class Calls:
    """Carries out the daemon's requests to one agent.

    Parameters
    ----------
    may
        Groups of permitted verbs: `AgentOptions.daemon_may`.
    """

    def __init__(
        self, core: AgentCore, agent: Verbs, state: AgentState, drain: Drain, may: tuple[str, ...]
    ) -> None:
        self._core = core
        self._agent = agent
        self._state = state
        self._drain = drain
        self._may = may
        # Transfers posted here that have not ended, by the number of their handle.
        self._posted: dict[int, Transfer] = {}
        self._swept_at = 64
        # Dials under way, by host.
        self._dials: Counter[str] = Counter()
        self._lock = (
            threading.Lock()
        )  # for posting: calls that had to connect first run on threads of their own
        self._verbs: dict[str, Callable[[Mapping[str, Any], float], Answer | Later]] = {
            "show.state": self._show_state,
            "show.transfers": self._show_transfers,
            "drain": self._ask_drain,
            "move.read": self._read,
            "move.write": self._write,
            "move.cancel": self._cancel,
            "move.connect": self._connect,
            "grant.grant": self._grant,
            "grant.extend": self._extend,
            "grant.revoke": self._revoke,
            "settings.set": self._set,
        }

    def answer(self, verb: str, args: Mapping[str, Any], timeout_s: float) -> Answer | Later:
        """Carries out a request, or returns a function that does it and may take up to `timeout_s`.

        Raises
        ------
        KvxferError
            ``not-permitted``: the agent's owner does not permit it. ``unsupported``: there is no such verb.
            Also all errors of `Agent`'s verbs.
        TimeoutError
            It took longer.
        """
        family = verb.partition(".")[0]
        if verb not in self._verbs:
            raise UsageError(f"agents of this version know no verb {verb!r}", code="unsupported")
        if family not in self._may:
            raise TransferError(
                f"agent {self._agent.name!r} does not let the daemon {family}: its owner names that in "
                f"AgentOptions(daemon_may={(*self._may, family)!r})",
                code="not-permitted",
            )
        return self._verbs[verb](args, timeout_s)

    # ---- show, drain, settings --------------------------------------------------------------

    def _show_state(self, args: Mapping[str, Any], timeout_s: float) -> Answer:
        _only(args, frozenset())
        return self._state.now()

    def _show_transfers(self, args: Mapping[str, Any], timeout_s: float) -> Answer:
        _only(args, frozenset(), {"most"})
        most = count(args.get("most", 256), "most", 0, _MOST_OPEN)
        return {"records": base64.b64encode(self._core.open_transfers(most)).decode()}

    def _ask_drain(self, args: Mapping[str, Any], timeout_s: float) -> Answer:
        _only(args, {"deadline_s"})
        left_s = args["deadline_s"]
        self._drain.ask(None if left_s is None else time.monotonic() + seconds(left_s, "deadline_s"))
        return {}

    def _set(self, args: Mapping[str, Any], timeout_s: float) -> Answer:
        _only(args, frozenset(), {"log_level", "peers", "rails"})
        level = args.get("log_level")
        if level is not None and level not in _LOG_LEVELS:
            raise invalid(f"log_level is {level!r}: write one of {', '.join(_LOG_LEVELS)}")
        limits = [(name, _limit(name, terms)) for name, terms in _entries(args, "peers")]
        switches = [(name, flag(on, f"rails[{name!r}]")) for name, on in _entries(args, "rails")]
        # Rails first: only they can be refused because of the present state, and then nothing has changed.
        for transport, on in sorted(switches, key=lambda each: not each[1]):
            self._agent.switch_rails(transport, on=on)
        for name, terms in limits:
            if terms:
                self._agent.limit(name, **terms)
            else:
                self._agent.unlimit(name)
        if level is not None:
            logger().setLevel(level.upper())
        return {}

    # ---- move -------------------------------------------------------------------------------

    def _read(self, args: Mapping[str, Any], timeout_s: float) -> Answer | Later:
        return self._move(args, timeout_s, is_write=False)

    def _write(self, args: Mapping[str, Any], timeout_s: float) -> Answer | Later:
        return self._move(args, timeout_s, is_write=True)

    def _move(self, args: Mapping[str, Any], timeout_s: float, *, is_write: bool) -> Answer | Later:
        _only(args, _MOVE, _MOVE_MAY)
        region = self._region(args["region"])
        for name in ("remote_agent", "remote_region"):
            check_kind(args[name], name, str, "text")
        if (peer := self._connected(args["remote_agent"])) is not None:
            return self._post(region, peer, args, is_write)

        # Look-up, dialling and handshake run on this call's thread, so no other call waits for them.
        dial = self._dial(args, timeout_s)
        return lambda: self._post(region, dial(), args, is_write)

    def _connect(self, args: Mapping[str, Any], timeout_s: float) -> Answer | Later:
        _only(args, {"remote_agent"}, {"allow"})
        check_kind(args["remote_agent"], "remote_agent", str, "text")
        if (peer := self._connected(args["remote_agent"])) is not None:
            return self._peer_report(peer)
        dial = self._dial(args, timeout_s)
        return lambda: self._peer_report(dial())

    def _dial(self, args: Mapping[str, Any], timeout_s: float) -> Callable[[], Peer]:
        """Returns a function that connects to a request's agent, but to no host beyond the permitted ones.

        The address is checked here, and not by the daemon, because this agent's directory and name servers
        decide what is dialled.
        """
        agent, told = args["remote_agent"], args.get("allow")
        if told is None:
            return lambda: self._connect_within(agent, timeout_s)
        check_kind(told, "allow", list, "a list of hosts")
        try:
            allowed = AllowedHosts(told)
        except (ValueError, TypeError, AttributeError) as error:
            raise invalid(f"allow has something other than hosts and networks: {error}") from None
        if "://" not in agent:
            self._agent._names.check(agent)
        ends_at = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(ends_at - time.monotonic(), 0.0)

        def dial() -> Peer:
            target: str | Entry = agent
            if isinstance(target, str) and "://" in target:
                target = allowed.place_of(target)
            else:
                entry = self._agent._names.look_up(agent, left_s, lambda: False)
                target = replace(entry, address=allowed.place_of(entry.address)) if entry.address else entry
            return self._connect_within(target, left_s())

        return dial

    def _connect_within(self, target: str | Entry, timeout_s: float) -> Peer:
        """Connects, unless too many dials of the same host wait for an answer."""
        address = target if isinstance(target, str) else target.address
        host = Address.parse(address, "remote_agent").host.lower() if "://" in address else str(target)
        with self._lock:
            if self._dials[host] >= _MOST_DIALS_OF_HOST:
                raise ExhaustedError(
                    f"{_MOST_DIALS_OF_HOST} dials of {host} wait for an answer: ask again later",
                    code="exhausted",
                )
            self._dials[host] += 1
        try:
            return self._agent.connect_blocking(target, timeout_s)
        finally:
            with self._lock:
                self._dials[host] -= 1
                self._dials += Counter()  # forgets hosts without dials

    def _peer_report(self, peer: Peer) -> Answer:
        row = self._state.peer(peer.id)
        if row is None:
            raise PeerError(f"peer {peer.name!r} was lost at once", code="peer-lost", peer=peer.name)
        return {"peer": row}

    def _post(self, region: Region, peer: Peer, args: Mapping[str, Any], is_write: bool) -> Answer:
        terms = {name: args[name] for name in _TERMS if args.get(name) is not None}
        terms |= {name: _span(terms[name], name) for name in _SPANS if name in terms}
        if args.get("lease") is not None:
            terms["lease"] = LeaseToken.parse(args["lease"])
        if (notify := args.get("notify")) is not None:
            check_kind(notify, "notify", str, "text")
            terms["notify"] = notify.encode()
        post = self._agent.write if is_write else self._agent.read
        remote = _remote_region(peer, args["remote_region"])
        with self._lock:
            if len(self._posted) >= self._swept_at:
                self._posted = {key: each for key, each in self._posted.items() if not each._is_final()}
                self._swept_at = min(2 * len(self._posted) + 64, _MOST_POSTED)
            if len(self._posted) >= _MOST_POSTED:
                raise ExhaustedError(
                    f"{_MOST_POSTED} transfers that were asked for are open", code="exhausted"
                )
            transfer = post(region, remote, _ids(args, "src_blocks"), _ids(args, "dst_blocks"), **terms)
            number = transfer._handle.id
            self._posted[number] = transfer
        return {"session": peer.id, "handle": number, "is_source": is_write}

    def _cancel(self, args: Mapping[str, Any], timeout_s: float) -> Answer:
        if "handle" in args:
            _only(args, {"handle"})
            number = count(args["handle"], "handle", 1, 2**63)
            found = self._posted.get(number)
            if found is None or found._is_final():
                return {"found": False}
            found.cancel()
            return {"found": True}
        _only(args, {"session", "transfer", "is_source"})
        session, transfer = (count(args[name], name, 0, 2**63) for name in ("session", "transfer"))
        check_kind(args["is_source"], "is_source", bool, "true or false")
        return {"found": self._core.cancel_transfer(session, transfer, args["is_source"])}

    def _region(self, name: object) -> Region:
        check_kind(name, "region", str, "a region's name")
        regions = self._agent.regions
        if not isinstance(name, str) or name not in regions:
            raise UsageError(
                f"agent {self._agent.name!r} has no region {name!r} (it has: {listed(regions, 'none')})",
                code="unknown-region",
            )
        return regions[name]

    def _connected(self, agent: str) -> Peer | None:
        """Returns the open session with an agent, by its address, incarnation or name."""
        if (peer := session_with(self._agent.peers, agent)) is not None:
            return peer
        if len(agent) == 32 and set(agent) <= set("0123456789abcdef"):
            raise PeerError(
                f"agent {self._agent.name!r} has no session with incarnation {agent}: name its address",
                code="unreachable",
                peer=agent,
            )
        return None

    # ---- grant ------------------------------------------------------------------------------

    def _grant(self, args: Mapping[str, Any], timeout_s: float) -> Answer:
        _only(args, {"region", "holder"}, {"session", "blocks", "mode", "ttl_s"})
        holder: Peer | str | None = args["holder"]
        if args.get("session") is not None:
            number = count(args["session"], "session", 0, 2**63)
            named = [peer for peer in self._agent.peers if peer.id == number]
            if not named:
                raise PeerError(f"no session {number} is open", code="peer-lost")
            holder = named[0]
        terms = {name: args[name] for name in ("mode", "ttl_s") if args.get(name) is not None}
        blocks = None if args.get("blocks") is None else _ids(args, "blocks")
        lease = self._region(args["region"]).grant(holder, blocks, **terms)
        return {"lease": lease_id(lease.token._number), "token": str(lease.token)}

    def _extend(self, args: Mapping[str, Any], timeout_s: float) -> Answer:
        _only(args, {"lease", "ttl_s"})
        ttl_s = seconds(args["ttl_s"], "ttl_s")
        number = self._lease(args["lease"])
        return {"found": number is not None and self._core.extend_lease(number, ttl_s)}

    def _revoke(self, args: Mapping[str, Any], timeout_s: float) -> Later:
        _only(args, {"lease"})
        number = self._lease(args["lease"])

        # The fence waits for a slice of a copy; for a device it waits longer.
        def revoke() -> Answer:
            if number is None:
                return {"found": False}
            try:
                if not self._core.revoke(number, min(timeout_s, 1e6)):
                    raise TimeoutError(
                        f"lease {args['lease']} is revoked, but a device still copies under it"
                    )
            except NativeError as error:
                if error.args[0] == CODES["invalid-argument"]:
                    return {"found": False}  # the lease has ended meanwhile
                raise translate(error) from None
            return {"found": True}

        return revoke

    def _lease(self, lease: Any) -> int | None:
        """Returns the number of an active lease by its id; None if there is none."""
        check_kind(lease, "lease", str, "a lease's id, as the agent told it")
        for row in self._core.leases(_MOST_LEASES):
            if lease_id(row["lease"]) == lease:
                return int(row["lease"])
        return None


def _only(args: Mapping[str, Any], needed: Iterable[str], optional: Iterable[str] = frozenset()) -> None:
    """Raises if arguments are missing, or if the verb does not have them."""
    needed = frozenset(needed)
    if missing := needed - args.keys():
        raise invalid(f"arguments are missing: {', '.join(sorted(missing))}")
    if beyond := args.keys() - needed - frozenset(optional):
        raise invalid(f"there are no arguments {', '.join(map(repr, sorted(beyond)))} of this verb")


def _entries(args: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    found = args.get(name)
    check_kind(found, name, dict | None, "an object by names")
    return list((found or {}).items())


def _limit(name: str, terms: Any) -> dict[str, Any]:
    """Returns the arguments for `Agent.limit`; none remove a peer's limits, as null does."""
    check_kind(terms, f"peers[{name!r}]", dict | None, "an object, or null")
    terms = terms or {}
    _only(terms, frozenset(), {"max_bytes_per_s", "least_priority"})
    # An object without a priority has the one that limits nothing.
    return {
        key: value
        for key, value in terms.items()
        if value is not None and (key, value) != ("least_priority", 0)
    }


def _ids(args: Mapping[str, Any], name: str) -> list[int]:
    check_kind(args[name], name, list, "a list of block ids")
    ids: list[int] = args[name]
    return ids


def _span(numbers: Any, name: str) -> range:
    """Returns consecutive numbers, which come one by one, as a range."""
    what = "a list of consecutive whole numbers"
    check_kind(numbers, name, list, what)
    first = count(numbers[0], name, 0, 2**63) if numbers else 0
    found = range(first, first + len(numbers))
    if numbers != list(found):
        raise invalid(f"{name} must be {what}, not {numbers!r:.200}")
    return found


def _remote_region(peer: Peer, name: str) -> RegionDescriptor:
    try:
        return peer.regions[name]
    except KeyError as error:
        raise UsageError(str(error.args[0]), code="unknown-region", peer=peer.name) from None
