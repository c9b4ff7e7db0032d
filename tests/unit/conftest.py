"""A native agent that does nothing by itself: unit tests say what happens, and when.

The classes ``Fake...`` define what the native classes do, with their parameters (tests/unit/test_abi.py);
how a test moves them stands in the classes below them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.session.requests import Expected, Grant, Program, Terms


class HandleControls:
    """How a test moves a transfer."""

    def __init__(self, core: CoreControls, number: int) -> None:
        self.core = core
        self.id = number
        self.state = "pending"
        self.code = 0
        self.message = ""
        self.context = ""
        self.failed_blocks = np.empty(0, np.uint32)
        self.rails: tuple[str, ...] = ("shm",)
        self.posted_ns, self.first_piece_ns, self.ended_ns = 1, 0, 0
        self.arrived: set[int] = set()
        self.ready = -1
        self.cancelled = False
        self.gpu = 0
        self.waits: list[tuple[int, int | None]] = []

    def arrive(self, layer: int) -> None:
        self.arrived.add(layer)
        self.core.happen("layer", handle=self.id, layer=layer)

    def end(
        self, state: str = "done", code: int = 0, message: str = "", failed: tuple[int, ...] = ()
    ) -> None:
        self.failed_blocks = np.array(failed, np.uint32)
        self.code, self.message, self.state, self.ended_ns = code, message, state, 3
        self.core.happen("ended", handle=self.id)


class FakeHandle(HandleControls):
    """A transfer whose state the test sets."""

    def wait(self, timeout_s: float) -> bool:
        return self.state != "pending"

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        return layer in self.arrived or self.state != "pending"

    def layer_arrived(self, layer: int) -> bool:
        return layer in self.arrived or self.state == "done"

    def watch_layer(self, layer: int) -> bool:
        return self.layer_arrived(layer)

    def layers_ready(self, layers: int) -> None:
        self.ready = layers

    def cancel(self) -> None:
        self.cancelled = True

    def wait_in(self, stream: int, layer: int | None) -> Any:
        self.waits.append((stream, layer))
        return SimpleNamespace(outcome=0, address=64)


class FakeRoute:
    """Records its posts as the core's ``post`` does: peer, program, ids, layers, and the rest."""

    def __init__(self, core: CoreControls, route: tuple[int, int, int, int], as_ids: Any) -> None:
        self._core, self._route, self._as_ids = core, route, as_ids

    def post(
        self,
        src_blocks: Any,
        dst_blocks: Any,
        num_fine: int,
        notify: bytes,
        timeout_s: float | None,
        context: str | bytes,
        terms: Terms,
    ) -> FakeHandle:
        peer, program, *layers = self._route
        ids = self._as_ids(src_blocks), self._as_ids(dst_blocks)
        told = (peer, program, *ids, num_fine, *layers, notify, timeout_s, context, *terms)
        return self._core.made("post", told)


