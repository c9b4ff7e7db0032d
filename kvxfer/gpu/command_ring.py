"""Rings of commands with which kernels start transfers that the host has prepared."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from kvxfer._native import CommandRing as Ring
from kvxfer._native import NativeError
from kvxfer.arguments import bound, check_kind, context_in_words, count
from kvxfer.errors import KvxferError, UsageError, from_code, invalid, translate
from kvxfer.memory.block_table import as_ids
from kvxfer.session.ownership import foreign
from kvxfer.session.posting import named_lease
from kvxfer.session.requests import terms_of

if TYPE_CHECKING:
    from kvxfer._native import AgentCore, Route
    from kvxfer.lease_token import LeaseToken
    from kvxfer.region import Blocks, Region
    from kvxfer.region_descriptor import RegionDescriptor
    from kvxfer.session.completion import Completions
    from kvxfer.session.posting import Poster

# native/include/kvxfer/command.h: kEveryLayer.
_EVERY_LAYER = 2**32 - 1
_MOST = 2**32 - 1
_MOST_COMMANDS = 2**64 - 1
_PREPARE = "pass a result of this ring's prepare_write()"


@dataclass(frozen=True, slots=True)
class CommandFailure:
    """A command whose bytes did not all arrive.

    Attributes
    ----------
    index
        Number of commands that were taken out of the ring before this one.
    prepared, pair, num_pairs
        The prepared write and its pairs, as the kernel wrote them.
    layer
        Numbered model-wide; None for every layer of the prepared write.
    error
        `UsageError` if the command itself was wrong, so that nothing was posted; otherwise the error that
        awaiting the transfer would raise.
    """

    index: int
    prepared: int
    pair: int
    num_pairs: int
    layer: int | None
    error: KvxferError


class PreparedWrite:
    """The block pairs that commands may write; made by `CommandRing.prepare_write`."""

    __slots__ = ("_completions", "_number", "_peer", "_ring", "_route", "_routes", "num_pairs")

    def __init__(
        self,
        completions: Completions,
        ring: Ring,
        number: int,
        num_pairs: int,
        peer: str,
        route: Route,
        routes: set[Route],
    ) -> None:
        self._completions = completions
        self._ring = ring
        self._number = number
        self._peer = peer
        self._route = route
        self._routes = routes
        routes.add(route)
        #: Pairs of blocks; commands number them from 0.
        self.num_pairs = num_pairs

    def __repr__(self) -> str:
        return f"<PreparedWrite {self._number}: {self.num_pairs} pairs to {self._peer}>"

    @property
    def number(self) -> int:
        """The number that a kernel passes to ``kvxfer::start`` as ``prepared``, 0 to 65534."""
        return self._number

    def forget(self) -> None:
        """Gives the prepared write up; transfers that were started go on.

        A later command that names it is refused, until the number is reused (other free numbers go first). So
        call this only when no kernel uses the number any more.

        Raises
        ------
        UsageError
            It was given up before.
        """
        try:
            self._ring.forget(self._number)
        except NativeError as error:
            raise translate(error) from None
        self._routes.discard(self._route)


class CommandRing:
    """A ring of commands from kernels; each command starts a transfer. Made by `Agent.command_ring`.

    A kernel posts with ``kvxfer::start`` (``kvxfer/device.cuh``), which takes `address` and the number of a
    prepared write. One GPU thread makes a few stores to host memory, and no driver call. The agent takes the
    commands out in order and checks each. For each it posts a write of the named blocks. It counts the writes
    that have ended; they may end in any order. A wrong command is refused without effect on other commands.
    Use the ring as a context manager, or call `close`. All methods may be called from any thread.

    Notes
    -----
    While a ring is open the agent polls it, as it polls a `Trigger` that others store to. This takes a few
    percent of one processor; after a pause in commands the agent polls less often (native/DESIGN.md has
    figures). Every command is a transfer of its own and costs both ends as much as `Agent.write`, so avoid
    commands for few bytes; one command takes up to 65534 pairs. The ring's memory is kept until the process
    ends, because a kernel may post at any time. So make a ring once and reuse it.
    """

    __slots__ = ("__weakref__", "_completions", "_poster", "_prepared_for", "_ring", "_routes")

    def __init__(self, ring: Ring, completions: Completions, poster: Poster) -> None:
        self._ring = ring
        self._completions = completions
        self._poster = poster
        # number -> peer and context, for errors
        self._prepared_for: dict[int, tuple[str, str]] = {}
        # Keep the programs of what is prepared, also if the caller has dropped the PreparedWrite.
        self._routes: set[Route] = set()

    def __repr__(self) -> str:
        return f"<CommandRing of {self.num_commands}: {self.num_ended} of {self.num_taken} ended>"

    # ---- what kernels are given -----------------------------------------------------------------

    @property
    def address(self) -> int:
        """The kernel's ``kvxfer::CommandRing*``; in memory of the agent's GPU, if it has one.

        It stays valid until the process ends. A kernel may harmlessly post to a closed ring.
        """
        return self._ring.address

    @property
    def num_commands(self) -> int:
        """Room for commands, and the most transfers that are under way at a time."""
        return self._ring.num_commands

    def prepare_write(
        self,
        region: Region,
        remote_region: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        layers: range | None = None,
        heads: range | None = None,
        notify: bytes = b"",
        timeout_s: float | None = None,
        priority: int = 0,
        integrity: bool | None = None,
        lease: LeaseToken | None = None,
        context: str | bytes = "",
    ) -> PreparedWrite:
        """Prepares a write that commands can start; posts nothing.

        A command names pairs by their index in the two tables, ``src_blocks[i]`` and ``dst_blocks[i]``, and
        one of the layers or all of them. Commands may write pairs in any order, repeatedly, or never.

        Parameters
        ----------
        region, remote_region, layers, heads, priority, integrity, lease, context
            As in `Agent.write`, for every transfer that is started. ``lease`` must permit the write when it
            starts, not now.
        src_blocks, dst_blocks
            Two tables of the same length. Both ends have pages of one size, and no null block.
        notify
            Payload that is delivered with every transfer, or the tag of the peer's ``expect``. The
            expectation is done when all that it expects has arrived, by any number of commands.
        timeout_s
            Deadline of each transfer, counted from when the agent takes its command.

        Raises
        ------
        UsageError
            Block ids out of range, tables of different length, layouts that do not fit, pages that differ in
            size (``unsupported``), or a region, descriptor or token of another agent. `ExhaustedError`: 65535
            writes are prepared already.
        PeerError
            The peer is lost.
        AgentError
            ``closed``: the ring or its agent is closed.
        """
        self._completions.check()
        check_kind(notify, "notify", bytes, "bytes, at most 4096")
        try:
            route, scope = self._poster.route(region, remote_region, layers, heads)
        except NativeError as error:
            raise translate(error, peer=remote_region.agent) from None
        number = None if lease is None else named_lease(lease, remote_region)
        terms = terms_of(priority, integrity, number, False)
        src, dst = as_ids(src_blocks), as_ids(dst_blocks)
        if len(src) != len(dst):
            raise UsageError(
                f"src_blocks names {len(src)} blocks, but dst_blocks names {len(dst)}", code="length-mismatch"
            )
        for ids, end in ((src, region), (dst, remote_region)):
            if len(ids) and int(ids.max()) >= end.num_blocks:
                raise UsageError(
                    f"block {int(ids.max())} is outside region {end.name!r}, which has {end.num_blocks}",
                    code="out-of-range",
                )
        try:
            number = self._ring.prepare(
                route, scope.layers.start, src, dst, notify, timeout_s, context, terms
            )
        except NativeError as error:
            raise translate(error, peer=remote_region.agent, context=context_in_words(context)) from None
        self._prepared_for[number] = remote_region.agent, context_in_words(context)
        return PreparedWrite(
            self._completions, self._ring, number, len(src), remote_region.agent, route, self._routes
        )

    def start(self, prepared: PreparedWrite, pair: int, layer: int | None = None, num_pairs: int = 1) -> bool:
        """Posts a command from this thread as a kernel would; returns False if the ring is full.

        Only for rings of agents without a GPU; kernels post to the others.

        Parameters
        ----------
        prepared, pair, num_pairs
            The prepared write, the first of its pairs, and the number of pairs.
        layer
            Numbered model-wide; None for every layer that was prepared.

        Raises
        ------
        UsageError
            ``unsupported``: the ring is a GPU's. ``invalid-argument``: `prepared` belongs to another ring or
            agent.
        """
        check_kind(prepared, "prepared", PreparedWrite, "a result of prepare_write()")
        if prepared._completions is not self._completions:
            raise foreign(self._completions, prepared, repr(prepared), _PREPARE)
        if prepared._ring is not self._ring:
            raise invalid(f"{prepared!r} belongs to another ring: {_PREPARE}")
        pair = count(pair, "pair", 0, _MOST)
        layer = _EVERY_LAYER if layer is None else count(layer, "layer", 0, _EVERY_LAYER - 1)
        num_pairs = count(num_pairs, "num_pairs", 0, _MOST)
        try:
            return self._ring.start(prepared.number, pair, layer, num_pairs)
        except NativeError as error:
            raise translate(error) from None

    # ---- what became of commands ----------------------------------------------------------------

    @property
    def num_taken(self) -> int:
        """Commands that the agent has taken out of the ring."""
        return self._ring.counts[0]

    @property
    def num_ended(self) -> int:
        """Commands that have ended: their transfers have ended, or they were refused.

        The source pages of such a command may be changed again.
        """
        return self._ring.counts[1]

    @property
    def num_failed(self) -> int:
        """Ended commands whose bytes did not all arrive. `take_failures` returns them with the reasons."""
        return self._ring.counts[2]

    def take_failures(self) -> list[CommandFailure]:
        """Returns the failures since the last call, in order.

        Only the newest 1024 are kept; `num_failed` counts all.
        """
        nobody = "", ""
        return [
            CommandFailure(
                index,
                prepared,
                pair,
                num_pairs,
                None if layer == _EVERY_LAYER else layer,
                from_code(code, message, peer=peer, context=context),
            )
            for index, prepared, pair, num_pairs, layer, code, message in self._ring.take_failures()
            for peer, context in (self._prepared_for.get(prepared, nobody),)
        ]

    async def ended(self, num_commands: int, timeout_s: float | None = None) -> None:
        """Waits until `num_commands` commands in total have ended, done or failed.

        Raises
        ------
        TimeoutError
            Fewer have ended in time.
        AgentError
            The agent closed first.
        """
        num, key = count(num_commands, "num_commands", 0, _MOST_COMMANDS), ("commands", self._ring.id)
        if not await self._completions.until(key, lambda: self.num_ended >= num, timeout_s):
            raise self._fewer(num, timeout_s)

    def ended_blocking(self, num_commands: int, timeout_s: float | None = None) -> None:
        """Blocks until that many commands have ended, and drives progress: the blocking twin of `ended`."""
        num = count(num_commands, "num_commands", 0, _MOST_COMMANDS)
        limit_s = bound(timeout_s)
        self._completions.check()
        try:
            over = self._ring.wait(num, limit_s)
        except NativeError as error:
            raise translate(error) from None
        self._completions.drain()
        if not over:
            raise self._fewer(num, timeout_s)

    def _fewer(self, num_commands: int, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(f"{self!r}: fewer than {num_commands} commands ended within {timeout_s} s")

    # ---- lifetime -------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the agent takes no more commands: `close` was called, or the agent is closed."""
        return self._ring.closed

    def close(self) -> None:
        """Stops taking commands. Idempotent.

        Transfers that were started go on and are counted. Commands that kernels post later have no effect;
        ``kvxfer::start`` reports it once the ring is full.
        """
        self._ring.close()

    def __enter__(self) -> CommandRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ring_of(core: AgentCore, completions: Completions, poster: Poster, num_commands: int) -> CommandRing:
    """Returns a ring with room for `num_commands`, as `Agent.command_ring` says."""
    size = count(num_commands, "num_commands", 0, _MOST, "a power of two of at most 2**20")
    completions.check()
    try:
        return CommandRing(core.command_ring(size), completions, poster)
    except NativeError as error:
        raise translate(error) from None
