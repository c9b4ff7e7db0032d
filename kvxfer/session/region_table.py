"""The registered regions of one agent, and the check that a peer's caches fit them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer._native import CODES, AgentCore, NativeError
from kvxfer.errors import UsageError, invalid, listed, translate
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.naming import check_name
from kvxfer.options import AgentOptions
from kvxfer.peer import Peer
from kvxfer.region import Region
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.session.completion import Completions
from kvxfer.session.program_cache import ProgramCache

if TYPE_CHECKING:
    from kvxfer.session.registration import Registration


class RegionTable:
    """Registers regions and keeps the registered ones."""

    def __init__(
        self,
        core: AgentCore,
        completions: Completions,
        programs: ProgramCache,
        agent_name: str,
        address: str,
        options: AgentOptions,
    ) -> None:
        self._core = core
        self._completions = completions
        self._programs = programs
        self._agent_name = agent_name
        self._address = address
        self._options = options
        self._regions: dict[int, Region] = {}

    def register(self, name: str, memory: Any, layout: KVLayout | None) -> Region:
        """Makes memory known to peers; `Agent.register` explains the arguments."""
        self._completions.check()
        check_name(name, "name")
        if name in self.by_name():
            raise invalid(
                f"region {name!r} is registered already: deregister it first, or choose another name"
            )
        # Loaded with the first region, because a program that only connects does not need it.
        from kvxfer.session.registration import registration_of

        found = registration_of(name, memory, layout, self._options)
        try:
            region_id = self._tell(name, found)
        except NativeError as error:
            raise translate(error) from None
        descriptor = RegionDescriptor(
            agent=self._agent_name,
            incarnation=self._core.incarnation,
            id=region_id,
            name=name,
            nbytes=found.nbytes,
            num_blocks=found.layout.num_blocks,
            layout=found.layout,
            address=self._address,
        )
        region = Region(self._completions, region_id, descriptor, found.views, self._gone)
        self._regions[region_id] = region
        self._core.note_change()
        return region

    def by_name(self) -> Mapping[str, Region]:
        """Returns the registered regions by name; read-only."""
        return MappingProxyType({region.name: region for region in list(self._regions.values())})

    def only(self) -> Region:
        """Returns the only region, or raises if there are none or several."""
        regions = list(self._regions.values())
        if len(regions) != 1:
            raise invalid(f"agent {self._agent_name!r} has {len(regions)} regions: name one with region=")
        return regions[0]

    def end_if_unlike(self, peer: Peer) -> None:
        """Ends the session with a peer whose caches cannot be copied to or from ours, and raises the reason.

        The option ``refuse_unlike`` can leave that to transfers.

        Raises
        ------
        UsageError
            ``layout-mismatch``; the message compares the caches of one name field by field.
        """
        ours = {name: region.layout for name, region in self.by_name().items()}
        if not ours or not self._options.refuse_unlike:
            return
        from kvxfer.plan.compile import differences

        found = [
            f"region {name!r}: {'; '.join(reasons)}"
            for name, remote in peer.regions.items()
            if name in ours
            and (reasons := differences(ours[name], remote.layout))
            # Copying may be possible in one direction only, e.g. with page scales, which are computed in one
            # direction.
            and differences(remote.layout, ours[name])
        ]
        if not found:
            return
        words = f"the caches of {self._agent_name} (source) and {peer.name} (destination) differ in "
        words += listed(found, "nothing", "; in ")
        self._core.disconnect(peer.id, CODES["layout-mismatch"], words)
        raise UsageError(words, code="layout-mismatch", peer=peer.name)

    def let_go(self) -> None:
        """Releases all memory, which nothing serves any more."""
        for region in list(self._regions.values()):
            region._let_go()

    # ---- inside -----------------------------------------------------------------------------

    def _tell(self, name: str, found: Registration) -> int:
        from kvxfer.plan.compile import footprint

        try:
            loops = footprint(found.layout)
        except UsageError as error:  # it speaks of two layouts
            raise invalid(f"region {name!r} cannot be registered: {error.args[0]}") from None
        return self._core.register(
            name,
            np.array(found.spans, np.int64),
            found.layout.num_blocks,
            np.array(loops),
            found.layout.to_bytes(),
            found.device,
            found.views,
        )

    def _gone(self, region: Region) -> None:
        self._regions.pop(region.id, None)
        self._core.note_change()
        self._programs.forget_region(region.id)
