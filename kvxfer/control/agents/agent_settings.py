"""Settings that are kept for agents by their names: limits of their peers, and rails that are off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvxfer.control.schema import AgentSettingsChange
from kvxfer.control.schema.problems import Refusal

#: How many peers may be set for one agent, and how many agents.
_MOST_PEERS: Final = 1024
_MOST_NAMES: Final = 1024

Kept = dict[str, dict[str, Any]]


class AgentSettings:
    """The kept settings by agent's name: ``{"peers": {name: limits}, "rails": {transport: "off"}}``."""

    def __init__(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        self.all: Kept = {name: dict(each) for name, each in kept.items()}

    def arguments_of(self, name: str, change: AgentSettingsChange | None) -> dict[str, Any]:
        """Returns the arguments of ``settings.set`` for a change; None undoes all that is kept."""
        if change is None:
            kept = self.all.get(name, {})
            return {
                "peers": dict.fromkeys(kept.get("peers", ())),
                "rails": dict.fromkeys(kept.get("rails", ()), True),
            }
        limits = {peer: None if limit is None else limit.model_dump() for peer, limit in _peers(change)}
        return {"peers": limits, "rails": {rail: state == "on" for rail, state in _rails(change)}}

    def arguments_of_new(self, name: str) -> dict[str, Any] | None:
        """Returns the arguments for an agent that has just attached; None if nothing is kept for it."""
        kept = self.all.get(name)
        if kept is None:
            return None
        return {"peers": kept["peers"], "rails": dict.fromkeys(kept["rails"], False)}

    def changed(self, name: str, change: AgentSettingsChange | None) -> Kept:
        """Returns the settings to keep after a change."""
        everything = dict(self.all)
        kept = everything.pop(name, {})
        if change is None:
            return everything
        peers, rails = dict(kept.get("peers", {})), dict(kept.get("rails", {}))
        for peer, limit in _peers(change):
            peers.pop(peer, None)
            if limit is not None and (limit.max_bytes_per_s or limit.least_priority):
                peers[peer] = limit.model_dump()
        for rail, state in _rails(change):
            rails.pop(rail, None)
            if state == "off":
                rails[rail] = state
        if len(peers) > _MOST_PEERS or len(everything) >= _MOST_NAMES:
            raise Refusal(
                "exhausted", f"at most {_MOST_NAMES} agents, with {_MOST_PEERS} peers each, can have settings"
            )
        return {**everything, name: {"peers": peers, "rails": rails}} if peers or rails else everything


def _peers(change: AgentSettingsChange) -> Any:
    return (change.peers or {}).items()


def _rails(change: AgentSettingsChange) -> Any:
    return (change.rails or {}).items()
