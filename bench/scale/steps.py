"""The steps of ``kvxfer bench scale``: one count of one series each, in fresh processes.

A hub is one agent in a process of its own, the crowd are agents around it, many in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import kvxfer
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.run.process import Worker, call_all
from kvxfer.bench.run.stats import KIB, MIB, median

#: Parked transfers of each idle peer: written, and not let in.
PARKED_EACH: Final = 100
#: Peers of an agent whose expectations end.
EXPECTING_PEERS: Final = 100
#: Of the pages of one large write.
FINE_PAGE_NBYTES: Final = 4 * KIB
_PAGE_NBYTES: Final = 32 * KIB
# Where it is not bytes that are to be moved.
_SMALL_PAGES: Final = 64
# Of a region whose size alone counts.
_TINY_PAGE_NBYTES: Final = 64
# Agents of one process: some twenty descriptors each.
_CROWD: Final = 250
# Of the hub's writes each peer has so many, a quarter of what it takes; or one has all.
_SERVED_EACH: Final = 1000
_ROUNDS: Final = 15
_ROUND_TRANSFERS: Final = 200
_TIMEOUT_S: Final = 300.0

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all steps have in common; ``total_mib`` is what prefills write together."""

    transport: str
    total_mib: int
    seed: int

    def fields(self, num_pages: int = _SMALL_PAGES, page_nbytes: int = _PAGE_NBYTES) -> Figures:
        return {
            "transport": self.transport,
            "num_pages": num_pages,
            "page_nbytes": page_nbytes,
            "seed": self.seed,
        }


@contextmanager
def _workers(*named: tuple[str, Figures]) -> Iterator[list[Worker]]:
    """Yields the worker processes of ``steps``, ready: classes of ``scale.worker`` and their fields."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(f"scale.worker:{name}", fields)) for name, fields in named]
        call_all(workers, "ready")
        yield workers


def _crowds(fields: Figures, count: int) -> list[tuple[str, Figures]]:
    return [("Crowd", fields)] * -(-count // _CROWD)


def _join(hub: Worker, crowds: list[Worker], count: int, first: int = 0, grants: bool = True) -> float:
    """Connects so many agents, numbered from ``first`` on; returns how long one took, in milliseconds."""
    address = hub.call("address")["address"]
    took_ms = 0.0
    for at, crowd in enumerate(crowds):
        share = min(count - at * _CROWD, _CROWD)
        joining: Figures = {"address": address, "first": first + at * _CROWD, "count": share}
        took_ms += crowd.call("join", timeout_s=_TIMEOUT_S, **joining)["connect_ms"] * share
    hub.call("admit", timeout_s=_TIMEOUT_S, first=first, count=count, grants=grants)
    return took_ms / count


def _await_open(workers: list[Worker], least: int) -> int:
    """Waits until so many transfers are open in all of them together, or no more come; returns how many."""
    seen, seen_at = -1, time.monotonic()
    while seen < least and time.monotonic() - seen_at < 1.0:
        now = sum(reply["open"] for reply in call_all(workers, "num_open"))
        if now > seen:
            seen, seen_at = now, time.monotonic()
        time.sleep(0.02)
    return seen


def _transfers(setting: Setting, count: int) -> Figures:
    with _workers(("Hub", setting.fields()), ("Crowd", setting.fields())) as (hub, crowd):
        _join(hub, [crowd], 1)
        return crowd.call("write_pages", timeout_s=_TIMEOUT_S, count=count)


def _served(setting: Setting, count: int, each: int = _SERVED_EACH) -> Figures:
    num_peers = -(-count // each)
    fields = {**setting.fields(), "most_transfers": max(each, _SERVED_EACH)}
    with _workers(("Hub", fields), *[("Crowd", fields)] * -(-num_peers // _CROWD)) as (hub, *crowds):
        _join(hub, crowds, num_peers)
        hub.call("offer", timeout_s=_TIMEOUT_S, count=count)
        num_open = _await_open(crowds, count)
        start_ns = time.perf_counter_ns()
        call_all(crowds, "let_in")
        num_done = hub.call("end_offers", timeout_s=_TIMEOUT_S)["done"]
        each_us = (time.perf_counter_ns() - start_ns) / 1e3 / count
        return {"open": num_open, "done": num_done, "each_us": each_us}


def _served_to_one(setting: Setting, count: int) -> Figures:
    return _served(setting, count, each=count)


def _regions(setting: Setting, count: int) -> Figures:
    with _workers(("Hub", setting.fields()), ("Crowd", setting.fields())) as (hub, crowd):
        found = hub.call("register", timeout_s=_TIMEOUT_S, count=count)
        found["connect_ms"] = _join(hub, [crowd], 1)
        found["transfer_us"] = crowd.call("write_pages", count=50, at_once=False)["each_us"]
        return found


def _peers(setting: Setting, count: int) -> Figures:
    # The default, on which the idle agents' heartbeats depend.
    fields = {**setting.fields(), "silent_timeout_s": kvxfer.AgentOptions().silent_timeout_s}
    with _workers(("Hub", fields), *_crowds(fields, count)) as (hub, *crowds):
        before = hub.call("memory")
        connect_ms = _join(hub, crowds, count)
        wrote = crowds[-1].call("write_pages", count=50, at_once=False)
        after = hub.call("memory")
        return {
            "connect_ms": connect_ms,
            "transfer_us": wrote["each_us"],
            **hub.call("idle", timeout_s=_TIMEOUT_S),
            **{name: (after[name] - before[name]) / count for name in ("private_kib", "rss_kib")},
        }


def _standing(setting: Setting, count: int) -> Figures:
    named = [("Hub", setting.fields()), ("Hub", setting.fields()), ("Crowd", setting.fields())]
    with _workers(*named, *_crowds(setting.fields(), count)) as (alone, hub, writers, *crowds):
        _join(alone, [writers], 1)
        _join(hub, [writers], 1)
        _join(hub, crowds, count, first=1, grants=False)
        for crowd in crowds:
            crowd.call("park", timeout_s=_TIMEOUT_S, each=PARKED_EACH)
        if (parked := _await_open([hub], count * PARKED_EACH)) < count * PARKED_EACH:
            raise BenchError(f"{count} idle peers: {parked} transfers are parked, not {count * PARKED_EACH}")
        found: dict[str, list[tuple[float, float]]] = {"transfer_us": [], "cpu_us": []}
        for _ in range(_ROUNDS):
            pair = [_round(one, writers, agent) for agent, one in enumerate((alone, hub))]
            for name, figures in found.items():
                figures.append((pair[1][name], pair[1][name] / pair[0][name]))
        if _await_open([hub], count * PARKED_EACH) < count * PARKED_EACH:
            raise BenchError("parked transfers ended during the measurement")
        result: Figures = {}
        for name, ratio in (("transfer_us", "ratio"), ("cpu_us", "cpu_ratio")):
            result[name] = median(value for value, _ in found[name])
            result[ratio] = median(of for _, of in found[name])
        return result


def _round(hub: Worker, writers: Worker, agent: int) -> dict[str, float]:
    """Writes some pages one after the other; the time and the hub's processor time that one took."""
    before_ns = hub.call("cpu")["cpu_ns"]
    wrote = writers.call("write_pages", count=_ROUND_TRANSFERS, at_once=False, agent=agent)
    cpu_ns = hub.call("cpu")["cpu_ns"] - before_ns
    return {"transfer_us": wrote["each_us"], "cpu_us": cpu_ns / 1e3 / _ROUND_TRANSFERS}


