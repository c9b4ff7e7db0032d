"""Figures of the daemon and its node for Prometheus. A scrape uses what is known, and asks no agent.

docs/daemon.md lists the names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import kvxfer
from kvxfer.control.daemon.standing_reasons import KINDS
from kvxfer.control.state.transfer_counts import BOUNDS_S, Example
from kvxfer.control.state.transfer_table import sampled_trace
from kvxfer.log import logger

if TYPE_CHECKING:
    from kvxfer.control.agents.attached import Attached
    from kvxfer.control.app.event_routes import EventStreams
    from kvxfer.control.daemon.node import NodeDaemon
    from kvxfer.control.schema import Pool


_ID: Final = re.compile(r"[0-9a-z.-]{1,64}")


class Metrics:
    """Makes the text. prometheus-client is loaded by the first scrape."""

    def __init__(self, daemon: NodeDaemon, streams: EventStreams) -> None:
        self._daemon = daemon
        self._streams = streams

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Returns all figures in a format that the client accepts, and the format's content type.

        OpenMetrics has exemplars; Prometheus' text, the default, has none. If a group of figures fails, it is
        left out and logged; the other groups are not affected.
        """
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def collect(self) -> Iterator[Any]:
        """Yields families of metrics; prometheus-client calls it."""
        groups = (
            *(self._node, self._certificates, self._agents),
            *(self._transfers, self._stages, self._leases, self._pages),
        )
        for group in groups:
            try:
                yield from list(group())
            except Exception:
                logger().exception("metrics of %s are left out", group.__name__)

    # ---- groups ------------------------------------------------------------------------------------

    def _node(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        daemon = self._daemon
        info = {"version": kvxfer.__version__, "node": daemon.options.node}
        yield InfoMetricFamily("kvxfer_daemon", "Which daemon this is.", value=info)
        yield GaugeMetricFamily(
            "kvxfer_daemon_start_time_seconds", "Start time, in seconds since 1970.", daemon.started_at_s
        )
        yield GaugeMetricFamily(
            "kvxfer_daemon_ready", "1 if /readyz answers 200.", float(daemon.readiness().ready)
        )
        reasons = daemon.standing.look()
        not_ready = GaugeMetricFamily(
            "kvxfer_daemon_not_ready", "1 while this is a reason of /readyz.", labels=["reason"]
        )
        for kind in KINDS:
            not_ready.add_metric([kind], float(kind in reasons))
        yield not_ready
        yield GaugeMetricFamily(
            "kvxfer_daemon_draining", "1 while new work is refused.", float(daemon.drains.draining)
        )
        yield GaugeMetricFamily("kvxfer_daemon_watchers", "Open event streams.", self._streams.num_open)
        first = daemon.events.oldest
        yield GaugeMetricFamily(
            "kvxfer_daemon_events_last_index", "Index of the newest event.", daemon.events.last
        )
        yield GaugeMetricFamily(
            "kvxfer_daemon_events_oldest_index", "Index of the oldest event that is kept.", first
        )
        yield CounterMetricFamily(
            "kvxfer_daemon_records_dropped",
            "Records of transfers that were lost before the daemon read them.",
            daemon.intake.records_dropped,
        )

    def _certificates(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        expires = GaugeMetricFamily(
            "kvxfer_certificate_expires_seconds",
            "When a certificate of the daemon expires, in seconds since 1970.",
            labels=["use"],
        )
        for use, at_s in sorted(self._daemon.certificates.expires_at_s.items()):
            expires.add_metric([use], at_s)
        yield expires

    def _agents(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        agents = self._daemon.agents.all()
        named = _by_name(agents)
        yield GaugeMetricFamily("kvxfer_agents", "Attached agents.", len(agents))
        yield GaugeMetricFamily(
            "kvxfer_agents_draining",
            "Attached agents that are draining.",
            sum(agent.draining for agent in agents),
        )
        labels = ["agent"]
        regions = GaugeMetricFamily("kvxfer_agent_regions", "Regions of an agent.", labels=labels)
        nbytes = GaugeMetricFamily("kvxfer_agent_region_bytes", "Bytes of an agent's regions.", labels=labels)
        peers = GaugeMetricFamily("kvxfer_agent_peers", "Open sessions of an agent.", labels=labels)
        rails = GaugeMetricFamily(
            "kvxfer_agent_rails", "Rails of an agent that are up.", labels=["agent", "transport"]
        )
        for name, those in named.items():
            regions.add_metric([name], sum(len(agent.regions) for agent in those))
            sizes = (region["nbytes"] for agent in those for region in agent.regions)
            nbytes.add_metric([name], sum(sizes))
            peers.add_metric([name], sum(len(agent.peers) for agent in those))
            counts = Counter(
                rail for agent in those for peer in agent.peers for rail in peer.get("rails", ())
            )
            for rail, count in counts.items():
                rails.add_metric([name, rail], count)
        yield from (regions, nbytes, peers, rails)

    def _transfers(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = self._daemon.counts
        ended = CounterMetricFamily(
            "kvxfer_transfers_ended",
            "Transfer ends and expectations that have ended; code says why (docs/errors.md).",
            labels=["role", "outcome", "code"],
        )
        for key, count in sorted(counts.ended.items()):
            ended.add_metric(list(key), count)
        yield ended
        nbytes = CounterMetricFamily(
            "kvxfer_transfer_bytes",
            "Bytes of pages that successful transfer ends have moved.",
            labels=["role"],
        )
        for role, count in sorted(counts.nbytes.items()):
            nbytes.add_metric([role], count)
        yield nbytes
        yield CounterMetricFamily(
            "kvxfer_transfers_lease_ended",
            "Transfers that failed because a lease had ended: readers were late, and no rail is at fault.",
            sum(count for (_, _, code), count in counts.ended.items() if code == "lease-ended"),
        )
        yield GaugeMetricFamily(
            "kvxfer_transfers_running",
            "Running transfers that this daemon created.",
            self._daemon.moves.count_running(),
        )

    def _stages(self) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(
            "kvxfer_transfer_stage_seconds",
            "Duration of a transfer's stages: right, first_piece, moving, total.",
            labels=["role", "verb", "stage"],
        )
        names = [*(str(float(bound)) for bound in BOUNDS_S), "+Inf"]
        for (role, verb, stage), histogram in sorted(self._daemon.counts.stages.items()):
            examples = map(_exemplar, histogram.examples)
            buckets = list(zip(names, accumulate(histogram.counts), examples, strict=True))
            family.add_metric([role, verb, stage], buckets, histogram.sum_ns / 1e9)
        yield family

    def _leases(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        ended = CounterMetricFamily(
            "kvxfer_leases_ended", "Leases of agents that have ended, by how they ended.", labels=["how"]
        )
        for how, count in self._daemon.intake.lease_counts.ended.items():
            ended.add_metric([how], count)
        yield ended
        requests = GaugeMetricFamily(
            "kvxfer_exports_outstanding",
            "Open leases to read: requests whose pages wait for their reader.",
            labels=["agent"],
        )
        nbytes = GaugeMetricFamily(
            "kvxfer_exports_outstanding_bytes",
            "Bytes of the pages under open leases to read.",
            labels=["agent"],
        )
        for name, those in _by_name(self._daemon.agents.all()).items():
            open_ = [_exports(agent) for agent in those]
            requests.add_metric([name], sum(count for count, _ in open_))
            nbytes.add_metric([name], sum(held for _, held in open_))
        yield from (requests, nbytes)

    def _pages(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._daemon.pages is None:
            return
        pool, *files = self._daemon.pages.pools(None)
        yield GaugeMetricFamily("kvxfer_pool_bytes", "Bytes of the host pool.", pool.nbytes)
        yield GaugeMetricFamily(
            "kvxfer_pool_used_bytes", "Bytes of the host pool that hold pages.", pool.used_nbytes
        )
        yield GaugeMetricFamily("kvxfer_pool_pinned_bytes", "Bytes of pinned pages.", pool.pinned_nbytes)
        yield GaugeMetricFamily("kvxfer_pool_pages", "Pages in the host pool.", pool.pages)
        yield GaugeMetricFamily("kvxfer_pool_leases", "Open leases of pages.", pool.leases)
        yield CounterMetricFamily("kvxfer_pool_parked", "Pages that were parked.", pool.parked_total)
        yield CounterMetricFamily(
            "kvxfer_pool_hits", "Requested pages that were in the pool.", pool.hits_total
        )
        yield CounterMetricFamily(
            "kvxfer_pool_misses", "Requested pages that were not in the pool.", pool.misses_total
        )
        yield CounterMetricFamily("kvxfer_pool_evicted", "Pages that were evicted.", pool.evicted_total)
        yield CounterMetricFamily("kvxfer_pool_dropped", "Pages that were dropped.", pool.dropped_total)
        for tier in files:
            yield from _page_files(tier)


def _page_files(tier: Pool) -> Iterator[Any]:
    """Figures of pages in files."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, help_: str, value: float) -> Any:
        return GaugeMetricFamily(f"kvxfer_page_files_{name}", help_, value)

    def counter(name: str, help_: str, value: float) -> Any:
        return CounterMetricFamily(f"kvxfer_page_files_{name}", help_, value)

    yield gauge("up", "Whether pages are read from files and written to them.", tier.state == "up")
    yield gauge("bytes", "Bytes that pages in files may take.", tier.nbytes)
    yield gauge("used_bytes", "Bytes of pages in files.", tier.used_nbytes)
    yield gauge("pages", "Pages in files.", tier.pages)
    yield gauge("queue", "Reads and writes of pages that wait for the disk.", tier.parking)
    yield counter("written", "Pages that were written to files.", tier.parked_total)
    yield counter("hits", "Pages that were not in memory, and were in files.", tier.hits_total)
    yield counter("misses", "Pages that were in neither.", tier.misses_total)
    yield counter("evicted", "Pages that were evicted from files.", tier.evicted_total)
    yield counter("dropped", "Pages that were dropped from files.", tier.dropped_total)
    seconds = GaugeMetricFamily(
        "kvxfer_page_files_read_seconds",
        "Time of the last thousand reads of a page, with its wait.",
        labels=["quantile"],
    )
    seconds.add_metric(["0.5"], tier.read_p50_s)
    seconds.add_metric(["0.99"], tier.read_p99_s)
    yield seconds
    faults = CounterMetricFamily(
        "kvxfer_page_files_faults",
        "Reads and writes of pages that failed or were refused.",
        labels=["reason"],
    )
    for reason, count in tier.faults_total.items():
        faults.add_metric([reason], count)
    yield faults


def _by_name(agents: Iterable[Attached]) -> dict[str, list[Attached]]:
    """Returns the agents of each name: replicas may share one, and a scrape has each series once."""
    named: dict[str, list[Attached]] = {}
    for agent in agents:
        named.setdefault(agent.name, []).append(agent)
    return named


def _exports(agent: Attached) -> tuple[int, int]:
    """Returns how many leases to read an agent has open, and the bytes under them."""
    regions = {region["id"]: region for region in agent.regions}
    count = held = 0
    for lease in agent.leases:
        if lease["mode"] != "read":
            continue
        count += 1
        region = regions.get(lease["region"])
        if region is not None and region["num_blocks"]:
            blocks = lease.get("num_blocks")
            share = 1.0 if blocks is None else blocks / region["num_blocks"]
            held += int(region["nbytes"] * share)
    return count, held


def _exemplar(example: Example | None) -> Any:
    """Returns a bucket's exemplar: a transfer's id, and its trace's id if the trace is sampled."""
    from prometheus_client.samples import Exemplar

    if example is None:
        return None
    # What a client of Prometheus' cannot read would cost the whole scrape.
    labels = {"transfer": example.transfer} if _ID.fullmatch(example.transfer) else {}
    if found := sampled_trace(example.context):
        labels["trace_id"] = found[0]
    return Exemplar(labels, example.duration_ns / 1e9, example.at_s) if labels else None
