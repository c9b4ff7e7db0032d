"""Copy programs that peers know, for each pair of regions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from kvxfer._native import AgentCore, NativeError, check_ends
from kvxfer.errors import translate
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.log import is_debugging, logger
from kvxfer.session.requests import Program

if TYPE_CHECKING:
    from kvxfer._native import Installed
    from kvxfer.plan.program import CopyProgram
    from kvxfer.region import Region
    from kvxfer.region_descriptor import RegionDescriptor

# Peer, write, local region, remote region, heads, with loops of single tokens.
_Key = tuple[int, bool, int, int, range | None, bool]
#: Programs that an agent keeps: two ways between each of 64 regions and each of 128. 1 KB each as a rule.
MOST_PROGRAMS: Final = 1 << 14


class InstalledProgram(NamedTuple):
    """A program that both ends know."""

    installed: Installed  # in native code, as long as this or a route has it
    program: CopyProgram
    whole_blocks: bool  # block ids are its unit ids, and every block is real
    first: int  # first of its layers, in the program's numbers
    layers: range  # all of them, numbered model-wide


class ProgramCache:
    """The programs of one agent, of which it keeps those that were used last. Any thread may call it.

    Numbers of regions and peers are never reused, so no entry goes stale. A program that made room for others
    is compiled again when it is needed; routes that have it keep it. Native code does the same for what each
    peer keeps.
    """

    def __init__(self, core: AgentCore) -> None:
        self._core = core
        self._entries: OrderedDict[_Key, InstalledProgram] = OrderedDict()  # by their last use, oldest first
        self._lock = threading.Lock()
        #: Changes whenever a region or a peer of entries is gone, so that a reader that kept one can see it.
        self.version = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self,
        peer_id: int,
        write: bool,
        region: Region,
        remote: RegionDescriptor,
        heads: range | None = None,
        fine: bool = False,
    ) -> InstalledProgram:
        """Returns the program; the first time, compiles it and sends it to the peer.

        Raises
        ------
        UsageError
            ``layout-mismatch``, ``out-of-range``: as in `kvxfer.plan.compile_program`.
        NativeError
            The peer or a region is gone.
        """
        key = peer_id, write, region.id, remote.id, heads, fine
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry
        return self._keep(key, self._install(peer_id, write, region, remote, heads, fine))

    def forget_region(self, region_id: int) -> None:
        """Drops programs of a region of this agent."""
        self._forget(lambda key: key[2] == region_id)

    def forget_peer(self, peer_id: int, region_id: int | None = None) -> None:
        """Drops programs of a peer, or of one region of it."""
        self._forget(lambda key: key[0] == peer_id and region_id in (None, key[3]))

    def clear(self) -> None:
        """Drops everything."""
        self._forget(lambda key: True)

    # ---- inside -----------------------------------------------------------------------------

    def _install(
        self,
        peer_id: int,
        write: bool,
        region: Region,
        remote: RegionDescriptor,
        heads: range | None,
        fine: bool,
    ) -> InstalledProgram:
        src, dst = (region, remote) if write else (remote, region)
        program = _compiled(src.layout, dst.layout, heads, fine)
        installed = self._core.install_program(
            Program.of(program, peer=peer_id, write=write, src=src.id, dst=dst.id)
        )
        if is_debugging():
            logger().debug("kvxfer: %s -> %s: %s", src.name, dst.name, program.explain())
        first, _ = program.window(None)
        whole = _names_whole_blocks(src.layout, dst.layout)
        return InstalledProgram(installed, program, whole, first, program.layers)

    def _keep(self, key: _Key, made: InstalledProgram) -> InstalledProgram:
        """Returns the entry of `key`: `made`, unless another thread was first."""
        gone = []  # given back to native code without the lock
        with self._lock:
            entry = self._entries.setdefault(key, made)
            self._entries.move_to_end(key)
            while len(self._entries) > MOST_PROGRAMS:
                gone.append(self._entries.popitem(last=False))
        return entry

    def _forget(self, is_gone: Callable[[_Key], bool]) -> None:
        with self._lock:
            self.version += 1
            gone = [(key, self._entries.pop(key)) for key in list(self._entries) if is_gone(key)]
        del gone  # likewise


@lru_cache(maxsize=256)
def _compiled(src: KVLayout, dst: KVLayout, heads: range | None, fine: bool) -> CopyProgram:
    """Compiles once for each pair of layouts, which many pairs of regions have."""
    from kvxfer.plan.compile import compile_program

    return compile_program(src, dst, heads=heads, fine=fine)


def checked_program(src: KVLayout, dst: KVLayout) -> CopyProgram:
    """Compiles the program between two layouts, and holds it to what both ends' agents check.

    Raises
    ------
    UsageError
        As in `kvxfer.plan.compile_program`, or what an agent would refuse.
    """
    import numpy as np  # loaded with the first layout

    from kvxfer.plan.compile import compile_program, footprint

    program = compile_program(src, dst)
    ends = [(np.array(footprint(end)), end.num_blocks, end.nbytes) for end in (src, dst)]
    try:
        check_ends(Program.of(program), *ends)
    except NativeError as error:
        raise translate(error) from None
    return program


def _names_whole_blocks(src: KVLayout, dst: KVLayout) -> bool:
    from kvxfer.plan.units import same_tokens

    return (
        src.block_tokens == dst.block_tokens
        and same_tokens(src, dst)
        and src.null_block == dst.null_block == -1
    )
