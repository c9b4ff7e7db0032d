"""One suite over every transport, and again where the transport misbehaves within its contract."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from tests.waiting import until

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import AgentOptions
from kvxfer.testing import FaultPlan, Pair, conformance, connected_pair, differing_layouts
from kvxfer.testing.conformance import Check
from kvxfer.testing.pair import SMALL, Cache


@dataclass(frozen=True)
class Setting:
    """One line of the matrix."""

    name: str
    options: AgentOptions
    path: str  # the transport that must be used
    memory: str = "pool"
    faults: FaultPlan | None = field(default=None)

    def pair(self, shape: tuple[int, ...], seed: int) -> AbstractContextManager[Pair]:
        """Never lossy: a piece that failed is fetched again, so that nothing may fail of it."""
        return connected_pair(
            replace(
                self.options,
                faults="" if self.faults is None else str(replace(self.faults, seed=seed)),
                # No agent in these tests falls silent for good, but on a busy machine one end may wait for
                # seconds.
                silent_timeout_s=conformance.BOUND_S,
                handshake_timeout_s=conformance.BOUND_S,
            ),
            memory=self.memory,
            shape=shape,
            seed=seed,
        )


# With eager_nbytes=0 all bytes go over rails; otherwise small writes go along with their announcement.
RAILS_ALONE = AgentOptions(eager_nbytes=0)
PLAIN = [
    Setting("loopback", AgentOptions(transports=("loopback",)), "loopback"),
    Setting("loopback-foreign", AgentOptions(transports=("loopback",)), "loopback", "foreign"),
    Setting("shm", AgentOptions(transports=("shm",)), "shm"),
    Setting("shm-foreign", AgentOptions(transports=("shm",)), "shm", "foreign"),
    Setting("shm-3-threads", AgentOptions(transports=("shm",), copy_threads=3), "shm"),
    Setting("unix", replace(RAILS_ALONE, transports=("unix",)), "unix", "foreign"),
    Setting("tcp", replace(RAILS_ALONE, transports=("tcp",), transport_options={"tcp.rails": 1}), "tcp"),
    Setting(
        "ucx", replace(RAILS_ALONE, transports=("ucx",), transport_options={"ucx.transports": "tcp"}), "ucx"
    ),
    Setting("libfabric", replace(RAILS_ALONE, transports=("libfabric",)), "libfabric"),
    Setting(
        "tcp-2-rails", replace(RAILS_ALONE, transports=("tcp",), transport_options={"tcp.rails": 2}), "tcp"
    ),
]
EAGER = [
    Setting("tcp-eager", AgentOptions(transports=("tcp",), eager_nbytes=65_536), "tcp"),
    Setting("unix-eager", AgentOptions(transports=("unix",), eager_nbytes=65_536), "unix", "foreign"),
]
WRITTEN = [
    Setting(
        "libfabric-written",
        replace(RAILS_ALONE, transports=("libfabric",), transport_options={"libfabric.way": "write"}),
        "libfabric",
    ),
]
SLOW = FaultPlan(again=0.3, delay=0.3, reorder=0.5)
# A transfer ends when 64 pieces of it, and four times as many as it has, had to be brought again: never by
# this rate.
FAILING = FaultPlan(again=0.2, delay=0.2, reorder=0.3, fail=0.1)
SETTINGS = [
    *PLAIN,
    *EAGER,
    *WRITTEN,
    *(replace(setting, name=f"{setting.name}+slow", faults=SLOW) for setting in PLAIN),
    *(replace(setting, name=f"{setting.name}+failing", faults=FAILING) for setting in PLAIN),
]


CHECKS = (*conformance.CHECKS, *differing_layouts.CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_contract(setting: Setting, check: Check, seed: int) -> None:
    check(lambda shape: setting.pair(shape, seed))


@pytest.mark.parametrize("setting", SETTINGS[-len(PLAIN) :], ids=lambda setting: setting.name)
def test_pieces_that_fail_are_brought_again(setting: Setting, seed: int) -> None:
    with setting.pair(SMALL, seed) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(1)
        dst.region.grant(dst.peer, None, "write")
        for _ in range(300):
            conformance.settle(pair, src.agent.write(src.region, src.remote, [1], [2]))
        conformance.same(dst, [2], src.blocks([1]))
        redone = sum(end.agent.stats()["pieces_redone"] for end in (src, dst))
        assert redone > 0, "none of 300 failed"  # 0.9**300 is 10**-14


@pytest.mark.parametrize("setting", PLAIN, ids=lambda setting: setting.name)
def test_the_path_that_was_asked_for_is_used(setting: Setting, seed: int) -> None:
    with setting.pair((2, 2, 8, 4, 2, 32), seed) as pair:
        for end in (pair.prefill, pair.decode):
            # The end that was connected to knows its peer before the last of its rails is up.
            until(partial(_has_path, end, setting.path), end.remote)


def _has_path(end: Cache, path: str) -> bool:
    end.agent.poll()
    return end.remote.path == path
