"""A peer: whether it can be reached, over which path, and how fast its pages arrive."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import kvxfer
from kvxfer.address import SCHEME, Address
from kvxfer.doctor import pages
from kvxfer.doctor.finding import Finding, State
from kvxfer.errors import KvxferError, TransferError, UsageError
from kvxfer.session import transport_registry as registry

SUBJECT = "peer"

# The daemon's REST listens there, and often its address is known best.
_PORT_OF_REST = 7380
_CHANGE_REST = (
    "7380 is the port of a daemon's REST: name an agent's address (kvxfer agents lists them), or start "
    "kvxfer doctor --serve --listen HOST:PORT on the peer"
)
# How long to wait for a doctor's lease after the session is open (serve.py looks every 50 ms).
_LEASE_WAIT_S = 3.0
_LEASE_RETRY_S = 0.02
_NUM_PINGS = 200
# Checking pages takes several times as long as reading them: the whole takes at most this multiple.
_MAX_CHECKED = 5.0
_TRANSFER_TIMEOUT_S = 10.0
# The order of pages is random, as after a day of serving, but seeded, so that two runs read alike.
_SEED = 1

_WHY_SESSION = (
    "every transfer needs a session: a connection to the peer, and the same secret if either end has one"
)
_CHANGES = {
    "unreachable": "start the peer (kvxfer doctor --serve --listen HOST:PORT), check its address, let "
    "the port through firewalls, and give both ends a transport in common (--transports)",
    "auth-failed": "give both ends the same KVXFER_SECRET_FILE (or KVXFER_SECRET), or none",
    "peer-lost": "check that the port is an agent's and that it is running; its log says why it closed the "
    "connection",
    "protocol": "check that the port is an agent's, and run the same version of kvxfer at both ends",
    "no-answer": "check that the port is an agent's and that nothing on the way drops packets",
}


def complete_address(address: str, option: str) -> str:
    """Returns ``"tcp://host:port"`` for what an option names, with or without its scheme.

    Raises
    ------
    UsageError
        ``invalid-argument``: it is not an address.
    """
    return str(Address.parse(SCHEME + address.removeprefix(SCHEME), option))


def examine(
    address: str,
    transports: tuple[str, ...],
    required: tuple[str, ...] = (),
    connect_timeout_s: float = 5.0,
    measure_s: float = 1.0,
) -> tuple[list[Finding], dict[str, Any]]:
    """Connects to an agent, names the path to it and, if it is a doctor, measures it.

    Parameters
    ----------
    address
        ``"tcp://host:port"``. The secret is the environment's.
    transports
        Kinds of rails that this end may use.
    required
        When any are named, a path over another transport is `State.BLOCKS`.
    connect_timeout_s
        How long connecting may take.
    measure_s
        How long pages are read; the whole takes up to five times as long, because every byte is checked.

    Returns
    -------
    tuple
        The findings, and the figures: ``address``, ``connected``, ``name``, ``rails``, ``paths`` (devices and
        addresses of rails that have their own), ``notes``, ``path``, ``connect_ms``; of a doctor also
        ``ping_us_p50``, ``gb_per_s``, ``nbytes``, ``verified``.

    Raises
    ------
    UsageError
        The options do not fit. A peer that is absent or refuses is a finding.
    """
    options = kvxfer.AgentOptions(listen="", transports=transports, connect_timeout_s=connect_timeout_s)
    figures: dict[str, Any] = {"address": address, "connected": False}
    with kvxfer.Agent(f"kvxfer-doctor-{os.getpid()}", options) as agent:
        started = time.monotonic()
        try:
            peer = agent.connect_blocking(address)
        except KvxferError as error:
            if isinstance(error, UsageError):
                raise
            change = _CHANGES.get(error.code, "see the cause in the message")
            if Address.parse(address, "--peer").port == _PORT_OF_REST and error.code != "auth-failed":
                change = _CHANGE_REST
            begin = f"cannot connect to {address}: "
            found = begin + str(error).removeprefix(begin)
            return [Finding(SUBJECT, "session", State.BLOCKS, found, _WHY_SESSION, change)], figures
        figures |= {"connected": True, "name": peer.name}
        figures["connect_ms"] = round((time.monotonic() - started) * 1e3, 3)
        try:
            return _connected(agent, peer, required, figures, measure_s)
        except KvxferError as error:
            found = f"{peer.name} was lost: {error}"
            change = "look at the peer's log; a session ends when the peer is silent for 2 s"
            return [Finding(SUBJECT, "session", State.BLOCKS, found, _WHY_SESSION, change)], figures


def _connected(
    agent: kvxfer.Agent,
    peer: kvxfer.Peer,
    required: tuple[str, ...],
    figures: dict[str, Any],
    measure_s: float,
) -> tuple[list[Finding], dict[str, Any]]:
    regions = peer.regions
    figures |= _rails_of(peer)
    found = f"connected to {peer.name!r} at {figures['address']} in {figures['connect_ms']:.1f} ms"
    findings = [
        Finding(SUBJECT, "session", State.GOOD, found, _WHY_SESSION),
        *(
            _foreign_region(region)
            for name, region in regions.items()
            if not name.startswith("kvxfer-doctor-")
        ),
    ]
    remote = regions.get(pages.REGION)
    if remote is None or pages.PING_REGION not in regions or not _fits(remote):
        figures["path"] = next((name for name in registry.kinds() if name in peer.rails), "")
        why = "only `kvxfer doctor --serve` of this version lets every peer read its pages"
        names = ", ".join(regions) or "none"
        findings += [
            _path(figures, required),
            Finding(
                SUBJECT,
                "speed",
                State.NOTE,
                f"not measured: {peer.name!r} does not serve a doctor's pages (its regions: {names})",
                why,
                "run kvxfer doctor --serve on the peer's machine and give its address",
            ),
        ]
        return findings, figures
    findings += _measured(agent, peer, figures, measure_s)
    # After the measurement: the rails that carried the bytes, not those that were meant to.
    figures.setdefault("path", remote.path)
    figures |= _rails_of(peer)
    findings.insert(1, _path(figures, required))
    return findings, figures


def _rails_of(peer: kvxfer.Peer) -> dict[str, list[str]]:
    return {"rails": list(peer.rails), "paths": list(peer.paths), "notes": list(peer.notes)}


def _path(figures: dict[str, Any], required: tuple[str, ...]) -> Finding:
    """Names the path in use, and the tried paths that are not used."""
    path, rails, notes = figures["path"], figures["rails"], figures["notes"]
    why = "when a faster path does not work, kvxfer uses a slower one without an error"
    found = f"{path or 'none'} (rails: {', '.join(rails) or 'none'})"
    if figures["paths"]:
        found += f"; {'; '.join(figures['paths'])}"
    if notes:
        found += f"; tried and not used: {'; '.join(notes)}"
    if not path:
        change = "give both ends a transport in common (--transports)"
        return Finding(SUBJECT, "path", State.BLOCKS, found, why, change)
    if required and path not in required:
        wanted = ", ".join(required)
        found = f"pages go over {path}, not over {wanted} as --require asks; {found}"
        change = "see the notes, run kvxfer doctor on the peer, and check --transports"
        return Finding(SUBJECT, "path", State.BLOCKS, found, why, change)
    state = State.LIMITS if notes else State.GOOD
    return Finding(SUBJECT, "path", state, found, why, "see the causes in the notes" if notes else "")


def _foreign_region(region: kvxfer.RegionDescriptor) -> Finding:
    """Says over which path a region of the peer would be moved."""
    found = f"{region.num_blocks} blocks, {region.nbytes} bytes, path {region.path or 'none'}"
    if region.notes:
        found += f"; {'; '.join(region.notes)}"
    why = "each region has its own path: a pool is mapped, an engine's own memory is read by process_vm_readv"
    return Finding(SUBJECT, f"region {region.name}", State.NOTE, found, why)


def _fits(remote: kvxfer.RegionDescriptor) -> bool:
    return (remote.num_blocks, remote.nbytes) == (pages.NUM_PAGES, pages.TOTAL_NBYTES)


def _measured(
    agent: kvxfer.Agent, peer: kvxfer.Peer, figures: dict[str, Any], measure_s: float
) -> list[Finding]:
    """Reads the doctor's pages repeatedly, and checks every byte of every reading."""
    why = "the rate of kvxfer between the two ends; kvxfer bench pages compares it with the machine's limits"
    try:
        with kvxfer.Pool(1, pages.TOTAL_NBYTES + pages.PING_NBYTES, name="kvxfer-doctor") as pool:
            cache = pool.array((pages.NUM_PAGES, pages.PAGE_NBYTES))
            local = agent.register("pages", cache)
            ping = agent.register("ping", pool.array((1, pages.PING_NBYTES)))
            ping_us = _ping(agent, ping, peer.regions[pages.PING_REGION])
            rate, num_readings, rails, wrong = _read(
                agent, local, peer.regions[pages.REGION], cache, measure_s
            )
            local.deregister_blocking()
            ping.deregister_blocking()
    except (TransferError, TimeoutError) as error:
        change = "run the same version of kvxfer at both ends, and see the cause in the message"
        found = f"pages could not be read: {error}"
        return [Finding(SUBJECT, "speed", State.BLOCKS, found, why, change)]
    nbytes = num_readings * pages.TOTAL_NBYTES
    figures |= {
        "path": rails,
        "ping_us_p50": round(ping_us, 1),
        "gb_per_s": round(rate, 3),
        "nbytes": nbytes,
        "verified": not wrong,
    }
    if wrong:
        found = f"{wrong} of the {pages.NUM_PAGES} pages of one reading over {rails} have wrong bytes"
        change = "do not use this path; repeat with another --transports and report it"
        return [Finding(SUBJECT, "speed", State.BLOCKS, found, why, change)]
    size = f"{pages.PAGE_NBYTES >> 10} KiB"
    moved = f"{num_readings} x {pages.NUM_PAGES} pages of {size}"
    found = f"{rate:.2f} GB/s over {rails}: {moved}, every byte checked"
    round_trip = (
        f"{ping_us:.0f} us (median of {_NUM_PINGS} reads of {pages.PING_NBYTES} bytes, one after the other)"
    )
    why_trip = "a page can move only after a request to the peer and its answer"
    return [
        Finding(SUBJECT, "speed", State.GOOD, found, why),
        Finding(SUBJECT, "round trip", State.GOOD, round_trip, why_trip),
    ]


