"""The daemon's side of the attachment: accepts agents, keeps what they told, and calls them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvxfer.attachment.frames import FrameKind, FrameReader, Malformed, json_frame, message_of
from kvxfer.attachment.runtime_folder import SOCKET_NAME, checked
from kvxfer.control.agent_messages import Hello, hello_of, sections_of
from kvxfer.log import logger
from kvxfer.session.records import RECORD_NBYTES, Record, decode

_MOST_AGENTS: Final = 256
_MOST_QUEUED_NBYTES: Final = 4 << 20
_MOST_CALLS: Final = 64
_HELLO_TIMEOUT_S: Final = 5.0
# Of one agent in a second: records, or messages of as much work. One that tells more is read no faster, and
# drops records itself; it may have saved up a quarter of a second's.
_MOST_RECORDS_PER_S: Final = 20_000
_SAVED_RECORDS: Final = 5_000
# A message costs its bytes and, however short it is, as much as so many records.
_RECORDS_OF_MESSAGE: Final = 10
_UCRED: Final = struct.Struct("3i")


class CallRefused(Exception):  # noqa: N818
    """An agent, or `Attachments` for it, did not do what was asked.

    Attributes
    ----------
    code
        Of docs/errors.md: ``not-permitted`` where the agent's ``daemon_may`` has it not, ``unsupported`` for
        a verb that it does not know, ``exhausted`` where too much is under way, and what its verbs raise.
    words
        What happened, for people.
    """

    def __init__(self, code: str, words: str) -> None:
        super().__init__(f"{words} [{code}]")
        self.code = code
        self.words = words


class AgentGone(Exception):  # noqa: N818
    """The agent is not attached, or went while a call was under way, which may have been done or not."""


@dataclass(slots=True)
class Attached:
    """An agent that is attached, as it told last. One object from its attachment to its going; read only.

    Attributes
    ----------
    name, incarnation, address
        As in directories; the incarnation in hexadecimal digits.
    pid, uid
        Of its process, as the kernel told them.
    host, version
        As it told them.
    may
        What it does for the daemon (`AgentOptions.daemon_may`).
    options
        Its `AgentOptions` as a JSON object, without the secret.
    attached_at
        Seconds since 1970.
    regions
        Objects with ``id``, ``name``, ``kind`` ("pool", "foreign", "gpu"), ``num_blocks``, ``nbytes``,
        ``layout`` (`KVLayout` as its JSON document; None where those of all others fill half a MiB) and
        ``notes``.
    peers
        One for each session: ``session`` (number), ``name``, ``incarnation``, ``address``, ``is_ours``,
        ``rails``, ``paths``, ``notes``, ``regions`` and ``region_ids`` (names and numbers of the first 16),
        ``num_regions``.
    leases
        Those that it granted and that have not ended: ``lease`` (an id, no token), ``holder``, ``peer`` (its
        session, or None), ``region`` (number), ``mode``, ``num_blocks``, ``state``, and ``seconds_left``
        as of when that was told: heartbeats that start a lease's time anew are not told.
    stats
        `Agent.stats` without the programs and the peers.
    rails_off
        Transports whose rails are switched off there.
    limits
        What peers are limited to: ``name``, ``max_bytes_per_s`` (0: any rate), ``least_priority``.
    draining, draining_until_ns
        Whether it was asked to drain, and until when, by CLOCK_MONOTONIC.
    num_regions, num_peers, num_leases
        How many there are: of very many the first are told.
    clock_offset_ns
        What to add to its CLOCK_MONOTONIC for nanoseconds since 1970.
    records_dropped
        Records of transfers that it did not tell, since its making: they came faster than they were read.
    """

    name: str
    incarnation: str
    address: str
    pid: int
    uid: int
    host: str
    version: str
    may: tuple[str, ...]
    options: Mapping[str, Any]
    attached_at: float
    regions: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    leases: list[dict[str, Any]] = field(default_factory=list)
    rails_off: list[str] = field(default_factory=list)
    limits: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    draining: bool = False
    draining_until_ns: int | None = None
    num_regions: int = 0
    num_peers: int = 0
    num_leases: int = 0
    clock_offset_ns: int = 0
    records_dropped: int = 0


class Attachments:
    """Accepts agents on ``agents.sock`` of a folder, keeps what they told, and calls them.

    All on one event loop, whose own methods these are; callbacks are called on it, must not block, and end
    the connection that made them raise. 256 agents may be attached; each may hold 4 MiB of buffers. One that
    is slow, or says what no agent says, loses its connection alone, and comes back if it is one.

    Parameters
    ----------
    folder
        The daemon's runtime folder; made (0700) where it is not there.
    on_records
        Called with the agent and records of transfers and expectations that have ended, oldest first.
    on_change
        Called with the agent and the names of what has changed: ``"attached"`` (all of it), ``"gone"``
        (it is in `agents` no more), or some of ``"regions"``, ``"peers"``, ``"leases"``, ``"stats"``,
        ``"draining"``.
    allowed_uids
        Users whose agents may attach; None for the daemon's own and root.
    """

    def __init__(
        self,
        folder: Path,
        *,
        on_records: Callable[[Attached, list[Record]], None],
        on_change: Callable[[Attached, frozenset[str]], None],
        allowed_uids: Collection[int] | None = None,
    ) -> None:
        self._folder = folder
        self.on_records = on_records
        self.on_change = on_change
        self.allowed_uids = frozenset({0, os.geteuid()} if allowed_uids is None else allowed_uids)
        #: Those that are attached, by incarnation (hexadecimal digits). Read only.
        self.agents: dict[str, Attached] = {}
        self.lines: dict[str, _Line] = {}
        self.open_lines: set[_Line] = set()
        self._server: asyncio.Server | None = None
        self._lock_fd = -1

    async def start(self) -> None:
        """Listens.

        Raises
        ------
        OSError
            The folder or socket cannot be made. ``BlockingIOError``: another daemon has the folder.
        PermissionError
            The folder belongs to another user, or others may write to it.
        UsageError
            ``invalid-argument``: no socket can have that path.
        """
        path = checked(self._folder / SOCKET_NAME)
        for_others = bool(self.allowed_uids - {0, os.geteuid()})
        _make_folder(self._folder, 0o711 if for_others else 0o700)
        # It goes with the process, however that ends; the socket's name stays.
        self._lock_fd = os.open(
            path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        listening = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            listening.bind(os.fspath(path))
            path.chmod(0o666 if for_others else 0o600)  # before it listens, so that nobody is in between
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(
                lambda: _Line(self, loop), sock=listening, backlog=_MOST_AGENTS
            )
        except BlockingIOError as error:
            listening.close()
            self._unlock()
            raise BlockingIOError(error.errno, "another daemon has the folder", str(self._folder)) from None
        except BaseException:
            listening.close()
            self._unlock()
            raise

    async def aclose(self) -> None:
        """Ends all connections, which agents take for the daemon's end, and the socket. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for line in list(self.open_lines):
            line.end("")
        (self._folder / SOCKET_NAME).unlink(missing_ok=True)
        self._unlock()
        await asyncio.sleep(0)  # transports close in the loop's next round

    async def call(
        self, incarnation: str, verb: str, args: Mapping[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Has an agent do something, and returns what it answers.

        Parameters
        ----------
        verb, args
            One of:

            - ``show.state`` {}: sections as `Attached` has them, of now.
            - ``drain`` {deadline_s}: a number of seconds; None takes it back. ``{}``
            - ``move.read``, ``move.write`` {region, remote_agent, remote_region, src_blocks, dst_blocks,
              layers, heads, tokens, lease, notify, timeout_s, priority, context}: all after `dst_blocks` may
              be left out, and are as in `Agent.write`. `remote_agent` is a name, an incarnation or an
              address, connected to where it is none of the agent's peers; `lease` a token's text, `notify`
              text. Returns when it is posted: ``{"session", "handle", "is_source"}``; the record with that
              handle tells the end.
            - ``move.cancel`` {handle} of one that was posted so, or {session, transfer, is_source} as records
              have them: ``{"found": bool}``
            - ``grant.grant`` {region, holder, session, blocks, mode, ttl_s}: `holder` is a name or None; with
              `session`, which alone may write, it is that peer. ``{"lease": id, "token": text}``
            - ``grant.extend`` {lease, ttl_s}: it ends no earlier than that from now. ``{"found": bool}``
            - ``grant.revoke`` {lease}: its id; returns when the fence is complete. ``{"found": bool}``
            - ``settings.set`` {log_level, peers, rails}, each of which may be left out: debug, info, warning,
              error or critical; by peers' names ``{max_bytes_per_s, least_priority}`` as in `Agent.limit`, or
              None; by transports whether their rails are on. Where rails cannot be switched, no limit and no
              level is changed. ``{}``
        timeout_s
            How long the answer may take.

        Raises
        ------
        CallRefused
            The agent refused, or failed: nothing was done, unless the words say otherwise.
        AgentGone
            It is not attached, or went.
        TimeoutError
            No answer in time; what was asked may be done yet.
        """
        line = self._line(incarnation)
        return await line.call(verb, args, timeout_s)

    async def open_transfers(
        self, incarnation: str, most: int = 256, timeout_s: float = 10.0
    ) -> list[Record]:
        """Returns records of an agent's transfers and expectations that are open: 1024 at most.

        Raises
        ------
        CallRefused, AgentGone, TimeoutError
            As `call` does.
        """
        line = self._line(incarnation)
        answer = await line.call("show.transfers", {"most": most}, timeout_s)
        try:
            return decode(base64.b64decode(answer["records"], validate=True))
        except (KeyError, TypeError, ValueError, IndexError):
            line.end("it answered with no records")
            raise AgentGone(f"agent {incarnation} answered with no records, and was left") from None

    def _line(self, incarnation: str) -> _Line:
        line = self.lines.get(incarnation)
        if line is None:
            raise AgentGone(f"no agent of incarnation {incarnation} is attached")
        return line

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class _Line(asyncio.Protocol):
    """One connection: a stranger until its hello, then an agent's."""

    def __init__(self, owner: Attachments, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._attached: Attached | None = None
        self._pid = self._uid = -1
        self._refusal = ""
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_call = 0
        self._timer: asyncio.TimerHandle | None = None
        self._credit = float(_SAVED_RECORDS)
        self._credited_at = loop.time()

    # ---- of asyncio -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._owner.open_lines.add(self)
        connected = transport.get_extra_info("socket")
        self._pid, self._uid, _ = _UCRED.unpack(
            connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        )
        if self._uid not in self._owner.allowed_uids:
            self._refusal = f"agents of user {self._uid} may not attach"
        elif len(self._owner.open_lines) > _MOST_AGENTS:
            self._refusal = f"{_MOST_AGENTS} agents are attached"
        if len(self._owner.open_lines) > 2 * _MOST_AGENTS:
            self.end("too many others are there")
        else:
            # It is refused once it has said its hello: before, its own words would break the pipe.
            self._timer = self._loop.call_later(_HELLO_TIMEOUT_S, self.end, "it said nothing")

    def data_received(self, data: bytes) -> None:
        try:
            for kind, payload in self._reader.feed(data):
                self._take(kind, payload)
                if self._transport is None or not self._has_credit(kind, payload):
                    return
        except Malformed as error:
            self.end(str(error))
        except Exception:
            logger().exception("kvxfer: what agent %s told could not be taken in", self._name)
            self.end("what it told could not be taken in")

    def connection_lost(self, error: Exception | None) -> None:
        self.end("")

    # ---- for the owner ----------------------------------------------------------------------

    def end(self, words: str) -> None:
        """Ends the connection; `words` say what was wrong with it, and "" that nothing was. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if words:
            logger().warning("kvxfer: agent %s is left: %s", self._name, words)
        self._stop_timer()
        self._owner.open_lines.discard(self)
        transport.abort()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(AgentGone(f"agent {self._name} is gone"))
        attached = self._attached
        if attached is not None and self._owner.lines.get(attached.incarnation) is self:
            del self._owner.lines[attached.incarnation], self._owner.agents[attached.incarnation]
            self._tell(frozenset({"gone"}))

    async def call(self, verb: str, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Asks the agent and waits for its answer."""
        if self._transport is None:
            raise AgentGone(f"agent {self._name} is gone")
        if len(self._calls) >= _MOST_CALLS:
            raise CallRefused("exhausted", f"{_MOST_CALLS} calls of agent {self._name} are under way")
        self._last_call += 1
        number = self._last_call
        message = {"t": "call", "id": number, "verb": verb, "args": dict(args), "timeout_s": timeout_s}
        try:
            encoded = json_frame(message)
        except ValueError as error:
            raise CallRefused("invalid-argument", f"the call cannot be told: {error}") from None
        if self._transport.get_write_buffer_size() + len(encoded) > _MOST_QUEUED_NBYTES:
            raise CallRefused("exhausted", f"agent {self._name} does not read what it is asked")
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._calls[number] = answer
        try:
            self._transport.write(encoded)
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._calls[number]

    # ---- inside -----------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"of process {self._pid}" if self._attached is None else repr(self._attached.name)

    def _refuse(self, words: str) -> None:
        """Tells an agent, which logs it, why it is left."""
        assert self._transport is not None
        self._transport.write(json_frame({"t": "refused", "words": words}))
        transport, self._transport = self._transport, None
        self._owner.open_lines.discard(self)
        self._stop_timer()
        transport.close()
        logger().info("kvxfer: an agent of process %s is refused: %s", self._pid, words)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _has_credit(self, kind: FrameKind, payload: bytes) -> bool:
        """Whether it may tell more at once; where not, it is read on later."""
        now = self._loop.time()
        earned = (now - self._credited_at) * _MOST_RECORDS_PER_S
        self._credit = min(self._credit + earned, _SAVED_RECORDS)
        self._credited_at = now
        self._credit -= len(payload) / RECORD_NBYTES
        if kind is FrameKind.JSON:
            self._credit -= _RECORDS_OF_MESSAGE
        if self._credit >= 0:
            return True
        assert self._transport is not None
        self._transport.pause_reading()
        self._stop_timer()
        self._timer = self._loop.call_later(-self._credit / _MOST_RECORDS_PER_S, self._read_on)
        return False

    def _read_on(self) -> None:
        self._timer = None
        if self._transport is not None:
            self._transport.resume_reading()
            self.data_received(b"")

    def _take(self, kind: FrameKind, payload: bytes) -> None:
        attached = self._attached
        if self._refusal:
            self._refuse(self._refusal)
        elif kind is FrameKind.RECORDS:
            if attached is None:
                raise Malformed("records came before a hello")
            try:
                records = decode(payload)
            except (ValueError, IndexError, struct.error) as error:
                raise Malformed(f"no records: {error}") from None
            self._owner.on_records(attached, records)
        else:
            self._hear(attached, message_of(payload))

    def _hear(self, attached: Attached | None, message: dict[str, Any]) -> None:
        what = message["t"]
        if attached is None:
            if what != "hello":
                raise Malformed("it began without a hello")
            self._welcome(hello_of(message))
        elif what == "state":
            self._update(attached, message)
        elif what == "reply":
            self._answer(message)
        else:
            raise Malformed(f"it said {what[:40]!r}")

    def _welcome(self, hello: Hello) -> None:
        known = self._owner.lines.get(hello.incarnation)
        if known is not None:
            if known._uid != self._uid:
                raise Malformed(f"it claims to be agent {known._name}, of another user")
            known.end("")  # it has called anew before the end of the old connection was heard of
        self._stop_timer()
        self._attached = Attached(
            name=hello.name,
            incarnation=hello.incarnation,
            address=hello.address,
            pid=self._pid,
            uid=self._uid,
            host=hello.host,
            version=hello.version,
            may=hello.may,
            options=hello.options,
            attached_at=time.time(),
        )
        self._owner.lines[hello.incarnation] = self
        self._owner.agents[hello.incarnation] = self._attached
        assert self._transport is not None
        self._transport.write(json_frame({"t": "welcome"}))
        self._tell(frozenset({"attached"}))

    def _update(self, attached: Attached, message: dict[str, Any]) -> None:
        sections = sections_of(message)
        for name, value in sections.items():
            setattr(attached, name, value)
        changed = _CHANGES & sections.keys()
        if changed:
            self._tell(frozenset(changed))

    def _answer(self, message: dict[str, Any]) -> None:
        number, answer = message.get("id"), message.get("answer")
        call = self._calls.get(number) if isinstance(number, int) else None
        if call is None or call.done():
            return  # its caller waits no more
        if isinstance(answer, dict):
            call.set_result(answer)
        else:
            code, words = message.get("code"), message.get("words")
            if not (isinstance(code, str) and isinstance(words, str)):
                raise Malformed("a reply has neither an answer nor a code")
            call.set_exception(CallRefused(code, words))

    def _tell(self, changed: frozenset[str]) -> None:
        assert self._attached is not None
        self._owner.on_change(self._attached, changed)


_CHANGES: Final = frozenset({"regions", "peers", "leases", "stats", "draining"})


def _make_folder(folder: Path, mode: int) -> None:
    """Makes the runtime folder, or finds it this user's own."""
    with contextlib.suppress(FileExistsError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no directory")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} belongs to user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}: it must be this "
            "user's, and nobody else may write to it"
        )
    folder.chmod(mode)
