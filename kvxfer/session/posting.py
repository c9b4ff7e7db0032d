"""Posting: turns a caller's arguments into the one native call of a transfer or an expectation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer._native import CODES, AgentCore, NativeError
from kvxfer.arguments import check_kind, context_in_words, flag, seconds
from kvxfer.errors import KvxferError, UsageError, invalid, translate
from kvxfer.gpu.trigger import resolve
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.lease_token import LeaseToken
from kvxfer.memory.block_table import as_ids
from kvxfer.options import AgentOptions
from kvxfer.peer import OWN_PEER, Peer
from kvxfer.region import Blocks, Region
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.session.completion import Completions
from kvxfer.session.ownership import distinguished, foreign
from kvxfer.session.peer_table import PeerTable
from kvxfer.session.program_cache import InstalledProgram, ProgramCache
from kvxfer.session.requests import FIRST, USUAL, WHOLE, Expected, Part, terms_of
from kvxfer.transfer import Incoming, Scope, Transfer

if TYPE_CHECKING:
    import concurrent.futures

    from kvxfer._native import After, Route
    from kvxfer.gpu.trigger import StartsAfter

_OWN_REGION: Final = "pass a region that this agent's register() returned"


class Poster:
    """Posts the transfers and expectations of one agent."""

    def __init__(
        self,
        core: AgentCore,
        completions: Completions,
        peers: PeerTable,
        programs: ProgramCache,
        options: AgentOptions,
    ) -> None:
        self._core = core
        self._completions = completions
        self._peers = peers
        self._programs = programs
        self._options = options
        # The last route of whole blocks in all layers, because most calls repeat the same two objects.
        self._usual: tuple[Any, ...] = (object(), None, False, 0, None, None)

    def transfer(
        self,
        region: Region,
        remote: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        layers: range | None,
        heads: range | None,
        tokens: range | None,
        notify: bytes,
        timeout_s: float | None,
        priority: int,
        integrity: bool | None,
        lease: LeaseToken | None,
        context: str | bytes,
        *,
        write: bool,
        after: StartsAfter | None,
        hold: bool,
    ) -> Transfer:
        """Posts a write or a read; `Agent.write` explains the arguments and the errors.

        Most arguments are positional, in the order of `Agent.write`, because each keyword takes 0.07 of a
        post's 3 us.
        """
        held: bool | After = hold is not False and flag(hold, "hold")
        if after is not None:
            if held:
                raise invalid("hold and after both set when the transfer starts: pass only one")
            held = resolve(self._completions, self._options.gpu_in_use or 0, after)
        part = WHOLE if layers is heads is tokens is None else Part(layers, heads, tokens)
        if integrity is None and lease is None and held is False and priority is FIRST:
            terms = USUAL
        else:
            number = None if lease is None else named_lease(lease, remote)
            terms = terms_of(priority, integrity, number, held)
        known_region, known_remote, known_write, known_version, route, scope = self._usual
        num_fine = 0
        try:
            if (
                region is not known_region
                or remote is not known_remote
                or write is not known_write
                or known_version != self._programs.version
                or part is not WHOLE
            ):
                route, scope, src_blocks, dst_blocks, num_fine = self._find(
                    write, region, remote, src_blocks, dst_blocks, part
                )
            handle = route.post(src_blocks, dst_blocks, num_fine, notify, timeout_s, context, terms)
        except NativeError as error:
            raise _said_of(error, region, remote, context_in_words(context)) from None
        transfer = Transfer(handle, scope)
        if after is not None and held is True:
            cast("concurrent.futures.Future[Any]", after).add_done_callback(transfer._follow)
        return transfer

    def _find(
        self,
        write: bool,
        region: Region,
        remote: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        part: Part,
    ) -> tuple[Route, Scope, Blocks, Blocks, int]:
        """Returns the route of these blocks, and their units."""
        version = self._programs.version  # read first: what is gone meanwhile changes it
        peer_id = self.peer_of(region, remote)
        layers, named_heads, tokens = part
        heads = None if named_heads is None else _as_range(named_heads, "heads")
        entry = self._programs.get(peer_id, write, region, remote, heads)
        num_fine = 0
        if tokens is not None or not entry.whole_blocks:
            from kvxfer.plan.units import pair_units

            src, dst = (region.layout, remote.layout) if write else (remote.layout, region.layout)
            pairs = pair_units(src, dst, as_ids(src_blocks), as_ids(dst_blocks), tokens)
            src_blocks, dst_blocks, num_fine = pairs.src_ids, pairs.dst_ids, pairs.num_fine
            if num_fine:
                entry = self._programs.get(peer_id, write, region, remote, heads, fine=True)
        route, scope = self._route(peer_id, entry, write, region, remote, layers)
        # A descriptor from another process may mean another session each time.
        if part is WHOLE and entry.whole_blocks and remote._peer is not None:
            self._usual = region, remote, write, version, route, scope
        return route, scope, src_blocks, dst_blocks, num_fine

    def route(
        self,
        region: Region,
        remote: RegionDescriptor,
        layers: range | None,
        heads: range | None,
    ) -> tuple[Route, Scope]:
        """Returns the route for writing whole blocks that are named later.

        Raises
        ------
        UsageError
            As in `Agent.write`. ``unsupported``: pages of the two regions differ in size, or one has a null
            block.
        """
        peer_id = self.peer_of(region, remote)
        wanted = None if heads is None else _as_range(heads, "heads")
        entry = self._programs.get(peer_id, True, region, remote, wanted)
        if not entry.whole_blocks:
            raise UsageError(
                f"pages of regions {region.name!r} here and {remote.name!r} of {remote.agent} differ in "
                "size, or one region has a null block, so pairs of blocks are not pairs of pages: use "
                "agent.write",
                code="unsupported",
            )
        return self._route(peer_id, entry, True, region, remote, layers)

    def _route(
        self,
        peer_id: int,
        entry: InstalledProgram,
        write: bool,
        region: Region,
        remote: RegionDescriptor,
        layers: range | None,
    ) -> tuple[Route, Scope]:
        """Returns the route of these layers through a program, and the scope that all work on it shares."""
        program = entry.program
        if layers is None:
            first, moved = entry.first, entry.layers
        else:
            first, count = program.window(layers)
            start = program.origin + first
            moved = range(start, start + count)
        route = self._core.route(
            peer_id,
            entry.installed,
            first,
            len(moved),
            seconds(self._options.transfer_timeout_s, "option transfer_timeout_s"),
            self._options.integrity,
            as_ids,
        )
        return route, Scope(self._completions, remote.agent, moved, program.origin, not write, region)

    def peer_of(self, region: Region, remote: RegionDescriptor) -> int:
        """Returns the number of the session with `remote`'s owner; refuses regions of other agents."""
        if not (
            isinstance(cast(object, region), Region) and isinstance(cast(object, remote), RegionDescriptor)
        ):
            _check_region(region)
            _check_remote(remote)
        if region._completions is not self._completions:
            raise self._foreign_region(region)
        self._completions.check()
        region._check()
        if remote._peer is None:
            return self._peers.owner_of(remote).id
        if remote._peer._completions is not self._completions:
            what = f"the descriptor of region {remote.name!r} of {remote.agent}"
            instead = (
                "take it from peer.regions of this agent's own session, or pass it on with to_bytes() and "
                "from_bytes()"
            )
            raise foreign(self._completions, remote._peer, what, instead)
        return remote._peer.id

    def _foreign_region(self, region: Region) -> UsageError:
        return foreign(self._completions, region, f"region {region.name!r}", _OWN_REGION)

    def expectation(
        self,
        tag: bytes,
        blocks: Blocks,
        region: Region,
        layers: range | None,
        tokens: range | None,
        peer: Peer | None,
        timeout_s: float | None,
        context: str | bytes,
    ) -> Incoming:
        """Permits writes with `tag`; `Agent.expect` explains the arguments and the errors."""
        _check_region(region)
        if peer is not None:
            what = "a Peer from connect() or accept(), or None for any peer"
            check_kind(peer, "peer", Peer, what)
        check_kind(tag, "tag", bytes, "bytes, 1 to 4096 of them")
        if region._completions is not self._completions:
            raise self._foreign_region(region)
        if peer is not None and peer._completions is not self._completions:
            raise foreign(self._completions, peer, f"peer {peer.name!r}", OWN_PEER)
        limit_s = self._options.transfer_timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s")
        region._check()
        if not tag:
            raise invalid("an expectation needs a tag of at least one byte")
        layout = region.layout
        wanted = layout.layers
        if layers is not None:
            wanted = _as_range(layers, "layers")
        if wanted[0] < layout.layers[0] or wanted[-1] > layout.layers[-1]:
            raise UsageError(
                f"layers {wanted[0]} to {wanted[-1]} were named, but region {region.name!r} holds "
                f"{layout.layers[0]} to {layout.layers[-1]} (numbered model-wide)",
                code="out-of-range",
            )
        ids, first_token, end_token = _needed(layout, as_ids(blocks), tokens)
        name = "" if peer is None else peer.name
        try:
            handle = self._core.expect(
                Expected(
                    tag=tag,
                    region=region.id,
                    blocks=ids,
                    first_layer=wanted[0] - layout.first_layer,
                    num_layers=len(wanted),
                    block_tokens=layout.block_tokens,
                    first_token=first_token,
                    end_token=end_token,
                    num_heads=layout.num_heads,
                    peer=None if peer is None else peer.id,
                    timeout_s=limit_s,
                    context=context,
                )
            )
        except NativeError as error:
            raise translate(error, peer=name, context=context_in_words(context)) from None
        scope = Scope(self._completions, name, wanted, layout.first_layer, True, region)
        return Incoming(handle, scope, tag)


