"""Describes in words what a transfer between two regions would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer.errors import UsageError
from kvxfer.session.program_cache import checked_program

if TYPE_CHECKING:
    from kvxfer._native import AgentCore
    from kvxfer.layout.kv_layout import KVLayout
    from kvxfer.plan.program import CopyProgram
    from kvxfer.region import Region
    from kvxfer.region_descriptor import RegionDescriptor


def explain(core: AgentCore, peer_id: int, region: Region, remote: RegionDescriptor) -> str:
    """Returns some lines about transfers from `remote` to `region` and back; posts nothing.

    `Agent.explain` lists their content.

    Raises
    ------
    NativeError
        The peer or one of the regions is gone.
    """
    here, there = f"{region.name!r} here", f"{remote.name!r} of {remote.agent}"
    comes, goes = _program(remote.layout, region.layout), _program(region.layout, remote.layout)
    lines = [f"read, from {there} to {here}:", *_indented(_words_of(comes))]
    if not isinstance(comes, str):
        converts = bool(len(comes.conversions))
        lines += _indented(*_rails(core.ways(peer_id, region.id, remote.id, converts)))
    lines += [f"write, from {here} to {there}:"]
    lines += _indented("The same copy program." if _words_of(goes) == _words_of(comes) else _words_of(goes))
    if not isinstance(goes, str):
        lines += _indented(
            f"{remote.agent} takes the pages, and chooses the rails by the place of its own memory: call "
            "explain() there for their order."
        )
    node = core.region_node(region.id)
    notes = ["its pages lie on NUMA node " + str(node)] if node >= 0 else []
    for what, said in ((here, [*notes, *region.notes]), (there, _current_notes(core, peer_id, remote))):
        if said:
            lines += [f"{what}:", *_indented(*said)]
    return "\n".join(lines)


def _program(src: KVLayout, dst: KVLayout) -> CopyProgram | str:
    """Returns the program that moves pages between the layouts, or a message on why there is none."""
    try:
        return checked_program(src, dst)
    except UsageError as error:
        return f"Not possible: {error}"


def _words_of(program: CopyProgram | str) -> str:
    return program if isinstance(program, str) else program.explain()


def _rails(ways: list[dict[str, Any]]) -> list[str]:
    able = [way for way in ways if not way["why_not"]]
    lines = ["No rail can carry them now."]
    if able:
        alike = len({way["rank"] for way in able}) < len(able)
        how = " (of equal rails, the one on which a piece arrives first)" if alike else ""
        lines = [f"Over{how}:"]
    lines += [f"  {_rail(way, first=able[0]['rank'])}" for way in able]
    return lines + [f"Not over {_name(way)}: {way['why_not']}." for way in ways if way["why_not"]]


def _rail(way: dict[str, Any], first: int) -> str:
    words = _name(way)
    if way["is_staged"]:
        words += "; staged through this host's memory"
    if way["is_far"]:
        words += "; far from this region's memory"
    return words + ("; only while no better rail is up" if way["rank"] > first else "")


def _name(way: dict[str, Any]) -> str:
    return f"{way['transport']}: {way['path']}" if way["path"] else str(way["transport"])


def _current_notes(core: AgentCore, peer_id: int, remote: RegionDescriptor) -> list[str]:
    """Returns the current notes; the descriptor's own are from when it was read, or from another process."""
    return [note for told in core.peer_regions(peer_id) if told["id"] == remote.id for note in told["notes"]]


def _indented(*lines: str) -> list[str]:
    return [f"  {line}" for line in lines]