class CoreControls:
    """A test's controls of an agent, and a record of its calls."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.is_copying = False  # whether a device still copies, also after the end of leases
        self.name, self.options = name, options
        self.address = "tcp://127.0.0.1:7301" if options["listen"] else ""
        self.incarnation = name.encode().ljust(16)[:16]
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.sockets_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.serves = False
        self.leaves = 0  # how many times from now on `serve` leaves the work to the thread
        self.num_served = self.num_left = 0
        self.events: list[SimpleNamespace] = []
        self.mail: dict[str, list[tuple[Any, ...]]] = {"notification": [], "message": []}
        self.num_waiters = 0
        self.armed = False
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.handles: list[FakeHandle] = []
        self.lease_states: dict[int, str] = {}
        self.known: dict[int, dict[str, Any]] = {}
        self.regions_of: dict[int, list[dict[str, Any]]] = {}
        self.num_regions = 0
        self.num_changes = 0
        self.opens_at_once = False  # sessions that it begins

    def happen(self, kind: str, **values: Any) -> None:
        event: dict[str, Any] = dict.fromkeys(("handle", "peer", "region", "lease", "layer", "code"), 0)
        event.update(kind=kind, message="")
        if kind in self.mail:
            context = ("",) if kind == "notification" else ()
            self.mail[kind].append((values.pop("peer"), values.pop("payload"), *context))
        if kind in ("ended", "layer", *self.mail) and self.num_waiters == 0:
            return
        self.events.append(SimpleNamespace(**{**event, **values}))
        if self.armed:
            self.armed = False
            os.eventfd_write(self.event_fd, 1)

    def add_peer(self, number: int, name: str, state: str = "open") -> None:
        self.known[number] = {
            "name": name,
            "incarnation": name.encode().ljust(16),
            "state": state,
            "is_ours": False,
            "identity": "",
            "rails": ["shm"],
            "paths": [],
            "notes": [],
            "code": 0,
            "message": "",
        }

    def made(self, name: str, arguments: tuple[Any, ...]) -> FakeHandle:
        self.calls.append((name, arguments))
        self.handles.append(FakeHandle(self, len(self.handles) + 1))
        return self.handles[-1]

    def called(self, name: str) -> list[Any]:
        return [arguments for called, arguments in self.calls if called == name]


class FakeSender:
    def info(self) -> dict[str, Any]:
        return {"name": "decode", "incarnation": bytes(16), "is_ours": False, "identity": ""}


class FakeCore(CoreControls):
    """Records its calls, and reports the events that `happen` adds."""

    def trigger(self) -> Any:
        from kvxfer._native import trigger_over

        return trigger_over(np.zeros(1, np.uint32))

    def record(self, trigger: Any, stream: int, value: int) -> None:
        self.calls.append(("record", (stream, value)))

    def after_stream(self, stream: int) -> Any:
        return self._after("after_stream", stream)

    def after_event(self, event: int) -> Any:
        return self._after("after_event", event)

    def _after(self, verb: str, handle: int) -> Any:
        from kvxfer._native import After

        self.calls.append((verb, (handle,)))
        return After(self.trigger(), 1, 0)

    def drain(self, max_events: int = 256, arm: bool = True) -> list[SimpleNamespace]:
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            pass
        events, self.events = self.events[:max_events], self.events[max_events:]
        self.armed = self.armed or (arm and not events)
        return events

    def add_waiters(self, change: int) -> None:
        self.num_waiters += change
        assert self.num_waiters >= 0

    def take_notification(self) -> tuple[Any, ...] | None:
        return (*self.mail["notification"].pop(0), FakeSender()) if self.mail["notification"] else None

    def take_message(self) -> tuple[Any, ...] | None:
        return (*self.mail["message"].pop(0), FakeSender()) if self.mail["message"] else None

    def serve(self) -> bool:
        self.num_served += 1
        if self.leaves:
            self.leaves -= 1
            return False
        os.eventfd_read(self.sockets_fd)
        return True

    def leave(self) -> None:
        self.num_left += 1

    def poll(self) -> int:
        if self.called("close"):
            from kvxfer._native import CODES, NativeError

            raise NativeError(CODES["closed"], "agent is closed")
        return 2 if self.events else int(any(self.mail.values()))

    def close(self, timeout_s: float) -> None:
        self.calls.append(("close", (timeout_s,)))

    @property
    def ended(self) -> bool:
        return bool(self.called("close"))

    def stats(self) -> dict[str, int]:
        return {"transfers": len(self.handles)}

    def register(
        self,
        name: str,
        spans: Any,
        num_blocks: int,
        footprint: Any,
        layout: bytes,
        device: int,
        owner: object,
    ) -> int:
        self.calls.append(("register", (name, spans, num_blocks, footprint, layout, device, owner)))
        self.num_regions += 1
        return self.num_regions

    def note_change(self) -> None:
        self.num_changes += 1

    def region_kind(self, region: int) -> str:
        return "foreign"

    def region_notes(self, region: int) -> list[str]:
        return ["tcp: full"]

    def deregister(self, region: int, timeout_s: float) -> bool:
        self.calls.append(("deregister", (region, timeout_s)))
        return not self.is_copying

    def begin_connect(self, address: str, timeout_s: float) -> int:
        if address == "tcp://nowhere:1":
            from kvxfer._native import NativeError

            raise NativeError(75, "connect to nowhere:1: no route (errno 113)")
        self.add_peer(1, "decode", "open" if self.opens_at_once else "connecting")
        return 1

    def disconnect(self, peer: int, code: int = 0, text: str = "") -> None:
        self.calls.append(("disconnect", (peer, code, text)))

    def peer(self, peer: int) -> dict[str, Any]:
        return self.known[peer]

    def peers(self) -> list[int]:
        return list(self.known)

    def peer_regions(self, peer: int) -> list[dict[str, Any]]:
        return self.regions_of.get(peer, [])

    def install_program(self, program: Program) -> int:
        self.calls.append(("install_program", program))
        return 40 + len(self.calls)

    def route(
        self,
        peer: int,
        program: int,
        first_layer: int,
        num_layers: int,
        timeout_s: float,
        integrity: bool,
        as_ids: Any,
    ) -> FakeRoute:
        return FakeRoute(self, (peer, program, first_layer, num_layers), as_ids)

    def expect(self, expected: Expected) -> FakeHandle:
        return self.made("expect", expected)

    def grant(self, grant: Grant) -> int:
        self.calls.append(("grant", grant))
        self.lease_states[9] = "active"
        return 9

    def revoke(self, lease: int, timeout_s: float) -> bool:
        self.calls.append(("revoke", (lease, timeout_s)))
        if self.is_copying:
            self.lease_states[lease] = "ending"
            return False
        self.lease_states[lease] = "revoked"
        self.happen("lease-ended", lease=lease)
        return True

    def lease_state(self, lease: int) -> str:
        return self.lease_states[lease]


@pytest.fixture
def fake_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeCore]]:
    """The cores of the agents that the test makes, in order."""
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    from kvxfer import agent as agent_module

    cores: list[FakeCore] = []

    def make(name: str, options: dict[str, Any]) -> FakeCore:
        cores.append(FakeCore(name, options))
        return cores[-1]

    monkeypatch.delenv("KVXFER_SECRET", raising=False)
    monkeypatch.delenv("KVXFER_SECRET_FILE", raising=False)
    monkeypatch.setattr(agent_module, "AgentCore", make)
    yield cores
    for core in cores:
        os.close(core.event_fd)
        os.close(core.sockets_fd)