def named_lease(token: LeaseToken, remote: RegionDescriptor) -> int:
    """Returns the number of the lease that ``lease=`` names, for a transfer with a region of its agent.

    Raises
    ------
    UsageError
        ``invalid-argument``: it is not a token, or belongs to another agent than the region; the message
        names both.
    """
    what = "a LeaseToken from Lease.token or LeaseToken.parse(text)"
    check_kind(token, "lease", LeaseToken, what, is_secret=True)
    _check_remote(remote)
    if token.incarnation and token.incarnation != remote.incarnation:
        granted_by, owner = distinguished(
            (token.agent, token.incarnation), (remote.agent, remote.incarnation)
        )
        raise invalid(
            f"the lease token is from {granted_by}, but region {remote.name!r} belongs to {owner}: pass a "
            "token that the region's own agent granted; after a restart it must grant a new one",
            peer=remote.agent,
        )
    return token._number


def _said_of(error: NativeError, region: Region, remote: RegionDescriptor, context: str) -> KvxferError:
    """Returns the public exception of a post; names a lost region, where native code has only a number."""
    if error.args[0] == CODES["unknown-region"]:
        return UsageError(
            f"{error.args[1]}, for a transfer between region {region.name!r} here and {remote.name!r} (id "
            f"{remote.id}) of {remote.agent}: memory that was registered again is a new region; take it "
            "from peer.regions",
            code="unknown-region",
            peer=remote.agent,
            context=context,
        )
    return translate(error, peer=remote.agent, context=context)


