"""Copy programs that peers have: compiled and sent once for each pair of regions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvxfer._native import AgentCore, NativeError, check_ends
from kvxfer.errors import translate
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.log import is_debugging, logger
from kvxfer.session.requests import Program

if TYPE_CHECKING:
    from kvxfer.plan.program import CopyProgram
    from kvxfer.region import Region, RegionDescriptor

# Peer, write, local region, remote region, heads, with loops of single tokens.
_Key = tuple[int, bool, int, int, range | None, bool]


class InstalledProgram(NamedTuple):
    """A program that both ends have installed."""

    number: int  # in the session
    program: CopyProgram
    whole_blocks: bool  # block ids are its unit ids, and every block is real
    first: int  # first of its layers, in the program's numbers
    layers: range  # all of them, numbered model-wide


class ProgramCache:
    """The programs of one agent. Numbers of regions and peers are never reused, so no entry goes stale."""

    def __init__(self, core: AgentCore) -> None:
        self._core = core
        #: Replaced as a whole when entries are dropped or added. So readers on other threads need no lock,
        #: and a reader that kept an entry can see whether the table has changed since.
        self.entries: dict[_Key, InstalledProgram] = {}

    def __len__(self) -> int:
        return len(self.entries)

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
        entry = self.entries.get(key)
        if entry is None:
            from kvxfer.plan.compile import compile_program

            src, dst = (region, remote) if write else (remote, region)
            program = compile_program(src.layout, dst.layout, heads=heads, fine=fine)
            number = self._core.install_program(
                Program.of(program, peer=peer_id, write=write, src=src.id, dst=dst.id)
            )
            first, _ = program.window(None)
            whole = _names_whole_blocks(src.layout, dst.layout)
            entry = InstalledProgram(number, program, whole, first, program.layers)
            self.entries = {**self.entries, key: entry}
            if is_debugging():
                logger().debug("kvxfer: %s -> %s: %s", src.name, dst.name, program.explain())
        return entry

    def forget_region(self, region_id: int) -> None:
        """Drops programs of a region of this agent."""
        self.entries = {key: entry for key, entry in self.entries.items() if key[2] != region_id}

    def forget_peer(self, peer_id: int, region_id: int | None = None) -> None:
        """Drops programs of a peer, or of one region of it."""
        self.entries = {
            key: entry
            for key, entry in self.entries.items()
            if key[0] != peer_id or region_id not in (None, key[3])
        }

    def clear(self) -> None:
        """Drops everything."""
        self.entries = {}


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
