"""Delivers events of the native completion ring to waiters, on any event loop, any thread, or none."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from kvxfer._native import NativeError
from kvxfer.arguments import seconds, seconds_or_none
from kvxfer.errors import AgentError, KvxferError, translate
from kvxfer.log import logger

if TYPE_CHECKING:
    import asyncio

    from kvxfer._native import AgentCore, Event


#: What a waiter waits for: a kind, and the number of a handle, peer, lease or command ring.
Key = tuple[str, int]
#: A key that stands for every number of its kind.
ANY: Final = -1
NOTIFICATION: Final = ("notification", ANY)
MESSAGE: Final = ("message", ANY)
_MAIL: Final = (NOTIFICATION, MESSAGE)
#: The part of a handle's key for all of its layers, and for kinds without layers.
ALL_LAYERS: Final = -1

_DRAIN_EVENTS: Final = 256
#: Longest sleep before a waiter checks again, because poll() counts milliseconds in 31 bits.
_LONGEST_NAP_S: Final = 3600.0
#: Longest sleep of the main thread, which must run signal handlers, as in native waits (`nap_s`).
_SIGNALS_S: Final = 0.1
#: Longest sleep of any thread if the process has no descriptor left for waking it.
LOOK_AGAIN_S: Final = 0.02
# What AgentCore.poll returns while the ring holds events.
_EVENTS: Final = 2

#: Called for new events, by the thread that drained them, without a lock; must not block.
Wake = Callable[[], None]


class Completions:
    """Reads the events of one agent and wakes the waiters.

    No thread owns the ring. Each event loop with a waiter watches the one event descriptor. Of the blocking
    calls, one polls it for all. The first thread or loop that wakes drains the ring and wakes the others.
    While notifications or messages are awaited, a loop also watches the sockets and does short work itself;
    going through the agent's thread would take two wake-ups. Without waiters there are no events for
    transfers; their handles have the state. All methods may be called from any thread.

    Parameters
    ----------
    core
        The native agent; its ``event_fd`` stays open as long as it lives.
    agent_name
        The agent's name, for messages.
    spin_us
        How long a blocking call drives progress itself before it sleeps.
    on_event
        Called before waiters wake, for every event except those that only wake a waiter; must not block.
    """

    def __init__(
        self,
        core: AgentCore,
        agent_name: str,
        spin_us: int,
        on_event: Callable[[Event], None],
    ) -> None:
        self.core = core
        self.agent_name = agent_name
        self._spin_s = spin_us * 1e-6
        self._on_event = on_event
        self._lost: KvxferError | None = None
        self.is_broken = False  # the native agent has ended by itself, and is still to be closed
        self._stopped = False  # event loops no longer watch
        self._waiters: dict[Key, dict[int, list[Wake]]] = {}
        self._loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._serving: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        # Whether a loop ever watched. Counting the set would take longer than the rest of an idle drain, and
        # arming for a loop that is gone costs only one needless write.
        self._watched = False
        self._lock = threading.Lock()  # for the tables above
        self._draining = threading.Lock()
        # One blocking waiter, the driver, sleeps on the descriptor; the others sleep on this condition.
        self._turn = threading.Condition(threading.Lock())
        self._driver = 0
        self._num_blocked = 0
        self._wake_fd = -1
        _instances.add(self)

    # ---- state ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `AgentError` if the agent is closed, or if this is the child of a fork."""
        if self._lost is not None:
            raise type(self._lost)(str(self._lost.args[0]), code=self._lost.code)

    @property
    def lost(self) -> bool:
        """Whether `check` would raise."""
        return self._lost is not None

    def forked(self) -> None:
        """Runs in the child of a fork, where no thread, lock or socket of the parent may be touched."""
        self._lost = AgentError(
            "this process was forked from the agent's process, and the agent's threads and sockets stayed "
            "there: make a new agent after fork(), or start workers by spawn",
            code="forked",
        )

    def stop_watching(self) -> None:
        """Removes the descriptors from every event loop. Called before the agent closes."""
        with self._lock:
            self._stopped = True
            loops = list(self._loops)
            self._loops.clear()
            self._serving.clear()
            self._watched = False
        if not loops:
            return  # returns before the import of asyncio, which fails if the process has no descriptor left
        try:
            import asyncio
        except ImportError:  # the interpreter ends, and runs no loop any more
            return

        for loop in loops:
            if loop.is_closed():
                continue
            if asyncio._get_running_loop() is loop:
                self._remove_readers(loop)
            else:
                # The bound method keeps the core and its descriptors alive until it has run.
                _call_soon(loop, self._remove_readers, loop)

    def shut(self, error: KvxferError) -> None:
        """Called after the agent closed: wakes all waiters; `check` raises from now on."""
        self.drain()
        self._lost = error
        self.is_broken = False
        self._wake_all()
        with self._turn:
            self._close_wake_fd()

    def _wake_all(self) -> None:
        with self._lock:
            waiters = [w for parts in self._waiters.values() for part in parts.values() for w in part]
            self._waiters.clear()
        for wake in waiters:
            wake()
        self._wake_blocked()

    # ---- draining ---------------------------------------------------------------------------

    def drain(self) -> bool:
        """Takes every event off the ring and wakes its waiters; arms the descriptor if one sleeps.

        Returns whether there were events.
        """
        found = False
        with self._draining:
            # Read under the lock: a thread that goes to sleep on the descriptor later drains after this.
            arm = self._watched or self._num_blocked > 0
            try:
                while events := self.core.drain(_DRAIN_EVENTS, arm):
                    found = True
                    for event in events:
                        self._dispatch(event)
                    if not arm and len(events) < _DRAIN_EVENTS:
                        break
            except NativeError as error:
                if self._lost is None:
                    self._lose(translate(error))
        return found

    def _lose(self, error: KvxferError) -> None:
        """The native agent has ended by itself: wakes all waiters; `check` raises from now on."""
        logger().error("kvxfer: %s", error)
        self.is_broken = True
        self._lost = error
        self._wake_all()

    def _dispatch(self, event: Event) -> None:
        kind = event.kind
        if kind == "ended" or kind == "layer":
            self._wake(("handle", event.handle), ALL_LAYERS if kind == "ended" else event.layer)
            return
        if kind == "notification":
            self._wake(NOTIFICATION)
            return
        if kind == "message":
            self._wake(MESSAGE)
            return
        if kind == "commands":
            self._wake(("commands", event.handle))
            return
        if kind == "room":
            self._wake(("room", event.peer))
            return
        if kind == "lease-acknowledged":
            self._wake(("lease", event.lease))
            return
        self._on_event(event)
        if kind in ("peer-up", "peer-lost"):
            self._wake(("peer", event.peer))
            self._wake(("peer", ANY))
        elif kind in ("region", "region-gone"):
            self._wake(("region", event.peer))
        elif kind == "lease-ended":
            self._wake(("lease", event.lease))
        if kind == "peer-lost":
            self._wake(("region", event.peer))
            self._wake(("room", event.peer))

    def _wake(self, key: Key, part: int = ALL_LAYERS) -> None:
        """Wakes the waiters for this part, or for all parts if the whole has ended."""
        if self._waiters:
            with self._lock:
                parts = self._waiters.get(key)
                if parts is None:
                    waiters: list[Wake] = []
                elif part == ALL_LAYERS:
                    waiters = [wake for group in parts.values() for wake in group]
                else:
                    waiters = list(parts.get(part, ()))
            for wake in waiters:
                wake()
        if self._num_blocked:
            self._wake_blocked()

    # ---- waiting on an event loop -------------------------------------------------------------

    async def until(
        self, key: Key, is_over: Callable[[], bool], timeout_s: float | None = None, part: int = ALL_LAYERS
    ) -> bool:
        """Returns whether `is_over` became true in time; checks again whenever `key` has an event.

        None waits without bound. Cancelling abandons only the waiting.

        Raises
        ------
        UsageError
            `timeout_s` is not a valid time.
        """
        if timeout_s is not None:
            return await self._until_within(key, is_over, seconds(timeout_s, "timeout_s"), part)
        self.check()
        if is_over():
            return True
        import asyncio

        loop = asyncio.get_running_loop()
        self.watch(loop)
        while True:
            news = loop.create_future()
            wake = partial(resolve, loop, news)
            self.enter(key, part, wake)
            try:
                # The event may have come between the last check and the entry in the table.
                self.check()
                if is_over():
                    return True
                if key not in _MAIL:
                    self._look_away(loop)
                elif loop not in self._serving and self.core.serves:
                    self._watch_sockets(loop)
                await news
            finally:
                self.leave(key, part, wake)

    async def _until_within(self, key: Key, is_over: Callable[[], bool], timeout_s: float, part: int) -> bool:
        import asyncio

        # Checked once more even if no time is left.
        self.check()
        if is_over():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                return await self.until(key, is_over, part=part)
        except TimeoutError:
            return False

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes an event loop drain the ring from now on, as long as the agent is open."""
        with self._lock:
            if self._stopped or loop in self._loops:
                return  # the agent is closing, which wakes all waiters
            self._loops.add(loop)
            self._watched = True
        loop.add_reader(self.core.event_fd, self.drain)
        self.drain()  # arms the descriptor, and takes events from before the loop watched

    def _look_away(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stops watching the sockets before a wait that is mostly long or takes several wake-ups."""
        if loop in self._serving and not self._awaits_mail():
            self._leave_sockets(loop)

    def _watch_sockets(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if loop not in self._loops:
                return  # the agent is closing
            self._serving.add(loop)
        loop.add_reader(self.core.sockets_fd, self._serve, loop)

    def _leave_sockets(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._serving.discard(loop)
        loop.remove_reader(self.core.sockets_fd)
        self.core.leave()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        # A new wait starts watching again: after events, or when the long wait is over.
        if not self._awaits_mail() or not self.core.serve():
            self._leave_sockets(loop)
        self.drain()

    def _awaits_mail(self) -> bool:
        return NOTIFICATION in self._waiters or MESSAGE in self._waiters

    def _remove_readers(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.core.event_fd)
        loop.remove_reader(self.core.sockets_fd)

    # ---- who waits ----------------------------------------------------------------------------

    def enter(self, key: Key, part: int, wake: Wake) -> None:
        """Calls `wake` whenever this part of `key` has an event, or when the agent is lost.

        Earlier events are not reported, so check the state after this call. End it with `leave`.
        """
        with self._lock:
            if not self._waiters:
                self.core.add_waiters(1)
            self._waiters.setdefault(key, {}).setdefault(part, []).append(wake)

    def leave(self, key: Key, part: int, wake: Wake) -> None:
        """Ends what `enter` began; does nothing if the agent was lost since."""
        with self._lock:
            parts = self._waiters.get(key)
            if parts is None:
                return
            group = parts.get(part, [])
            if wake in group:
                group.remove(wake)
            if not group:
                parts.pop(part, None)
            if not parts:
                del self._waiters[key]
                # In the child of a fork a lock of the ring may be held for ever.
                if not self._waiters and self._lost is None:
                    self.core.add_waiters(-1)

    # ---- waiting on a thread ------------------------------------------------------------------

    def block_until(self, is_over: Callable[[], bool], timeout_s: float | None) -> bool:
        """Returns whether `is_over` became true in time; None waits without bound.

        The calling thread drives progress for a short time, then sleeps.

        Raises
        ------
        UsageError
            `timeout_s` is not a valid time.
        """
        timeout_s = seconds_or_none(timeout_s, "timeout_s")
        self.check()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.drain()
        if is_over() or self._spin(is_over, deadline):
            return True
        with self._turn:
            self._num_blocked += 1
            self.core.add_waiters(1)
            try:
                # The drain of the last driver, or of this one, has armed the descriptor.
                while True:
                    self.check()
                    if is_over():
                        return True
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    if self._driver:
                        self._turn.wait(nap_s(left))
                    else:
                        self._drive(left)
            finally:
                self.core.add_waiters(-1)
                self._num_blocked -= 1
                if self._lost is not None:
                    self._close_wake_fd()

    def _spin(self, is_over: Callable[[], bool], deadline: float | None) -> bool:
        until = time.monotonic() + self._spin_s
        if deadline is not None:
            until = min(until, deadline)
        while time.monotonic() < until:
            if self.poll() and is_over():
                return True
        return False

    def _drive(self, left_s: float | None) -> None:
        """Sleeps on the descriptor for all blocked threads. Holds ``_turn`` on entry and return."""
        if self._wake_fd < 0:
            try:
                self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            except OSError:  # no descriptor is left: checking again shows what other threads drained
                left_s = LOOK_AGAIN_S if left_s is None else min(left_s, LOOK_AGAIN_S)
        wake_fd = self._wake_fd
        self._driver = threading.get_ident()
        self._turn.release()
        try:
            # Events since the caller's last check may be what it waits for, so it checks again first.
            if not self.drain():
                poller = select.poll()
                poller.register(self.core.event_fd, select.POLLIN)
                if wake_fd >= 0:
                    poller.register(wake_fd, select.POLLIN)
                poller.poll(nap_s(left_s) * 1000)
                self.drain()
            if wake_fd >= 0:
                try:
                    os.eventfd_read(wake_fd)
                except BlockingIOError:
                    pass  # woken by the ring, or by time
        finally:
            self._turn.acquire()
            self._driver = 0
            self._turn.notify_all()

    def sleepers(self, change: int) -> None:
        """Adds `change` to the number of sleepers besides the driver; while there are any, drains arm."""
        with self._turn:
            self._num_blocked += change
            if self._lost is not None:
                self._close_wake_fd()

    def _close_wake_fd(self) -> None:
        """Closes the descriptor of a lost agent once no thread needs it. Called under ``_turn``."""
        if not self._num_blocked and self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _wake_blocked(self) -> None:
        me = threading.get_ident()
        if self._driver == me:
            return  # the driver checks again after draining, and then notifies the others
        with self._turn:
            self._turn.notify_all()
            if self._driver and self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def poll(self) -> bool:
        """Drives progress once without blocking; returns whether anything moved or arrived."""
        try:
            news = self.core.poll()
        except NativeError as error:
            self.check()
            self.drain()  # an agent that has ended by itself is lost for all waiters, not for this one alone
            self.check()
            raise translate(error) from None
        if news == _EVENTS:
            self.drain()
        return news != 0


def nap_s(left_s: float | None) -> float:
    """Returns how long a waiting thread may sleep at a time. `left_s` is None for a wait without bound.

    Python runs signal handlers only on the main thread. A signal does not wake a system call that begins just
    after the signal, or if the kernel delivers the signal to another thread. So the main thread never sleeps
    for long.
    """
    is_main = threading.get_ident() == threading.main_thread().ident
    longest_s = _SIGNALS_S if is_main else _LONGEST_NAP_S
    return longest_s if left_s is None else min(left_s, longest_s)


def resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Wakes the waiters of a loop's future, from any thread; a closed loop has no waiters."""
    import asyncio

    if asyncio._get_running_loop() is loop:
        _set(future)
    else:
        _call_soon(loop, _set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass  # the loop closed, so it has no waiters


_instances: weakref.WeakSet[Completions] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for completions in list(_instances):
        completions.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
