"""Decode's side of one request at one rank: expects the named pages until all of them have arrived."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import kvxfer
from kvxfer.connectors.common.ending import quiesce
from kvxfer.connectors.sglang.aux_rows import AUX
from kvxfer.connectors.sglang.control_messages import TAG_NBYTES, Ids, tag_of
from kvxfer.handle import Stages


@dataclass(frozen=True, slots=True)
class Expected:
    """The blocks of one region that are expected, and the peers that write them."""

    region: kvxfer.Region
    blocks: Ids
    sources: tuple[kvxfer.Peer, ...]


class Arrival:
    """The expected writes of one request, under a tag that is drawn for it.

    Parameters
    ----------
    agent
        Of this rank.
    timeout_s
        The deadline of the request's writes.
    context
        The request's name in errors and logs.
    sources
        Sessions with all prefill ranks that write any of it.
    """

    def __init__(
        self, agent: kvxfer.Agent, timeout_s: float, context: str, sources: Sequence[kvxfer.Peer]
    ) -> None:
        self.tag = secrets.token_bytes(TAG_NBYTES)
        self.began_ns = time.monotonic_ns()
        self.num_pages = 0
        self.nbytes = 0
        self.num_sources = len(sources)
        self._agent = agent
        self._timeout_s = timeout_s
        self._context = context
        self._sources = tuple(sources)
        self._works: list[kvxfer.Incoming] = []
        self._pending: list[kvxfer.Incoming] = []
        # An expectation with several sources does not report the loss of one of them, so check the sessions.
        self._watched: set[kvxfer.Peer] = set()
        self._error: kvxfer.KvxferError | None = None

    def expect(self, expected: Iterable[Expected]) -> None:
        """Lets the sources write. If this raises, `cancel` ends the expectations that were made before.

        Raises
        ------
        kvxfer.KvxferError
            Ids out of range, or a source whose session is lost.
        """
        for each in expected:
            region = each.region
            work = self._agent.expect(
                tag_of(self.tag, region.name),
                each.blocks,
                region,
                peer=each.sources[0] if len(each.sources) == 1 else None,
                timeout_s=self._timeout_s,
                context=self._context,
            )
            self._works.append(work)
            self._pending.append(work)
            if len(each.sources) > 1:
                self._watched.update(each.sources)
            self.num_pages += 0 if region.name == AUX else len(each.blocks)
            self.nbytes += len(each.blocks) * region.layout.block_nbytes

    @property
    def is_done(self) -> bool:
        """Whether all bytes have arrived."""
        self._look()
        return not self._pending and self._error is None

    @property
    def is_quiet(self) -> bool:
        """Whether no byte of the request can land any more."""
        self._look()
        return not self._pending

    @property
    def error(self) -> kvxfer.KvxferError | None:
        """Why the request failed; None while it has not."""
        self._look()
        return self._error

    @property
    def stages(self) -> Stages:
        """The times of its posting, its first byte and its last byte."""
        return kvxfer.Group(self._works).stages

    @property
    def rails(self) -> tuple[str, ...]:
        """The transports that moved its bytes."""
        return kvxfer.Group(self._works).rails

    def cancel(self) -> None:
        """Asks for its end; once it `is_quiet`, its blocks may be reused."""
        for work in self._pending:
            work.cancel()

    def quiesce(self, patience_s: float) -> None:
        """Ends it; returns when no byte of it can land any more."""
        self.cancel()
        if self._pending:
            quiesce(kvxfer.Group(self._pending), self._sources, patience_s)
            self._look()

    def _look(self) -> None:
        pending = []
        error: kvxfer.KvxferError | None = None
        for work in self._pending:
            if work.state is kvxfer.TransferState.PENDING:
                pending.append(work)
            else:
                error = error or work.error
        self._pending = pending
        if pending and error is None and self._error is None:
            error = next((lost for peer in self._watched if (lost := peer.error) is not None), None)
        if error is not None and self._error is None:
            self._error = error
            self.cancel()
