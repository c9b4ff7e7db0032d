"""Copy programs that peers know already: compiled and told once for each pair of regions."""

from __future__ import annotations

import numpy as np

from kvxfer._native import AgentCore
from kvxfer.log import is_debugging, logger
from kvxfer.plan import CopyProgram, compile
from kvxfer.region import Region, RegionDescriptor

_Key = tuple[int, bool, int, int]  # peer, write, local region, remote region
_Entry = tuple[int, CopyProgram]  # its number in the session


class ProgramCache:
    """The programs of one agent. Regions and peers are never renumbered, so no entry goes stale."""

    def __init__(self, core: AgentCore) -> None:
        self._core = core
        # Replaced as a whole when it changes: readers on other threads need no lock.
        self._entries: dict[_Key, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, peer_id: int, write: bool, region: Region, remote: RegionDescriptor) -> _Entry:
        """Returns the program's number in the session and the program, compiling it the first time.

        Raises
        ------
        UsageError
            ``layout-mismatch``.
        NativeError
            The peer or a region is gone.
        """
        key = peer_id, write, region.id, remote.id
        entry = self._entries.get(key)
        if entry is None:
            src, dst = (region, remote) if write else (remote, region)
            program = compile(src.layout, dst.layout)
            number = self._core.install_program(
                peer_id, write, src.id, dst.id, program.num_program_layers, np.array(program.loops)
            )
            entry = number, program
            self._entries = {**self._entries, key: entry}
            if is_debugging():
                logger().debug("kvxfer: %s -> %s: %s", src.name, dst.name, program.explain())
        return entry

    def forget_region(self, region_id: int) -> None:
        """Drops what begins or ends in a region of this agent."""
        self._entries = {key: entry for key, entry in self._entries.items() if key[2] != region_id}

    def forget_peer(self, peer_id: int, region_id: int | None = None) -> None:
        """Drops what leads to a peer, or to one region of it."""
        self._entries = {
            key: entry
            for key, entry in self._entries.items()
            if key[0] != peer_id or region_id not in (None, key[3])
        }

    def clear(self) -> None:
        """Drops everything."""
        self._entries = {}
