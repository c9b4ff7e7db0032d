"""The verbs by which an agent posts transfers, expects them, and delays their start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer._native import NativeError
from kvxfer.errors import translate
from kvxfer.gpu.trigger import Trigger, trigger_of
from kvxfer.region import Blocks, Region
from kvxfer.region_descriptor import RegionDescriptor
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
        layers: range | None = None,
        heads: range | None = None,
        tokens: range | None = None,
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

        The peer must permit the write: by a lease, or by calling ``expect`` with the tag `notify`. `write`
        and ``expect`` may come in either order; the first waits for the second until its deadline (`expect`
        explains what happens if the other one has already ended). Do not change the source pages until the
        transfer ends.

        Parameters
        ----------
        region
            The region that the bytes come from.
        remote_region
            The region that they go to: ``peer.regions[name]``.
        src_blocks, dst_blocks
            Block ids of the two regions, in the order of the sequence's tokens. If both ends have pages of
            one size, the two lists have the same length, and ``src_blocks[i]`` goes to ``dst_blocks[i]``.
            Otherwise they cover the same tokens. A source block may be repeated, a destination block may not.
            Nothing is written to the destination's null block.
        layers
            ``range(first, stop)``, numbered model-wide as in `KVLayout`; None for all that both ends hold.
        heads
            ``range(first, stop)``, numbered model-wide; None for all that both ends hold. Use it when several
            ranks hold the same heads and only one of them should move them (`kvxfer.plan.route`).
        tokens
            The tokens of the sequence that move, ``range(first, stop)``. Both tables begin at the sequence's
            token 0. None for all tokens that both tables cover; these are whole blocks if the page sizes are
            equal. No other tokens are written: a partly filled last block keeps the rest of its bytes.
        after
            Delays the first byte only. Posting, finding the lease and the deadline start at once. Not
            together with `hold`. One of:

            - A `Trigger`, or ``trigger.by_layer()`` if layers become final one by one.
            - A stream or an event of torch or cuda.core, on this agent's GPU. The transfer waits for the work
              that is in the stream now, or that was in it when the event was recorded. Neither may belong to
              a graph's capture: record a trigger there.
            - An asyncio or concurrent future; if it fails, the transfer is cancelled.
        notify
            Payload that the peer receives when all bytes are visible there, or the tag of the peer's
            ``expect``; at most 4096 bytes.
        timeout_s
            Deadline by which both ends are final; None takes the options' ``transfer_timeout_s``.
        priority
            0 to 255; 0 goes first. With the option ``verbs.classes`` it also selects the queue pairs.
        integrity
            Whether a crc32c of every piece is checked before the transfer ends; None takes the option.
        lease
            The token of the lease to use (`Lease.token`), which the peer sent; no other lease then permits
            the transfer. None: any lease that permits access to these blocks. If an earlier lease on these
            blocks has ended, only leases that this agent knew of when it posted count; otherwise the transfer
            fails with ``lease-ended``. So pass the token wherever blocks are reused. A lease that was granted
            to a name or to None permits only reads that pass its token.
        context
            Identifies the request, e.g. by its id or a W3C trace parent: at most 256 bytes of UTF-8, as text
            or as bytes. The peer gets it too; handles, notifications, errors and log lines of both ends name
            it. An end that gave a context keeps its own; an end that gave none shows the other's.
        hold
            Whether to post now and move layers only as `Transfer.mark_ready` says, for a prefill that
            is still computing them. Not together with `after`.

        Raises
        ------
        UsageError
            Nothing was posted. The cause is: ids out of range or repeated at the destination; tables of
            different length; layouts that do not fit; both `after` and `hold`; or a region, descriptor, token
            or trigger of another agent. ``unsupported``: a region lies on a GPU, and no rail carries its
            pages, or `integrity` was requested.
        RailError
            ``rail-failed``: the rails that carry the pages are lost. They are dialled again.
        PeerError
            The peer is lost, or there is no open session with the descriptor's owner (``unreachable``).

        docs/errors.md lists every code, and what awaiting the transfer raises.

        Notes
        -----
        Takes one call into native code if whole blocks in all layers go between the same two regions as in
        the previous call. Another pair of regions, or `layers`, `heads` or `tokens`, takes one more; a stream
        or an event takes one more. A descriptor from `RegionDescriptor.from_bytes` takes two more each time,
        to look up its session. With `tokens`, or pages that differ in size, Python also pairs units, which
        takes microseconds for a request. The copy program is compiled and sent to the peer once for each pair
        of regions (and `heads`).

        A transfer that waits for a GPU or another process to store a word takes a few percent of one
        processor (native/DESIGN.md).
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
        layers: range | None = None,
        heads: range | None = None,
        tokens: range | None = None,
        after: StartsAfter | None = None,
        notify: bytes = b"",
        timeout_s: float | None = None,
        priority: int = 0,
        integrity: bool | None = None,
        lease: LeaseToken | None = None,
        context: str | bytes = "",
        hold: bool = False,
    ) -> Transfer:
        """Posts a copy of blocks of a peer's region into blocks of `region`. Returns at once.

        A lease of the peer must permit reading these blocks. You can wait for layers one by one
        (`Transfer.layer`). The peer gets `notify` when all bytes are here, so that it can free its blocks.

        Parameters
        ----------
        region
            The region that the bytes go to.
        remote_region
            The region that they come from: ``peer.regions[name]``.
        src_blocks, dst_blocks
            Block ids of the remote and of the local region, as in `write`.
        layers, heads, tokens
            As in `write`.
        after
            As in `write`. Use it if local work still uses the destination blocks. The request goes to the
            peer at once, so its lease must last until the bytes may land.
        notify
            Payload that the peer receives when all bytes are here; at most 4096 bytes.
        timeout_s
            Deadline by which both ends are final; None takes the options' ``transfer_timeout_s``.
        priority
            0 to 255; 0 goes first.
        integrity
            Whether a crc32c of every piece is checked; None takes the option.
        lease
            The token of the lease to use (`Lease.token`), which the peer sent. Required for a lease that was
            granted to a name or to None; pass it wherever blocks are reused, as `write` explains.
        context
            Identifies the request, as in `write`.
        hold
            Whether to post now and let layers land only as `Transfer.mark_ready` says, as `after` does.

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
            hold=hold,
        )

    def explain(self, region: Region, remote_region: RegionDescriptor) -> str:
        """Describes in some lines what a `read` and a `write` between two regions would do. Posts nothing.

        For people; later versions may word it differently. The text names the runs of bytes that move and
        what happens to their elements. It lists the rails over which they come here, in the order of choice,
        with the reasons: which rails are far from the memory here, and which go through host memory. If a NIC
        moves them, it says whether by READ or WRITE. The `notes` of both regions follow. Costs as much as
        compiling two copy programs.

        Raises
        ------
        UsageError
            As in `write`: a region is gone, or belongs to another agent.
        PeerError
            Its peer is lost.
        """
        from kvxfer.session.explanation import explain

        try:
            return explain(self._core, self._poster.peer_of(region, remote_region), region, remote_region)
        except NativeError as error:
            raise translate(error, peer=remote_region.agent) from None

    def trigger(self, memory: Any = None) -> Trigger:
        """Returns a trigger: a word, now 0, that transfers of this agent can wait for (``after=``).

        Parameters
        ----------
        memory
            4 writable bytes, e.g. ``numpy.frombuffer(shared.buf, numpy.uint32, 1)`` of memory that other
            processes have mapped. The buffer stays exported as long as a transfer waits. Triggers over the
            same bytes are one word, even of several agents. None takes a word of this process, in pinned
            memory if the agent has a GPU.

        Raises
        ------
        UsageError
            ``length-mismatch``: `memory` has another size. ``invalid-argument``: it is not writable.
        """
        self._completions.check()
        return trigger_of(self._completions, memory)

    def command_ring(self, num_commands: int = 1024) -> CommandRing:
        """Returns a ring of commands with which kernels start writes that were prepared in it.

        Parameters
        ----------
        num_commands
            Room for commands, and the most transfers of the ring that are under way at a time: a power of
            two, 2**20 at most. Beyond either limit a kernel finds the ring full.

        Raises
        ------
        UsageError
            `num_commands` is another number.
        AgentError
            ``system``: the memory cannot be allocated.

        Notes
        -----
        The ring takes 16 bytes a command in pinned memory, and a few bytes on the agent's GPU. If the agent
        has no GPU, the ring is in the process's own memory, for its threads.
        """
        from kvxfer.gpu.command_ring import ring_of

        return ring_of(self._core, self._completions, self._poster, num_commands)

    def expect(
        self,
        tag: bytes,
        blocks: Blocks,
        region: Region | None = None,
        *,
        layers: range | None = None,
        tokens: range | None = None,
        peer: Peer | None = None,
        timeout_s: float | None = None,
        context: str | bytes = "",
    ) -> Incoming:
        """Permits writes whose ``notify`` is `tag` into these blocks, and returns a handle on them.

        `expect` may come before or after the peer's write. If one of the two has already ended, the other
        fails at once instead of waiting:

        - The expectation was cancelled or timed out, and the write comes afterwards: the write is refused at
          once with that code, unless a lease permits it. Calling `expect` again with the tag starts anew.
        - A write with the tag waited here and ended before this call (its source cancelled it, its time was
          over, or its peer was lost), and no other write waits: the expectation fails at once with that
          write's error. The next write with the tag, or the next call of `expect`, starts anew.

        The agent remembers such tags within bounds, and forgets the oldest first: 4096 tags and 1 MiB for
        expectations that it gave up, as much for each session, and as much for all ended sessions together.
        Expectations that are done are not remembered: their tags may be used again at once.

        Parameters
        ----------
        tag
            1 to 4096 bytes, e.g. a request's id; unique among the pending expectations.
        blocks
            Block ids of `region`, distinct. Expectations may share blocks; then a later write replaces the
            bytes of an earlier one.
        region
            The region of `blocks`; may be left out if the agent has only one.
        layers
            ``range(first, stop)``, numbered model-wide; None for all of the region.
        tokens
            The tokens of the sequence that must arrive, in all of the region's heads and from any writer,
            before the expectation is done. `blocks` begin at the sequence's token 0. None for all tokens of
            the blocks. This bounds completion alone: the right to write is for the whole blocks.
        peer
            The peer that may write; None for any peer.
        timeout_s
            The expectation fails if something is missing by then; None takes the options'
            ``transfer_timeout_s``.
        context
            As in `write`: identifies the request, at this end.

        Raises
        ------
        UsageError
            Ids are out of range or repeated; the region does not hold the layers or tokens; the tag is empty
            or in use; `region` was left out, but the agent has none or several; or a region or peer belongs
            to another agent. ``unknown-region``: the region was deregistered.
        PeerError
            `peer` is lost.

        docs/errors.md lists every code, and what awaiting the handle raises.
        """
        self._completions.check()
        if region is None:
            region = self._regions.only()
        return self._poster.expectation(tag, blocks, region, layers, tokens, peer, timeout_s, context)
