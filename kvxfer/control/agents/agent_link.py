"""One agent's connection to the daemon: its messages, the rate at which they are read, and calls to it."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.control.agents.agent_errors import AgentGone, CallRefused
from kvxfer.control.agents.agent_messages import Hello, hello_of, sections_of
from kvxfer.control.agents.attached import Attached
from kvxfer.control.state.descriptors import at_most
from kvxfer.daemon_link.frames import FrameKind, FrameReader, Malformed, json_frame, message_of
from kvxfer.log import logger
from kvxfer.session.records import RECORD_NBYTES, Record, decode

#: Of all agents that are attached to one daemon.
MOST_AGENTS: Final = 256
_MOST_QUEUED_NBYTES: Final = 4 << 20
_MOST_CALLS: Final = 64
_HELLO_TIMEOUT_S: Final = 5.0
# Records of one agent in a second, or messages of as much work. If an agent sends more, the daemon reads it
# no faster, and the agent drops records. An idle agent saves up the records of a quarter of a second.
_MOST_RECORDS_PER_S: Final = 20_000
_SAVED_RECORDS: Final = 5_000
# A message costs its bytes, and in addition as much as this many records.
_RECORDS_OF_MESSAGE: Final = 10
# The longest slice before other connections have their turn: records (about a millisecond), or a time.
_RECORDS_AT_ONCE: Final = 64
_SLICE_S: Final = 0.002
_UCRED: Final = struct.Struct("3i")
_CHANGES: Final = frozenset({"regions", "peers", "leases", "leases_ended", "stats", "draining"})


@dataclass(slots=True)
class LinkTable:
    """All connections of one daemon, and the agents at their other ends.

    Attributes
    ----------
    on_records, on_change, allowed_uids
        As `AgentLinks` takes them.
    agents, by_agent
        Attached agents, and their connections, by incarnation (hexadecimal digits).
    open
        All connections, including those of strangers.
    """

    on_records: Callable[[Attached, list[Record]], None]
    on_change: Callable[[Attached, frozenset[str]], None]
    allowed_uids: frozenset[int]
    agents: dict[str, Attached] = field(default_factory=dict)
    by_agent: dict[str, AgentLink] = field(default_factory=dict)
    open: set[AgentLink] = field(default_factory=set)


class AgentLink(asyncio.Protocol):
    """One connection: a stranger's until its hello, then an agent's."""

    def __init__(self, links: LinkTable, loop: asyncio.AbstractEventLoop) -> None:
        self._links = links
        self._loop = loop
        self._reader = FrameReader(_RECORDS_AT_ONCE * RECORD_NBYTES)
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
        self._links.open.add(self)
        connected = transport.get_extra_info("socket")
        self._pid, self._uid, _ = _UCRED.unpack(
            connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        )
        if self._uid not in self._links.allowed_uids:
            self._refusal = f"agents of user {self._uid} may not attach"
        elif len(self._links.open) > (most := at_most(MOST_AGENTS)):
            self._refusal = f"{most} agents are attached"
        if len(self._links.open) > 2 * at_most(MOST_AGENTS):
            self.end("too many agents are connected")
        else:
            # Refused only after its hello: closing earlier would break the pipe under the agent's own hello.
            self._timer = self._loop.call_later(_HELLO_TIMEOUT_S, self.end, "it sent no message in time")

    def data_received(self, data: bytes) -> None:
        until = self._loop.time() + _SLICE_S
        try:
            for kind, payload in self._reader.feed(data):
                self._take(kind, payload)
                if self._transport is None or not self._has_credit(kind, payload):
                    return
                if self._loop.time() >= until:
                    self._rest(0.0)
                    return
        except Malformed as error:
            self.end(str(error))
        except Exception:
            logger().exception("kvxfer: a message of agent %s could not be processed", self._name)
            self.end("its message could not be processed")

    def connection_lost(self, error: Exception | None) -> None:
        self.end("")

    # ---- for the owner ----------------------------------------------------------------------

    def end(self, words: str) -> None:
        """Ends the connection; `words` says what was wrong, and "" means nothing was. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if words:
            logger().warning("kvxfer: agent %s is disconnected: %s", self._name, words)
        self._stop_timer()
        self._links.open.discard(self)
        transport.abort()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(AgentGone(f"agent {self._name} is gone"))
        attached = self._attached
        if attached is not None and self._links.by_agent.get(attached.incarnation) is self:
            del self._links.by_agent[attached.incarnation], self._links.agents[attached.incarnation]
            self._tell(frozenset({"gone"}))

    async def call(self, verb: str, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Calls the agent and waits for its answer."""
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
            raise CallRefused("invalid-argument", f"the call cannot be encoded: {error}") from None
        if self._transport.get_write_buffer_size() + len(encoded) > _MOST_QUEUED_NBYTES:
            raise CallRefused("exhausted", f"agent {self._name} does not read its calls")
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
        """Tells an agent why it is refused, so that the agent can log it, and closes the connection."""
        assert self._transport is not None
        self._transport.write(json_frame({"t": "refused", "words": words}))
        transport, self._transport = self._transport, None
        self._links.open.discard(self)
        self._stop_timer()
        transport.close()
        logger().info("kvxfer: refuses an agent of process %s: %s", self._pid, words)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _has_credit(self, kind: FrameKind, payload: bytes) -> bool:
        """Whether the agent may send more now; if not, reading continues later."""
        now = self._loop.time()
        earned = (now - self._credited_at) * _MOST_RECORDS_PER_S
        self._credit = min(self._credit + earned, _SAVED_RECORDS)
        self._credited_at = now
        self._credit -= len(payload) / RECORD_NBYTES
        if kind is FrameKind.JSON:
            self._credit -= _RECORDS_OF_MESSAGE
        if self._credit >= 0:
            return True
        self._rest(-self._credit / _MOST_RECORDS_PER_S)
        return False

    def _rest(self, rest_s: float) -> None:
        """Pauses reading for a time."""
        assert self._transport is not None
        self._transport.pause_reading()
        self._stop_timer()
        self._timer = self._loop.call_later(rest_s, self._read_on)

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
                raise Malformed(f"malformed records: {error}") from None
            self._links.on_records(attached, records)
        else:
            self._hear(attached, message_of(payload))

    def _hear(self, attached: Attached | None, message: dict[str, Any]) -> None:
        what = message["t"]
        if attached is None:
            if what != "hello":
                raise Malformed("its first message is not a hello")
            self._welcome(hello_of(message))
        elif what == "state":
            self._update(attached, message)
        elif what == "reply":
            self._answer(message)
        else:
            raise Malformed(f"it sent an unknown message {what[:40]!r}")

    def _welcome(self, hello: Hello) -> None:
        known = self._links.by_agent.get(hello.incarnation)
        if known is not None:
            if known._uid != self._uid:
                raise Malformed(f"it claims to be agent {known._name}, of another user")
            known.end("")  # the agent has connected again before the end of its old connection was noticed
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
        self._links.by_agent[hello.incarnation] = self
        self._links.agents[hello.incarnation] = self._attached
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
            return  # the caller has stopped waiting
        if isinstance(answer, dict):
            call.set_result(answer)
        else:
            code, words = message.get("code"), message.get("words")
            if not (isinstance(code, str) and isinstance(words, str)):
                raise Malformed("a reply has neither an answer nor a code")
            call.set_exception(CallRefused(code, words))

    def _tell(self, changed: frozenset[str]) -> None:
        assert self._attached is not None
        self._links.on_change(self._attached, changed)
