"""``kvxfer doctor --serve``: an agent whose pages every peer may read, for ``--peer`` to measure."""

from __future__ import annotations

import threading
from collections.abc import Callable

import kvxfer
from kvxfer.doctor import pages
from kvxfer.errors import PeerError

_NAME = "kvxfer-doctor"
# Renewed by the reader's heartbeats; ends with its session.
_LEASE_S = 10.0
# How soon a new peer gets its lease; a reader asks again for longer than that.
_LOOK_INTERVAL_S = 0.05


def serve(
    options: kvxfer.AgentOptions,
    stop: threading.Event,
    on_address: Callable[[str], None],
    on_peer: Callable[[str], None],
) -> None:
    """Serves until ``stop`` is set; every peer may read the doctor's pages and nothing else.

    Parameters
    ----------
    options
        The agent's options; ``listen`` and the secret decide which peers can connect.
    on_address
        Called once, with the address at which others reach it, when peers can connect.
    on_peer
        Called with one sentence when a peer has connected or disconnected.

    Raises
    ------
    KvxferError
        The options do not fit, the address cannot be listened on, or there is no memory for the pages.
    """
    total_nbytes = pages.TOTAL_NBYTES + pages.PING_NBYTES
    with kvxfer.Pool(1, total_nbytes, name=_NAME) as pool, kvxfer.Agent(_NAME, options) as agent:
        served = pool.array((pages.NUM_PAGES, pages.PAGE_NBYTES))
        pages.fill(served)
        ping = pool.array((1, pages.PING_NBYTES))
        regions = [agent.register(pages.REGION, served), agent.register(pages.PING_REGION, ping)]
        on_address(agent.address)
        known: dict[int, kvxfer.Peer] = {}
        while not stop.wait(_LOOK_INTERVAL_S):
            here = {peer.id: peer for peer in agent.peers}
            for number in known.keys() - here.keys():
                on_peer(f"{known.pop(number).name} has disconnected")
            for number in here.keys() - known.keys():
                peer = known[number] = here[number]
                on_peer(f"{peer.name} is connected over {', '.join(peer.rails) or 'no rail'}")
                try:
                    for region in regions:
                        region.grant(peer, mode="read", ttl_s=_LEASE_S)
                except PeerError:
                    pass  # it has already gone; the next look reports that