def _as_range(numbers: range, name: str) -> range:
    from kvxfer.plan.consecutive import consecutive  # importing kvxfer must not load the planner

    return consecutive(numbers, name)


def _check_region(region: object) -> None:
    check_kind(region, "region", Region, "a region that this agent's register() returned")


def _check_remote(remote: object) -> None:
    check_kind(remote, "remote_region", RegionDescriptor, "peer.regions[name]")


def _needed(
    layout: KVLayout, ids: NDArray[np.uint32], named: range | None
) -> tuple[NDArray[np.uint32], int, int]:
    """Returns the real blocks of a table, and the range of their tokens that must arrive."""
    first, end = 0, len(ids) * layout.block_tokens
    if named is not None:
        from kvxfer.plan.units import held_before, sequence_tokens

        tokens = sequence_tokens(named)
        first, stop = held_before(layout, tokens.start), held_before(layout, tokens.stop)
        if stop > end:
            raise UsageError(
                f"tokens {tokens.start} to {tokens.stop - 1} were named, but {len(ids)} blocks of "
                f"{layout.block_tokens} tokens hold only {end} tokens of this rank",
                code="out-of-range",
            )
        end = stop
    if layout.null_block < 0 or not (kept := ids != layout.null_block).size or kept.all():
        return ids, first, end
    # Nothing arrives in null blocks, so they are left out, and tokens are counted without them.
    return ids[kept], _without_null(layout, kept, first), _without_null(layout, kept, end)


def _without_null(layout: KVLayout, kept: NDArray[np.bool_], token: int) -> int:
    block, within = divmod(token, layout.block_tokens)
    before = int(kept[:block].sum()) * layout.block_tokens
    return before + within if block < len(kept) and kept[block] else before
