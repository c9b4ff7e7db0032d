"""An agent's link to its node's daemon: one thread, which sleeps while there is nothing to do."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvxfer._native import NativeError
from kvxfer.daemon_link.agent_state import AgentState, fitted, hello
from kvxfer.daemon_link.calls import Answer, Calls, Later
from kvxfer.daemon_link.connection import Connection, dial
from kvxfer.daemon_link.frames import Malformed
from kvxfer.errors import KvxferError, translate
from kvxfer.log import logger
from kvxfer.session.bell import Bell
from kvxfer.session.records import RECORD_NBYTES
from kvxfer.threads import start_thread

if TYPE_CHECKING:
    from kvxfer._native import AgentCore
    from kvxfer.daemon_link.calls import Verbs
    from kvxfer.directory import Entry
    from kvxfer.options import AgentOptions
    from kvxfer.session.drain import Drain
    from kvxfer.session.peer_table import PeerTable
    from kvxfer.session.region_table import RegionTable

#: The thread's name.
LINK_THREAD: Final = "kvxfer-daemon"
# Records of 4 s at 1,000 transfers a second, 1.6 MB; further ones that a hanging daemon misses are counted.
_RECORDS_KEPT: Final = 4096
_RECORDS_IN_FRAME: Final = 256
# Records are gathered for a while, and for longer if that fills a frame, because a round costs as much as a
# hundred records. If there are few records, or after a request of the daemon, none waits longer than the
# shorter time.
_RECORDS_INTERVAL_S: Final = 0.05
_LONGEST_INTERVAL_S: Final = 0.25
_FEW_RECORDS: Final = 16
_HURRY_S: Final = 1.0
_STATE_INTERVAL_S: Final = 0.5
# Interval of reports in which only figures changed, as they do with every transfer.
_STATS_INTERVAL_S: Final = 2.0
_FIRST_RETRY_S: Final = 0.2
_LONGEST_RETRY_S: Final = 5.0
# If the daemon is away for longer, transfers make no records until it is back.
_RECORDS_WANTED_S: Final = 60.0
# Calls under way that take long, by family: those that dial may wait for dead agents, and take no room from
# those that end leases. `Calls` bounds the dials of one host.
_MOST_CALLS: Final = {"move": 64, "grant": 16}
_LONGEST_CALL_S: Final = 60.0
_MAX_ID_NBYTES: Final = 64


class DaemonLink:
    """Reports an agent's state and transfers to the daemon, and carries out its permitted requests.

    It never delays the agent: its own thread does the work. A request that has to wait gets a thread of its
    own, 16 at a time. If the daemon is away, the link calls it again after 0.2 s, then less and less often,
    down to every 5 s. While the daemon hangs, the link sends nothing until it reads; the oldest records are
    dropped and counted. After an invalid message, and after any error of its own, the link logs the reason,
    ends the connection and calls again.

    Parameters
    ----------
    path
        The daemon's socket.
    core, peers, regions, drain
        The agent's parts.
    agent
        The agent's verbs.
    """

    def __init__(
        self,
        path: Path,
        core: AgentCore,
        entry: Entry,
        options: AgentOptions,
        peers: PeerTable,
        regions: RegionTable,
        drain: Drain,
        agent: Verbs,
    ) -> None:
        self.core = core
        self.entry = entry
        self.options = options
        self.state = AgentState(core, peers, regions, drain)
        self.calls = Calls(core, agent, self.state, drain, options.daemon_may)
        self._link = _LinkThread(path, entry.name, weakref.ref(self))
        # Dropping the agent ends the link, which holds no reference while it sleeps.
        weakref.finalize(self, self._link.stop)

    def begin(self) -> None:
        """Starts the thread.

        If the system refuses a thread, that is logged, and the daemon never learns of the agent.
        """
        try:
            self._link.start()
        except (OSError, RuntimeError) as error:
            logger().warning("kvxfer: %s attaches to no daemon: %s", self.entry.name, error)

    def news(self) -> None:
        """Makes the link check the state, and report changes."""
        self._link.news()

    def end(self, timeout_s: float) -> None:
        """Sends the rest, as far as the daemon takes it at once, and ends the thread. Idempotent."""
        self._link.stop()
        self._link.join(timeout_s)


class _LinkThread:
    """The thread of one `DaemonLink`, which it references only while it has work."""

    def __init__(self, path: Path, name: str, owner: weakref.ref[DaemonLink]) -> None:
        self._path = path
        self._name = name
        self._owner = owner
        self._bell = Bell()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._records_fd = -1
        self._has_news = False  # set by `news`, or by the end of a call
        self.last_words = ""
        # For all connections together.
        self.errands = {family: threading.BoundedSemaphore(most) for family, most in _MOST_CALLS.items()}
        _links.add(self)

    # ---- for other threads ------------------------------------------------------------------

    def start(self) -> None:
        if self._bell.fd < 0:
            raise OSError("no descriptor is left")
        self._thread = start_thread(self._run, LINK_THREAD)

    def stop(self) -> None:
        self._stopped = True
        self._bell.ring()

    def join(self, timeout_s: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def stopped(self) -> bool:
        return self._stopped

    def news(self) -> None:
        self._has_news = True
        self._bell.ring()

    def forked(self) -> None:
        """In the child of a fork: the daemon must notice the parent's end although the child lives on."""
        self._stopped = True
        self._bell.forked()
        if self._connection is not None:
            self._connection.close()
        if self._records_fd >= 0:
            os.close(self._records_fd)
            self._records_fd = -1

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        away_since = time.monotonic()
        try:
            while not self.stopped():
                was_welcome = self._call_once()
                if self.stopped():
                    return
                if was_welcome:
                    retry_s, away_since = _FIRST_RETRY_S, time.monotonic()
                elif time.monotonic() - away_since > _RECORDS_WANTED_S:
                    self._watch_records(0)
                # Spread in time, so that 200 agents of a restarted daemon do not come at once.
                self._sleep(retry_s * (1 + os.urandom(1)[0] / 512))
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
        finally:
            self._bell.close()
            if self._records_fd >= 0:
                os.close(self._records_fd)
                self._records_fd = -1

    def _call_once(self) -> bool:
        """Holds one conversation with the daemon; returns whether the pauses between calls start anew.

        They go on growing if either end was wrong, even if the daemon had welcomed the agent.
        """
        conversation = None
        try:
            self._connection = dial(self._path)
            conversation = _Conversation(self, self._connection)
            try:
                conversation.hold()
            finally:
                self._connection.close()
                self._connection = None
        except (Malformed, PermissionError) as error:
            self._tell_once(str(error), is_odd=True)
            return False
        except OSError as error:
            if conversation is not None and conversation.is_welcome:
                self.last_words = ""  # the daemon was there: that it went is news
            self._tell_once(str(error))
        except Exception as error:
            # An error of this end. Without another call, the daemon would never hear of this agent again.
            words = f"what it reports could not be sent, and is tried again: {type(error).__name__}: {error}"
            self._tell_once(words, is_odd=True, error=error)
            return False
        return conversation is not None and conversation.is_welcome

    def _sleep(self, left_s: float) -> None:
        until = time.monotonic() + left_s
        poller = select.poll()
        poller.register(self._bell.fd, select.POLLIN)
        while not self.stopped() and (left_s := until - time.monotonic()) > 0:
            if poller.poll(left_s * 1000):
                self._bell.quiet()

    def _tell_once(self, words: str, *, is_odd: bool = False, error: Exception | None = None) -> None:
        """Logs the reason why there is no daemon, once for each reason; with `error`, where it arose."""
        if words != self.last_words and not self.stopped():
            log = logger().warning if is_odd else logger().info
            log("kvxfer: %s is not attached to its daemon: %s", self._name, words, exc_info=error)
        self.last_words = words

    def _watch_records(self, capacity: int) -> None:
        """Switches native code's records on or off; `_records_fd` is then their descriptor, or -1."""
        owner = self._owner()
        if owner is None or (capacity == 0) == (self._records_fd < 0):
            return
        try:
            fd = owner.core.watch_records(capacity)
        except NativeError:
            return  # the agent closes
        if capacity:
            try:
                # The agent may close the descriptor itself at any time.
                self._records_fd = os.dup(fd)
            except OSError:
                owner.core.watch_records(0)  # the next welcome tries again
                raise
        else:
            os.close(self._records_fd)
            self._records_fd = -1


