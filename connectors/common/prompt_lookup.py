"""Lets decode ask prefill for a kept prompt, for engines whose routers carry no parameters.

Some engines give a connector only the prompt. Decode then asks the prefill engines that its user has named
whether one of them keeps the prompt. Both engines derive the prompt's key from the prompt. Prefill answers
from a thread of its own, because an engine with nothing to compute makes no steps.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import kvxfer
from kvxfer.connectors.common.helper_threads import HelperThreads
from kvxfer.threads import start_thread

_log = logging.getLogger("kvxfer")

KEY_NBYTES: Final = 16

# Kind, the asker's number of the enquiry, the number of this part, the number of parts; then the content.
_HEAD: Final = struct.Struct("<BQHH")
_ASK, _FOUND, _NONE, _DECLINED = 1, 2, 3, 4
# The key, and how many seconds the asker waits.
_QUESTION: Final = struct.Struct(f"<{KEY_NBYTES}sf")

# An agent's message has at most 65,536 bytes.
_PART_NBYTES: Final = 60_000
_MAX_PARTS: Final = 256
_MAX_WAITING: Final = 1024
# An engine that did not answer, or could not be dialled, is not asked again for so long.
_REST_S: Final = 1.0
# How long a thread waits after an error that it does not expect.
_LOOK_AGAIN_S: Final = 0.1


@dataclass(slots=True)
class _Listed:
    """A prompt that is being computed or is kept here.

    Attributes
    ----------
    params
        The handover's parameters, encoded; empty while the prompt is being computed.
    told
        The peer that was given the prompt, and the number of its enquiry; None until then.
    """

    request_id: str
    key: bytes
    params: bytes = b""
    told: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class _Enquiry:
    peer: kvxfer.Peer
    number: int
    until_s: float


class PromptRegister:
    """Prefill's side: gives each kept prompt to one engine that asks for it.

    Its methods may be called from any thread.

    Parameters
    ----------
    agent
        A separate agent: every message that it gets is an enquiry. The register closes it.
    """

    def __init__(self, agent: kvxfer.Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._listed: dict[str, _Listed] = {}
        self._by_key: dict[bytes, dict[str, _Listed]] = {}
        self._waiting: dict[bytes, deque[_Enquiry]] = {}
        self._num_waiting = 0
        self._thread = start_thread(self._answer, "kvxfer-prompts")

    @property
    def address(self) -> str:
        """The address at which decode engines ask."""
        return self._agent.entry.address

    def __len__(self) -> int:
        return len(self._listed)

    def coming(self, request_id: str, key: bytes) -> None:
        """Lists a prompt that is about to be computed; engines that ask for it wait."""
        with self._lock:
            self._forget(request_id)
            listed = self._listed[request_id] = _Listed(request_id, key)
            self._by_key.setdefault(key, {})[request_id] = listed

    def ready(self, request_id: str, params: dict[str, Any]) -> None:
        """Gives a prompt that is now kept to a waiting engine, or to the next one that asks."""
        with self._lock:
            if (listed := self._listed.get(request_id)) is not None:
                listed.params = json.dumps(params).encode()
                self._serve(listed.key)

    def ended(self, request_id: str) -> None:
        """Removes a prompt that is not kept, or no longer kept."""
        with self._lock:
            self._forget(request_id)

    def close(self) -> None:
        """Stops answering."""
        self._agent.close()
        self._thread.join()

    # ---- in the lock ------------------------------------------------------------------------

    def _forget(self, request_id: str) -> None:
        if (listed := self._listed.pop(request_id, None)) is None:
            return
        of_key = self._by_key[listed.key]
        del of_key[request_id]
        if not of_key:
            del self._by_key[listed.key]
        self._serve(listed.key)

    def _serve(self, key: bytes) -> None:
        """Answers waiting enquiries, as far as prompts are ready, or if none is being computed."""
        waiting = self._waiting.get(key)
        while waiting:
            free = [each for each in self._by_key.get(key, {}).values() if each.told is None]
            ready = [each for each in free if each.params]
            if free and not ready:
                return
            enquiry = waiting.popleft()
            self._num_waiting -= 1
            if time.monotonic() < enquiry.until_s:
                self._tell(enquiry, ready[0] if ready else None)
        self._waiting.pop(key, None)

    def _tell(self, enquiry: _Enquiry, listed: _Listed | None) -> None:
        try:
            if listed is None:
                enquiry.peer.send(_HEAD.pack(_NONE, enquiry.number, 0, 1))
                return
            pieces = [
                listed.params[at : at + _PART_NBYTES] for at in range(0, len(listed.params), _PART_NBYTES)
            ]
            for at, piece in enumerate(pieces):
                enquiry.peer.send(_HEAD.pack(_FOUND, enquiry.number, at, len(pieces)) + piece)
            listed.told = enquiry.peer.name, enquiry.number
        except kvxfer.KvxferError as error:
            # The peer asks again, or computes the prompt.
            _log.debug("kvxfer: %s did not get the answer for a prompt: %s", enquiry.peer.name, error)

    # ---- the thread -------------------------------------------------------------------------

    def _answer(self) -> None:
        while True:
            try:
                message = self._agent.message_blocking()
                try:
                    self._take(message.peer, message.payload)
                except (ValueError, struct.error) as error:
                    _log.warning(
                        "kvxfer: %s sent a message that cannot be read: %s", message.peer.name, error
                    )
            except Exception:
                if self._agent.closed:
                    return
                # Without this thread no engine would be given a prompt any more.
                _log.exception("kvxfer: %s: an enquiry for a prompt could not be answered", self._agent.name)
                time.sleep(_LOOK_AGAIN_S)  # the cause may last

    def _take(self, peer: kvxfer.Peer, payload: bytes) -> None:
        kind, number, _, _ = _HEAD.unpack_from(payload)
        if kind == _ASK:
            key, timeout_s = _QUESTION.unpack(payload[_HEAD.size :])
            if not 0 <= timeout_s <= 60:
                raise ValueError(f"its timeout is {timeout_s} s, not 0 to 60 s")
            enquiry = _Enquiry(peer, number, time.monotonic() + timeout_s)
            with self._lock:
                if self._num_waiting >= _MAX_WAITING:
                    self._expire()
                if self._num_waiting >= _MAX_WAITING:
                    self._tell(enquiry, None)
                    return
                self._waiting.setdefault(key, deque()).append(enquiry)
                self._num_waiting += 1
                self._serve(key)
        elif kind == _DECLINED:
            with self._lock:
                for listed in self._listed.values():
                    if listed.told == (peer.name, number):
                        listed.told = None
                        self._serve(listed.key)
                        break
        else:
            raise ValueError(f"its kind {kind} is not known")

    def _expire(self) -> None:
        now = time.monotonic()
        for key, waiting in list(self._waiting.items()):
            left = deque(each for each in waiting if each.until_s > now)
            self._num_waiting -= len(waiting) - len(left)
            if left:
                self._waiting[key] = left
            else:
                del self._waiting[key]


# ---- decode's side ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Source:
    """A prefill engine that is asked."""

    address: str
    session: Future[kvxfer.Peer] | None = None
    rests_until_s: float = 0.0

    @property
    def peer(self) -> kvxfer.Peer | None:
        """The open session with the engine, or None."""
        if self.session is None or not self.session.done() or self.session.exception() is not None:
            return None
        peer = self.session.result()
        return peer if peer.state is kvxfer.PeerState.OPEN else None


class PromptLookup:
    """Decode's side: asks prefill engines for a prompt, one after the other, and waits a bounded time.

    Called by one thread.

    Parameters
    ----------
    agent
        A separate agent: every message that it gets is an answer. The lookup closes it.
    addresses
        The addresses of the engines' registers, in the order in which they are asked.
    timeout_s
        How long each of them may take to answer.
    """

    def __init__(self, agent: kvxfer.Agent, addresses: Sequence[str], timeout_s: float) -> None:
        self._agent = agent
        self._timeout_s = timeout_s
        self._sources = [_Source(address) for address in addresses]
        self._threads = HelperThreads(max(len(addresses), 1), thread_name_prefix="kvxfer-prompts")
        self._number = 0
        for source in self._sources:
            self._dial(source)

    def ask(self, key: bytes) -> dict[str, Any] | None:
        """Returns the parameters of a prompt that an engine keeps; None if none does, or none answers."""
        self.drain()
        for source in self._sources:
            if (answer := self._ask(source, key)) is not None:
                return answer
        return None

    def drain(self) -> None:
        """Declines prompts that were given too late."""
        try:
            while (message := self._agent.take_message()) is not None:
                self._late(message.peer, message.payload)
        except kvxfer.AgentError:
            raise
        except Exception:
            # Input from another engine must not end this engine.
            _log.exception("kvxfer: %s: an answer could not be taken", self._agent.name)

    def close(self) -> None:
        """Stops asking."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._agent.close()

    def _dial(self, source: _Source) -> None:
        source.session = self._threads.submit(self._agent.connect_blocking, source.address)

    def _peer(self, source: _Source) -> kvxfer.Peer | None:
        """Returns the session with an engine; dials again if it was lost."""
        now = time.monotonic()
        if (peer := source.peer) is not None or now < source.rests_until_s:
            return peer if now >= source.rests_until_s else None
        # A dial that began earlier, e.g. at start-up, may have failed because the engine did not listen yet.
        is_earlier = source.session is not None and not source.session.done()
        if is_earlier and (peer := self._dialled(source, says=False)) is not None:
            return peer
        if source.session is None or source.session.done():
            self._dial(source)
            return self._dialled(source)
        return None

    def _dialled(self, source: _Source, says: bool = True) -> kvxfer.Peer | None:
        """Waits for a dial to end. With `says`, a failure is logged and the dial not repeated for a while."""
        assert source.session is not None
        try:
            return source.session.result(self._timeout_s)
        except kvxfer.KvxferError as error:
            if says:
                source.rests_until_s = time.monotonic() + _REST_S
                _log.warning("kvxfer: no session with %s to ask it for prompts: %s", source.address, error)
        except TimeoutError:
            source.rests_until_s = time.monotonic() + _REST_S
        return None

    def _ask(self, source: _Source, key: bytes) -> dict[str, Any] | None:
        if (peer := self._peer(source)) is None:
            return None
        self._number += 1
        parts: list[bytes] = []
        deadline = time.monotonic() + self._timeout_s
        try:
            peer.send(_HEAD.pack(_ASK, self._number, 0, 1) + _QUESTION.pack(key, self._timeout_s))
            while True:
                message = self._agent.message_blocking(max(deadline - time.monotonic(), 0.0))
                kind, number, part, num_parts = _HEAD.unpack_from(message.payload)
                if message.peer is not peer or number != self._number:
                    self._late(message.peer, message.payload)
                    continue
                if kind != _FOUND or not part < num_parts <= _MAX_PARTS or part != len(parts):
                    return None
                parts.append(message.payload[_HEAD.size :])
                if len(parts) == num_parts:
                    answer = json.loads(b"".join(parts))
                    return answer if isinstance(answer, dict) else None
        except TimeoutError:
            source.rests_until_s = time.monotonic() + _REST_S
            _log.warning(
                "kvxfer: %s did not say within %g s (lookup_timeout_s) whether it keeps a prompt: it is not "
                "asked for a while",
                source.address,
                self._timeout_s,
            )
        except (kvxfer.KvxferError, ValueError, RecursionError, struct.error) as error:
            _log.warning("kvxfer: asking %s for a prompt failed: %s", source.address, error)
        except Exception:
            _log.exception("kvxfer: asking %s for a prompt failed", source.address)
        return None

    def _late(self, peer: kvxfer.Peer, payload: bytes) -> None:
        if len(payload) < _HEAD.size:
            return
        kind, number, part, _ = _HEAD.unpack_from(payload)
        if kind == _FOUND and part == 0:
            try:
                peer.send(_HEAD.pack(_DECLINED, number, 0, 1))
            except kvxfer.KvxferError as error:
                _log.debug("kvxfer: %s was not told that its answer came too late: %s", peer.name, error)
