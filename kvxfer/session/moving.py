"""What an agent posts: transfers, and what lets them in and starts them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvxfer._native import NativeError
from kvxfer.errors import translate
from kvxfer.gpu.trigger import Trigger, trigger_of
from kvxfer.region import Blocks, Region, RegionDescriptor
from kvxfer.transfer import Incoming, Transfer

if TYPE_CHECKING:
    from kvxfer._native import AgentCore
    from kvxfer.gpu.command_ring import CommandRing
    from kvxfer.gpu.trigger import StartsAfter
    from kvxfer.lease_token import LeaseToken
    from kvxfer.peer import Peer
    from kvxfer.session.completion import Completions
    from kvxfer.session.posting import Poster
    from kvxfer.session.region_table import RegionTable


class Moving:
    """The verbs of `kvxfer.Agent` that move blocks."""

    _core: AgentCore
    _completions: Completions
    _poster: Poster
    _regions: RegionTable

    def write(
        self,
        region: Region,
        remote_region: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        after: StartsAfter | None = None,
        notify: bytes = b"",
        timeout_s: float | None = None,
        priority: int = 0,
        integrity: bool | None = None,
        lease: LeaseToken | None = None,
        context: str | bytes = "",
        hold: bool = False,
    ) -> Transfer:
        """Posts a copy of blocks of `region` into blocks of a peer's region. Returns at once.

        The peer must have let these blocks be written: by a lease, or by ``expect`` of `notify`
        (whichever of the two sides comes first waits for the other until its deadline; `expect` says what of
        the other's is over). The pages must stay as they are until the transfer ends.

        Parameters
        ----------
        region
            Where the bytes come from.
        remote_region
            Where they go: ``peer.regions[name]``.
        src_blocks, dst_blocks
            Block ids of the two regions, in the order of the sequence's tokens. Where both ends have
            pages of one size they are equally many and ``src_blocks[i]`` goes to ``dst_blocks[i]``;
            else they cover the same tokens. A source block may be repeated, a destination block may
            not; a destination's null block takes nothing.
        layers
            Consecutive layers, numbered model-wide as in `KVLayout`; None for all that both ends
            hold. Like `heads` and `tokens` a range, which costs nothing, or the numbers themselves.
        heads
            Consecutive KV heads, numbered model-wide; None for all that both ends hold. For heads
            that several ranks hold, of which one is to move them (`kvxfer.plan.route`).
        tokens
            Which tokens of the sequence move, ``range(first, stop)``; both tables begin at its token
            0. None for all that both tables name, whole blocks where pages are equal. Exactly these
            are written: a last block that is filled in part keeps the rest of its bytes.
        after
            Delays the first byte only: the transfer is posted at once, finds its lease and counts its time.
            Not together with `hold`. One of:

            - A `Trigger`; ``trigger.by_layer()`` where layers become final one by one.
            - A stream or an event of torch or cuda.core, of this agent's GPU: what is enqueued in the stream
              by now, or was when the event was recorded. Neither may be of a graph's capture: record a
              trigger there.
            - An asyncio or concurrent future; the transfer is cancelled when it fails.
        notify
            Delivered to the peer when all bytes are visible there, or the tag of its ``expect``;
            at most 4096 bytes.
        timeout_s
            Both ends are final by then; None takes the options' ``transfer_timeout_s``.
        priority
            0 to 255; 0 goes first. With the option ``verbs.classes`` it says over which queue pairs, too.
        integrity
            Whether a crc32c of every piece is checked before the end; None as in the options.
        lease
            The lease that is meant, by the token that the peer handed over (`Lease.token`); no other then
            allows it. None: any that lets these blocks be reached, but where one ended on them earlier,
            none that this agent had not been told of when it posted: ``lease-ended`` says so. So pass the
            token wherever blocks are used again. A lease that was granted to a name, or to anybody, lets
            in only reads that name it.
        context
            Whose request it is, e.g. a request's id or a W3C trace parent: at most 256 bytes of UTF-8, as
            text or as bytes. It travels to the peer; handles, notifications, errors and log lines of both
            ends name it. Each end that gave one keeps its own; one that gave none has the other's.
        hold
            Post, but let layers go only as `Transfer.release` says: for a prefill that is still
            computing them. Not together with `after`.

        Raises
        ------
        UsageError
            Nothing was posted: ids out of range or repeated at the destination, tables of
            different length, layouts that do not fit; both `after` and `hold`; a region, descriptor, token
            or trigger of another agent. ``unsupported``: a region lies on a GPU and no rail brings its
            pages, or `integrity` was asked for there.
        RailError
            ``rail-failed``: the rails that bring its pages are lost, and dialled again.
        PeerError
            The peer is lost, or no session is open with the agent that a descriptor is of (``unreachable``).

        docs/errors.md has every code, and what awaiting the transfer raises.

        Notes
        -----
        One call into native code where whole blocks in all layers go between the same two regions as in the
        call before. One more for another pair of regions, and for `layers`, `heads` or `tokens`; one more
        for a stream or an event. A descriptor that came by `RegionDescriptor.from_bytes` takes two more each
        time, as its session is looked up. `tokens`, and pages that differ in size, also pair units in
        Python, microseconds for a request. The copy program is compiled, and told to the peer, once for each
        pair of regions (and `heads`).

        A transfer that waits for what a GPU or another process stores takes a few percent of one processor
        (native/DESIGN.md).
        """
        return self._poster.transfer(
            region,
            remote_region,
            src_blocks,
            dst_blocks,
            layers,
            heads,
            tokens,
            notify,
            timeout_s,
            priority,
            integrity,
            lease,
            context,
            write=True,
            after=after,
            hold=hold,
        )

    def read(
        self,
        region: Region,
        remote_region: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        after: StartsAfter | None = None,
        notify: bytes = b"",
        timeout_s: float | None = None,
        priority: int = 0,
        integrity: bool | None = None,
        lease: LeaseToken | None = None,
        context: str | bytes = "",
    ) -> Transfer:
        """Posts a copy of blocks of a peer's region into blocks of `region`. Returns at once.

        A lease of the peer must let these blocks be read. Layers may be waited for one by one
        (`Transfer.layer`); `notify` reaches the peer when all bytes are here, so that it can free
        its blocks.

        Parameters
        ----------
        region
            Where the bytes go.
        remote_region
            Where they come from: ``peer.regions[name]``.
        src_blocks, dst_blocks
            Block ids of the remote and of the local region, as in `write`.
        layers, heads, tokens, after, notify, timeout_s, priority, integrity, lease, context
            As in `write`. `after` is for blocks that something here still uses: the peer is asked at once,
            and its lease has to last until the bytes may land.

        Raises
        ------
        UsageError, RailError, PeerError
            As in `write`; docs/errors.md has every code.
        """
        return self._poster.transfer(
            region,
            remote_region,
            src_blocks,
            dst_blocks,
            layers,
            heads,
            tokens,
            notify,
            timeout_s,
            priority,
            integrity,
            lease,
            context,
            write=False,
            after=after,
            hold=False,
        )

    def explain(self, region: Region, remote_region: RegionDescriptor) -> str:
        """Returns in some lines what a `read` and a `write` between the two regions would do. Posts nothing.

        For people; later versions may say it otherwise. It says which runs of bytes move and what happens to
        their elements, over which rails they come here in the order in which those are chosen, and why: which
        are far from the memory here, and pass memory of the host. Where a NIC moves them it says by READ or
        WRITE, with the rates of both where that is measured. Then what stands in the `notes` of both regions.
        Costs what compiling two copy programs does.

        Raises
        ------
        UsageError
            As `write`: a region is gone, or is another agent's.
        PeerError
            Its peer is lost.
        """
        from kvxfer.session.explanation import explain

        try:
            return explain(self._core, self._poster.peer_of(region, remote_region), region, remote_region)
        except NativeError as error:
            raise translate(error, peer=remote_region.agent) from None

    def trigger(self, memory: Any = None) -> Trigger:
        """Returns a word at 0 that transfers of this agent can wait for (``after=``).

        Parameters
        ----------
        memory
            4 writable bytes, e.g. ``numpy.frombuffer(shared.buf, numpy.uint32, 1)`` of memory that other
            processes have mapped; they stay exported for as long as a transfer waits. Triggers over the same
            bytes are one word, also of several agents. None takes a word of this process, in pinned memory
            where the agent has a GPU.

        Raises
        ------
        UsageError
            ``length-mismatch``: `memory` has another size; ``invalid-argument``: it cannot be written to.
        """
        self._completions.check()
        return trigger_of(self._completions, memory)

    def command_ring(self, num_commands: int = 1024) -> CommandRing:
        """Returns a ring of commands, by which kernels start writes that were prepared in it.

        Parameters
        ----------
        num_commands
            How many it has room for: a power of two, 2**20 at most. As many transfers of the ring's are under
            way at a time; beyond both a kernel is told that the ring is full.

        Raises
        ------
        UsageError
            Another size.
        AgentError
            ``system``: there is no such memory.

        Notes
        -----
        In pinned memory and a few bytes of the agent's GPU, 16 bytes a command; in the process's own memory,
        for its threads, where the agent has none.
        """
        from kvxfer.gpu.command_ring import ring_of

        return ring_of(self._core, self._completions, self._poster, num_commands)

    def expect(
        self,
        tag: bytes,
        blocks: Blocks,
        region: Region | None = None,
        *,
        layers: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        peer: Peer | None = None,
        timeout_s: float | None = None,
        context: str | bytes = "",
    ) -> Incoming:
        """Lets transfers that carry `tag` as ``notify`` write these blocks, and follows them.

        May come before or after the peer's write. What is over is told, and not waited for:

        - A write whose tag was expected until that was cancelled, or ended by its time, is refused at once
          with that code, where no lease lets it write. To expect the tag again begins anew.
        - Where a write of the tag waited here and ended before this call (its source cancelled it, its time
          was over, its peer was lost) and no other waits, this fails at once with what happened to that. The
          next write of the tag begins anew, and so does the next call of this.

        Tags are remembered for that in bounds, the oldest forgotten first: 4096 tags and 1 MiB of those that
        this agent gave up, as much of each session, and as much of all sessions together that have ended. An
        expectation that was done is not remembered: its tag may be used again at once.

        Parameters
        ----------
        tag
            1 to 4096 bytes, e.g. a request's id; unique among what is expected now.
        blocks
            Block ids of `region`, distinct.
        region
            May be left out when the agent has one.
        layers
            Consecutive layers, numbered model-wide; None for all of the region.
        tokens
            Which tokens of the sequence have to arrive, of all the region's heads and whoever brings
            them, until it is complete; `blocks` begin at its token 0. None for all of the blocks.
        peer
            Who may write; None for any peer.
        timeout_s
            It fails when not everything has arrived by then; None takes the options'
            ``transfer_timeout_s``.
        context
            As in `write`: whose request it is, at this end.

        Raises
        ------
        UsageError
            Ids out of range or repeated, layers or tokens that the region does not hold, no tag or one in
            use, no `region` and the agent has none or several; a region or peer of another agent.
            ``unknown-region``: it was deregistered.
        PeerError
            `peer` is lost.

        docs/errors.md has every code, and what awaiting it raises.
        """
        self._completions.check()
        if region is None:
            region = self._regions.only()
        return self._poster.expectation(tag, blocks, region, layers, tokens, peer, timeout_s, context)