def _ping(agent: kvxfer.Agent, local: kvxfer.Region, remote: kvxfer.RegionDescriptor) -> float:
    """Returns the median time of reading one small block, in microseconds, once the lease is granted."""
    deadline = time.monotonic() + _LEASE_WAIT_S
    while True:
        try:
            agent.read(local, remote, [0], [0], timeout_s=_TRANSFER_TIMEOUT_S).wait()
            break
        except TransferError as error:
            if error.code != "not-permitted" or time.monotonic() > deadline:
                raise
            time.sleep(_LEASE_RETRY_S)
    times_us = []
    for _ in range(_NUM_PINGS):
        started = time.monotonic_ns()
        agent.read(local, remote, [0], [0], timeout_s=_TRANSFER_TIMEOUT_S).wait()
        times_us.append((time.monotonic_ns() - started) / 1e3)
    return float(np.median(times_us))


def _read(
    agent: kvxfer.Agent, local: kvxfer.Region, remote: kvxfer.RegionDescriptor, cache: Any, measure_s: float
) -> tuple[float, int, str, int]:
    """Returns the median rate in GB/s, how many readings were measured, what carried them, wrong pages."""
    random = np.random.default_rng(_SEED)
    begun = time.monotonic()
    elapsed_ns: list[int] = []
    rails: dict[str, None] = {}
    wrong = 0
    warm = False
    while not elapsed_ns or (
        sum(elapsed_ns) < measure_s * 1e9 and time.monotonic() - begun < measure_s * _MAX_CHECKED
    ):
        # Another order each time, so that pages left by an earlier reading are wrong in this one.
        src_blocks, dst_blocks = (random.permutation(pages.NUM_PAGES).astype(np.uint32) for _ in range(2))
        started = time.monotonic_ns()
        transfer = agent.read(local, remote, src_blocks, dst_blocks, timeout_s=_TRANSFER_TIMEOUT_S)
        transfer.wait()
        if warm:
            elapsed_ns.append(time.monotonic_ns() - started)
        # The first one faults in the peer's mapping and opens TCP's window: checked, not measured.
        warm = True
        rails |= dict.fromkeys(transfer.rails)
        wrong += pages.count_wrong(cache, src_blocks, dst_blocks)
        if wrong:
            break
    # Nothing was measured if the first reading was already wrong.
    rate = pages.TOTAL_NBYTES / float(np.median(elapsed_ns)) if elapsed_ns else 0.0
    return rate, len(elapsed_ns), ", ".join(rails), wrong