def _blocks(setting: Setting, count: int) -> Figures:
    fields = setting.fields(count, _TINY_PAGE_NBYTES)
    with _workers(("Hub", fields), ("Crowd", setting.fields())) as (hub, crowd):
        _join(hub, [crowd], 1, grants=False)
        end_us = hub.call("expect_and_cancel")["end_us"]
        _join(hub, [crowd], EXPECTING_PEERS - 1, first=1, grants=False)
        return {"end_us": end_us, "end_us_peers": hub.call("expect_and_cancel")["end_us"]}


def _pages(setting: Setting, count: int) -> Figures:
    fields = {**setting.fields(count, FINE_PAGE_NBYTES), "meter_gate": True}
    with _workers(("Hub", fields), ("Crowd", fields)) as workers:
        hub, crowd = workers
        _join(hub, [crowd], 1)
        rate = crowd.call("write_all", timeout_s=_TIMEOUT_S)["gb_per_s"]
        held = call_all(workers, "held")
        return {
            "gb_per_s": rate,
            "hold_ms": max(each["hold_ms"] for each in held),
            "long_holds": sum(each["long_holds"] for each in held),
        }


def _prefills(setting: Setting, count: int) -> Figures:
    nbytes = setting.total_mib * MIB
    fields = setting.fields(nbytes // _PAGE_NBYTES)
    with _workers(("Hub", fields), ("Crowd", fields)) as (hub, crowd):
        _join(hub, [crowd], count)
        rates = crowd.call("flood", nbytes=nbytes)["gb_per_s_each"]
        if wrong := hub.call("check", count=count, nbytes=nbytes)["wrong"]:
            raise CheckFailedError(f"{count} prefills: {wrong}")
        squares = sum(rate * rate for rate in rates)
        return {
            "gb_per_s": min(rates) * len(rates),  # until the last one's end: each moved as much
            "fairness": sum(rates) ** 2 / (len(rates) * squares),
            "slowest_share": min(rates) * len(rates) / sum(rates),
        }


#: series -> how one of its counts is measured.
STEPS: Final[dict[str, Callable[[Setting, int], Figures]]] = {
    "transfers": _transfers,
    "served": _served,
    "served_to_one": _served_to_one,
    "regions": _regions,
    "peers": _peers,
    "standing": _standing,
    "blocks": _blocks,
    "pages": _pages,
    "prefills": _prefills,
}
