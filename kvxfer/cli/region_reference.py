"""Regions as commands name them, ``[daemon#]agent/region[:blocks]``, and as a daemon finds them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.cli.asking import counted
from kvxfer.errors import invalid

if TYPE_CHECKING:
    from kvxfer.control import schema
    from kvxfer.control.client.rest_client import Client

_MOST_BLOCKS = 65536
_BLOCKS = re.compile(r"^(?P<place>.+):(?P<blocks>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)$")


@dataclass(frozen=True, slots=True)
class RegionReference:
    """A region as it is written: ``[daemon#]agent/region[:blocks]``."""

    daemon: str
    name: str
    blocks: tuple[int, ...] | None

    @classmethod
    def parse(cls, text: str) -> RegionReference:
        """Parses one; blocks are e.g. ``0-7,12``, or all of the region's if they are left out."""
        daemon, mark, rest = text.partition("#")
        if not mark:
            daemon, rest = "", text
        found = _BLOCKS.match(rest)
        name, blocks = (rest, None) if found is None else (found["place"], _numbers(found["blocks"]))
        if "/" not in name:
            raise invalid(
                f"{text!r} is not a place: write [daemon#]agent/region[:blocks], e.g. decode-0/kv:0-7"
            )
        return cls(daemon, name, blocks)


@dataclass(frozen=True, slots=True)
class PlacedRegion:
    """A region as its daemon knows it, and the meant blocks."""

    client: Client
    agent: schema.Agent
    region: schema.Region
    blocks: list[int]

    @classmethod
    def find(cls, client: Client, place: RegionReference) -> PlacedRegion:
        """Finds the agent and its region, as `find_region`."""
        agent, region = find_region(client, place)
        blocks = list(range(region.num_blocks) if place.blocks is None else place.blocks)
        if not 0 < len(blocks) <= _MOST_BLOCKS:
            raise invalid(f"{place.name} has {len(blocks)} blocks; one transfer moves 1 to {_MOST_BLOCKS}")
        return cls(client, agent, region, blocks)

    @property
    def words(self) -> str:
        """Its name in messages."""
        return f"{counted(len(self.blocks), 'block')} of {self.region.name} of {self.agent.name}"


def find_region(client: Client, place: RegionReference) -> tuple[schema.Agent, schema.Region]:
    """Returns the agent and the region that a place names; ``/region`` is a region of the daemon itself."""
    node = client.get_node()
    agents = {agent.id: agent for agent in client.agents()}
    own = agents[node.agent].name if node.agent in agents else ""
    found = [
        (agents[region.agent], region)
        for region in client.regions()
        if region.agent in agents and place.name in _names(agents[region.agent], region, own)
    ]
    if not found:
        raise invalid(f"{client.address} does not know a region {place.name!r}: kvxfer regions lists them")
    if len(found) > 1:
        raise invalid(f"{place.name!r} names {len(found)} regions: name the agent by its id (kvxfer agents)")
    return found[0]


def _names(agent: schema.Agent, region: schema.Region, own: str) -> set[str]:
    """Returns a region's names; the agent of handed memory is named after the daemon's own agent."""
    names = {f"{agent.name}/{region.name}", f"{agent.id}/{region.name}"}
    is_own = own and (agent.name == own or agent.name.startswith(f"{own}/"))
    return names | {f"/{region.name}"} if is_own else names


def _numbers(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or len(found) + len(numbers) > _MOST_BLOCKS:
            raise invalid(f"blocks {part!r} are an empty range, or more than {_MOST_BLOCKS} in total")
        found.extend(numbers)
    return tuple(found)
