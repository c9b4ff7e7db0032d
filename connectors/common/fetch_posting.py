"""Posts a fetch: reads from prefill's ranks, or expectations of writes that the ranks are asked for."""

from __future__ import annotations

import secrets
from typing import Final

import kvxfer
from kvxfer import plan
from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.fetch import Fetch, Work
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.mail import Mail
from kvxfer.connectors.common.notes import KEY_NBYTES, RegistrationPart, context_of
from kvxfer.connectors.common.paging import GroupTable, counted, pair_pages
from kvxfer.connectors.common.push_registration import Registration, Share, tag_of
from kvxfer.connectors.common.regions import CacheRegions, remote_region, require_alike, require_started
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.step import FetchOrder
from kvxfer.connectors.common.worker_rank import WorkerRank

_MAX_KNOWN_SHARES: Final = 1024

# For each cache group, the region's descriptor at each rank.
_Remotes = list[list[kvxfer.RegionDescriptor]]
# For each cache group, the ranks that serve this worker.
_Routes = list[tuple[plan.Share, ...]]


class FetchPoster:
    """Posts the fetches of one worker.

    Parameters
    ----------
    agent, regions, mail, position
        Of this worker.
    settings
        Its deadlines.
    """

    def __init__(
        self,
        agent: kvxfer.Agent,
        regions: CacheRegions,
        mail: Mail,
        position: WorkerRank,
        settings: Settings,
    ) -> None:
        self._agent = agent
        self._regions = regions
        self._mail = mail
        self._reader = position.rank
        self._num_readers = position.num_ranks
        self._settings = settings
        self._shares: dict[tuple[int, tuple[tuple[bytes, int], ...]], tuple[plan.Share, ...]] = {}

    def post(self, fetch: Fetch) -> None:
        """Posts all of a fetch, whose sessions are open; if it raises, the fetch owns what was posted."""
        peers = [session.result() for session in fetch.sessions]
        if isinstance(fetch.order.source, ExpectedPush):
            for peer in peers:
                require_started(peer)
        # Look up all regions before posting: this raises if a peer has not announced one yet.
        remotes = [[remote_region(peer, region.name) for peer in peers] for region in self._regions.regions]
        # Likewise, so that no page of a request is touched if one of the caches differs.
        routes = [
            self._shares_of(group, region, remotes[group])
            for group, region in enumerate(self._regions.regions)
        ]
        parts: dict[str, list[Work]] = {}
        try:
            if isinstance(fetch.order.source, Handover):
                self._read(fetch, fetch.order.source, peers, remotes, routes, parts)
            elif isinstance(fetch.order.source, ExpectedPush):
                self._expect(fetch, fetch.order.source, peers, remotes, routes, parts)
        finally:
            fetch.took(parts)
        fetch.is_posted = True

    def _read(
        self,
        fetch: Fetch,
        handover: Handover,
        peers: list[kvxfer.Peer],
        remotes: _Remotes,
        routes: _Routes,
        parts: dict[str, list[Work]],
    ) -> None:
        order = fetch.order
        spent_s = fetch.age_s if fetch.is_second else 0.0
        timeout_s = max(self._settings.load_timeout_s - spent_s, 0.001)
        for group, region in enumerate(self._regions.regions):
            own = self._regions.groups[group]
            src = GroupTable(
                handover.tables[own.table],
                handover.block_sizes[own.table],
                handover.pages_per_block[own.table],
            )
            dst = self._table(order, group)
            pairs = pair_pages(src, dst, order.first_token, order.num_tokens)
            if not len(pairs.dst):
                continue
            dst_pages = counted(pairs.dst, region.layout, dst.pages_per_block)
            fetch.num_pages += len(pairs.dst)
            fetch.nbytes += len(pairs.dst) * region.layout.block_nbytes
            for share in routes[group]:
                read = self._agent.read(
                    region,
                    remotes[group][share.src],
                    counted(pairs.src, remotes[group][share.src].layout, src.pages_per_block),
                    dst_pages,
                    layers=share.layers,
                    heads=share.heads,
                    tokens=pairs.tokens,
                    after=fetch.mark.after,
                    timeout_s=timeout_s,
                    lease=own.lease(handover.leases[own.table]),
                    context=context_of(order.request_id, order.trace),
                )
                parts.setdefault(region.name, []).append(read)
                fetch.sources[read] = peers[share.src], remotes[group][share.src]

    def _expect(
        self,
        fetch: Fetch,
        expected: ExpectedPush,
        peers: list[kvxfer.Peer],
        remotes: _Remotes,
        routes: _Routes,
        parts: dict[str, list[Work]],
    ) -> None:
        """Expects prefill's writes, and tells each prefill rank where to write."""
        order = fetch.order
        tables = [self._table(order, group) for group in range(len(self._regions.groups))]
        shares: list[list[Share]] = [[] for _ in peers]
        fetch.tag = secrets.token_bytes(KEY_NBYTES)
        for group, region in enumerate(self._regions.regions):
            page_size = tables[group].page_size
            first_page = order.first_token // page_size
            pages = tables[group].pages[first_page : -(-order.num_tokens // page_size)]
            if not pages.any():
                continue
            if region.layout.null_block < 0:
                pages = pages[pages != 0]
            # Pages of equal size are written whole, others token by token.
            are_unlike = any(
                each.layout.block_tokens != region.layout.block_tokens for each in remotes[group]
            )
            before = first_page * page_size
            tokens = range(order.first_token - before, order.num_tokens - before) if are_unlike else None
            for share in routes[group]:
                layers, heads = (
                    (share.layers.start, share.layers.stop),
                    (share.heads.start, share.heads.stop),
                )
                shares[share.src].append(Share(group=group, layers=layers, heads=heads))
            incoming = self._agent.expect(
                tag_of(fetch.tag, group),
                counted(pages, region.layout, tables[group].pages_per_block),
                region,
                tokens=tokens,
                timeout_s=self._settings.push_timeout_s,
                context=context_of(order.request_id, order.trace),
            )
            parts[region.name] = [incoming]
            num_pages = int((pages != 0).sum())
            fetch.num_pages += num_pages
            fetch.nbytes += num_pages * region.layout.block_nbytes
        for peer, wanted in zip(peers, shares, strict=True):
            registration = Registration(
                tag=fetch.tag.hex(),
                prompt=expected.prompt,
                first_token=order.first_token,
                num_tokens=order.num_tokens,
                tables=tuple(table.blocks for table in tables),
                block_sizes=tuple(table.block_size for table in tables),
                pages_per_block=tuple(table.pages_per_block for table in tables),
                shares=tuple(wanted),
                may_be_shared=expected.may_be_shared,
            )
            content = registration.model_dump_json().encode()
            for part in RegistrationPart.split(expected.key, self._reader, self._num_readers, content):
                self._mail.send(peer, part)

    def _table(self, order: FetchOrder, group: int) -> GroupTable:
        return self._regions.table(group, order.tables[self._regions.groups[group].table])

    def _shares_of(
        self, group: int, region: kvxfer.Region, remotes: list[kvxfer.RegionDescriptor]
    ) -> tuple[plan.Share, ...]:
        """Returns the ranks that serve this worker; ranks with equal heads are spread over the workers."""
        key = group, tuple((remote.incarnation, remote.id) for remote in remotes)
        shares = self._shares.get(key)
        if shares is None:
            for remote in remotes:
                require_alike(region, remote)
            load = [float((at - self._reader) % len(remotes)) for at in range(len(remotes))]
            shares = plan.route([remote.layout for remote in remotes], [region.layout], load)
            if len(self._shares) >= _MAX_KNOWN_SHARES:
                self._shares.clear()  # drops engines that have gone
            self._shares[key] = shares
        return shares
