"""Settings of a running agent, over real rails: rates of peers, and rails that are off."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, Peer, PeerError, Region, Transfer, TransferError, UsageError
from tests.waiting import until

BLOCKS = 64
NBYTES = 64 << 10  # of a block


class Ends:
    """A prefill with full blocks, and a decode with empty ones that may read them."""

    def __init__(self, *names: str, **options: object) -> None:
        made = AgentOptions(**options)  # type: ignore[arg-type]
        self.agents = [Agent(name, made) for name in ("decode", *(names or ("prefill",)))]
        self.decode, *self.prefills = self.agents
        self.memory = [np.zeros((BLOCKS, NBYTES), np.uint8) for _ in self.agents]
        for memory in self.memory[1:]:
            memory[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None] + 1
        self.regions: list[Region] = [
            agent.register("kv", memory) for agent, memory in zip(self.agents, self.memory, strict=True)
        ]
        self.peers: list[Peer] = [self.decode.connect_blocking(each.address) for each in self.prefills]
        for agent, region in zip(self.prefills, self.regions[1:], strict=True):
            region.grant(agent.accept_blocking(timeout_s=30), ttl_s=300)

    def read(self, of: int = 0, num_blocks: int = BLOCKS, **terms: object) -> Transfer:
        ids = range(num_blocks)
        remote = self.peers[of].region_blocking("kv")
        return self.decode.read(self.regions[0], remote, ids, ids, **terms)  # type: ignore[arg-type]

    def has_all(self) -> bool:
        return bool((self.memory[0] == self.memory[1]).all())

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_limited_peer_waits_and_others_do_not(transport: str) -> None:
    with Ends("slow", "fast", transports=(transport,)) as ends:
        ends.decode.limit("slow", max_bytes_per_s=NBYTES)
        # At one block in a second, its deadline comes long before its end.
        paced = ends.read(0, timeout_s=2.0)
        ends.read(1).wait(30)
        assert ends.has_all()
        assert not paced._is_final()
        with pytest.raises(TransferError, match=f"{NBYTES} bytes per second, this agent's limit for 'slow'"):
            paced.wait(60)
        assert ends.peers[0].state == "open"
        # A running transfer continues as soon as the limit is removed.
        ends.memory[0][:] = 0
        lifted = ends.read(0, timeout_s=120.0)
        ends.decode.unlimit(ends.peers[0])
        assert not ends.decode.limits
        lifted.wait(60)
        assert ends.has_all()


def test_a_paced_transfer_is_cancelled_and_its_peer_may_end() -> None:
    with Ends(transports=("shm",)) as ends:
        ends.decode.limit("prefill", max_bytes_per_s=1, least_priority=3)
        cancelled, lost = ends.read(timeout_s=300.0), ends.read(timeout_s=300.0)
        cancelled.cancel()
        with pytest.raises(TransferError) as caught:
            cancelled.wait(30)
        assert caught.value.code == "cancelled"
        ends.prefills[0].close()
        with pytest.raises(PeerError):
            lost.wait(60)
        assert dict(ends.decode.limits)["prefill"].least_priority == 3, "it is kept for who comes back"


@pytest.mark.parametrize("order", [("libfabric", "ucx"), ("ucx", "libfabric"), ("tcp", "ucx")])
def test_pages_come_over_the_first_transport_that_is_named(order: tuple[str, str]) -> None:
    """A transport that reaches everything, like tcp, leaves nothing to later ones."""
    used = {"tcp"} if order[0] == "tcp" else {*order, "tcp"}
    with Ends(transports=order, transport_options={"ucx.transports": "tcp"}) as ends:
        until(lambda: set(ends.peers[0].rails) == used, "its rails do not come up")
        moved = ends.read()
        moved.wait(60)
        assert ends.has_all()
        assert moved.rails == (order[0],)


@pytest.mark.transports("libfabric")
@pytest.mark.parametrize(
    ("prefill", "decode", "moved"),
    [("write", "write", "written"), ("write", "read", "read"), ("read", "write", "read")],
)
def test_pages_are_written_where_both_ends_say_so(prefill: str, decode: str, moved: str) -> None:
    def made(name: str, way: str) -> Agent:
        options = {"libfabric.way": way}
        return Agent(name, AgentOptions(transports=("libfabric",), transport_options=options))

    with made("prefill", prefill) as src, made("decode", decode) as dst:
        peers = src.connect_blocking(dst.address), dst.accept_blocking(timeout_s=30)
        until(
            lambda: all(any(moved in path for path in peer.paths) for peer in peers),
            "an end is up in another way",
        )


@pytest.mark.parametrize("here", [True, False])
def test_rails_are_switched_off_and_come_back(here: bool) -> None:
    with Ends(transports=("shm", "unix")) as ends:
        peer = ends.peers[0]
        assert set(peer.rails) == {"shm", "unix"}
        agent = ends.decode if here else ends.prefills[0]
        far = peer if here else agent.peers[0]
        # The dialled end has a rail a moment after the dialling end.
        until(lambda: set(far.rails) == {"shm", "unix"}, "its own end does not come up")
        agent.switch_rails("shm", on=False)
        assert agent.rails_off == ("shm",)
        until(lambda: peer.rails == ("unix",), "it stays up")
        assert any("switched off here" in note for note in far.notes)
        assert agent.stats()["rails_lost"] == 1
        ends.read().wait(60)
        assert ends.has_all()
        with pytest.raises(UsageError, match=repr(far.name)) as caught:
            agent.switch_rails("unix", on=False)
        assert caught.value.code == "unsupported"
        # A new session works without the rail, and gets it when it is on again.
        peer.disconnect()
        ends.peers[0] = peer = ends.decode.connect_blocking(ends.prefills[0].address)
        ends.regions[1].grant(ends.prefills[0].accept_blocking(timeout_s=30), ttl_s=300)
        assert peer.rails == ("unix",)
        agent.switch_rails("shm", on=True)
        until(lambda: set(peer.rails) == {"shm", "unix"}, "it does not come back")
        ends.memory[0][:] = 0
        ends.read().wait(60)
        assert ends.has_all()


def test_what_cannot_be_set_is_refused_in_words() -> None:
    with Ends(transports=("shm", "unix"), require=("unix",)) as ends:
        agent = ends.decode
        with pytest.raises(UsageError, match="requires unix"):
            agent.switch_rails("unix", on=False)
        with pytest.raises(UsageError, match=r"it has .*shm"):
            agent.switch_rails("smoke", on=False)
        for wrong in ({"max_bytes_per_s": 0}, {"max_bytes_per_s": 1.5}, {"least_priority": 256}, {}):
            with pytest.raises(UsageError, match=next(iter(wrong), "unlimit")):
                agent.limit("prefill", **wrong)
        for name in ("", "n" * 129, None):
            with pytest.raises(UsageError, match="peer"):
                agent.unlimit(name)  # type: ignore[arg-type]
        assert not agent.rails_off
        assert not agent.limits


@pytest.mark.transports("libfabric")
@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"provider": "smoke"}, 'has no provider "smoke"'),
        ({"provider": "shm"}, "keeps a lock"),
        ({"devices": "smoke0"}, 'libfabric.devices is "smoke0", and the provider has '),
        ({"library": "/smoke.so"}, "/smoke.so"),
        ({"way": "send"}, 'libfabric.way is "send": use read or write'),
    ],
)
def test_what_a_library_does_not_have_is_refused_in_words(named: dict[str, str], words: str) -> None:
    options = {f"libfabric.{name}": value for name, value in named.items()}
    with pytest.raises(UsageError, match=re.escape(words)):
        Agent("alone", AgentOptions(transports=("libfabric",), transport_options=options))