class _Conversation:
    """One connection to a daemon, from the greeting to its end.

    Attributes
    ----------
    is_welcome
        Whether the daemon has accepted the agent.
    """

    def __init__(self, link: _LinkThread, connection: Connection) -> None:
        self._link = link
        self._connection = connection
        self._poller = select.poll()
        self._events: dict[int, int] = {}
        self.is_welcome = False
        self._has_records = False  # or may have; checked when records are due
        self._has_state = self._has_stats = False
        self._records_due = self._state_due = self._stats_due = 0.0
        self._interval_s = _RECORDS_INTERVAL_S
        self._hurries_until = 0.0
        self._answers: deque[dict[str, Any]] = deque()  # from calls that have threads of their own

    def hold(self) -> None:
        """Talks until the agent ends.

        Raises
        ------
        Malformed
            The daemon sent an invalid message.
        PermissionError
            The daemon refuses the agent.
        OSError
            The connection is over.
        """
        owner = self._link._owner()
        if owner is None:
            return
        self._connection.send(hello(owner.entry, owner.options))
        owner.state.forget()
        del owner
        self._watch(self._link._bell.fd, select.POLLIN)
        while not self._link.stopped():
            self._hear(self._wait(self._work()))
        self._say_last()

    # ---- the rounds -------------------------------------------------------------------------

    def _work(self) -> float | None:
        """Sends what is due; returns the seconds until more is due, or None."""
        while self._answers:
            self._reply(self._answers.popleft())
        if not self.is_welcome:
            return None
        now = time.monotonic()
        link, connection = self._link, self._connection
        if link._has_news:
            link._has_news = False
            self._has_state = True
        if connection.has_room and (owner := link._owner()) is not None:
            if self._has_records and now >= self._records_due:
                self._gather(self._say_records(owner), now)
                self._has_stats = True
                self._has_state = self._has_state or owner.state.may_have_changed()
            if (self._has_state and now >= self._state_due) or (self._has_stats and now >= self._stats_due):
                self._state_due, self._stats_due = now + _STATE_INTERVAL_S, now + _STATS_INTERVAL_S
                self._has_state = self._has_stats = False
                self._say_state(owner)
        if not connection.has_room:
            return None  # until the daemon reads
        due = [self._records_due] if self._has_records else []
        if self._has_state:
            due.append(self._state_due)
        if self._has_stats:
            due.append(self._stats_due)
        return max(min(due) - now, 0.0) if due else None

    def _gather(self, num_said: int, now: float) -> None:
        """Sets when to check for records next: soon after some, else when the descriptor is readable."""
        self._has_records = num_said > 0 or not self._connection.has_room
        if num_said < _FEW_RECORDS or now < self._hurries_until:
            self._interval_s = _RECORDS_INTERVAL_S
        else:
            whole_frame_s = self._interval_s * _RECORDS_IN_FRAME / num_said
            self._interval_s = min(max(whole_frame_s, _RECORDS_INTERVAL_S), _LONGEST_INTERVAL_S)
        self._records_due = now + self._interval_s

    def _wait(self, left_s: float | None) -> dict[int, int]:
        """Sleeps for at most `left_s`; returns the events of descriptors."""
        out = select.POLLOUT if self._connection.has_queued else 0
        self._watch(self._connection.fd, select.POLLIN | out)
        if self._link._records_fd >= 0:
            # It stays readable until the records are taken.
            self._watch(self._link._records_fd, 0 if self._has_records else select.POLLIN)
        # Rounded up, because a round that comes a fraction of a millisecond early would do nothing.
        return dict(self._poller.poll(None if left_s is None else int(left_s * 1000) + 1))

    def _hear(self, ready: dict[int, int]) -> None:
        if self._link._bell.fd in ready:
            self._link._bell.quiet()
        if ready.get(self._link._records_fd):
            self._has_records = True
        events = ready.get(self._connection.fd, 0)
        if events & select.POLLOUT:
            self._connection.flush()
        if events & ~select.POLLOUT:
            for message in self._connection.receive():
                self._obey(message)

    def _watch(self, fd: int, events: int) -> None:
        before = self._events.get(fd, 0)
        self._events[fd] = events
        if events and events != before:
            self._poller.register(fd, events)
        elif before and not events:
            self._poller.unregister(fd)

    # ---- what is said -----------------------------------------------------------------------

    def _say_records(self, owner: DaemonLink) -> int:
        """Sends the records, as long as the daemon reads; returns how many."""
        num_said = 0
        while records := owner.core.take_records(_RECORDS_IN_FRAME):
            self._connection.send_records(records)
            num_said += len(records) // RECORD_NBYTES
            if len(records) < _RECORDS_IN_FRAME * RECORD_NBYTES or not self._connection.has_room:
                break
        return num_said

    def _say_state(self, owner: DaemonLink) -> None:
        try:
            changed = owner.state.changed()
        except NativeError:
            return  # the agent is closing: records of transfers that end with it may still come
        for message in fitted(changed):
            self._connection.send(message)

    def _say_last(self) -> None:
        """Sends the records of transfers that ended with the agent."""
        owner = self._link._owner()
        if owner is not None and self.is_welcome and self._connection.has_room:
            self._say_records(owner)

    def _reply(self, answer: dict[str, Any]) -> None:
        try:
            self._connection.send(answer)
        except ValueError as error:
            self._connection.send(_failed(answer["id"], "exhausted", f"the answer cannot be sent: {error}"))

    # ---- what is heard ----------------------------------------------------------------------

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "welcome" and not self.is_welcome:
            self.is_welcome = self._has_state = self._has_records = True
            self._link._watch_records(_RECORDS_KEPT)
        elif kind == "refused":
            raise PermissionError(f"the daemon refuses it: {str(message.get('words'))[:200]}")
        elif kind == "call" and self.is_welcome:
            self._call(message)
        else:
            raise Malformed(f"the daemon said {kind[:40]!r}")

    def _call(self, message: dict[str, Any]) -> None:
        number, verb, args = message.get("id"), message.get("verb"), message.get("args")
        timeout_s = message.get("timeout_s", _LONGEST_CALL_S)
        if not (isinstance(number, int) and isinstance(verb, str) and isinstance(args, dict)):
            raise Malformed("a call has no id, verb or arguments")
        if type(timeout_s) not in (int, float) or not timeout_s > 0:
            raise Malformed("a call has no time")
        owner = self._link._owner()
        if owner is None:
            return

        # After a request the daemon waits for its effects.
        self._hurries_until = time.monotonic() + _HURRY_S
        self._records_due = min(self._records_due, time.monotonic() + _RECORDS_INTERVAL_S)
        calls, within_s = owner.calls, min(timeout_s, _LONGEST_CALL_S)
        later: list[Later] = []

        def first() -> Answer:
            answer = calls.answer(verb, args, within_s)
            if callable(answer):
                later.append(answer)
                return {}
            return answer

        answer = _outcome(number, first)
        if later:
            self._begin(later[0], number, verb.partition(".")[0])
        else:
            self._reply(answer)
            self._has_state = True

    def _begin(self, errand: Later, number: int, family: str) -> None:
        """Starts a thread for work that may take long."""
        answers, link = self._answers, self._link
        errands = link.errands[family]
        if not errands.acquire(blocking=False):
            words = f"{_MOST_CALLS[family]} calls of agent {link._name!r} are under way: ask again later"
            self._reply(_failed(number, "exhausted", words))
            return

        def run() -> None:
            try:
                answers.append(_outcome(number, errand))
            finally:
                errands.release()
            link.news()

        try:
            start_thread(run, "kvxfer-call")
        except RuntimeError as error:
            errands.release()
            self._reply(_failed(number, "system", f"no thread can be started: {error}"))


def _outcome(number: int, errand: Later) -> dict[str, Any]:
    """Returns the reply to a call: its answer or its error."""
    try:
        return {"t": "reply", "id": number, "answer": errand()}
    except KvxferError as error:
        return _failed(number, error.code, str(error.args[0]))
    except TimeoutError as error:
        return _failed(number, "deadline", str(error))
    except NativeError as error:
        told = translate(error)
        return _failed(number, told.code, str(told.args[0]))
    except Exception as error:
        logger().exception("kvxfer: a call of the daemon failed")
        return _failed(number, "internal", f"{type(error).__name__}: {error}")


def _failed(number: int, code: str, words: str) -> dict[str, Any]:
    return {"t": "reply", "id": number, "code": code, "words": words[:2000]}


_links: weakref.WeakSet[_LinkThread] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
