"""Samples of one request: where it asks for ``n > 1``, the engine makes as many requests of it.

They have one prompt and one set of parameters, and what those name is one prompt's cache: one sample
takes it, or hands it over, and is followed by the others. Nobody says how many there are; every request
here may be one of several. What they have in common is their family (`EngineRequest.family`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.connectors.common.engine_request import EngineRequest

# The engine may be done with the first before the front end has sent the second.
_MAX_ENDED: Final = 256


@dataclass(slots=True)
class _Family:
    here: set[str] = field(default_factory=set)  # that have not ended
    first: str = ""  # the first that got blocks
    told: dict[str, Any] | None = None


class Samples:
    """Which requests of an engine are samples of one."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._ended: dict[str, _Family] = {}  # the last of them

    def __len__(self) -> int:
        return len(self._families)

    def arrived(self, request: EngineRequest) -> None:
        """Counts a request in."""
        name = _name(request)
        if name not in self._families:
            self._families[name] = self._ended.pop(name, _Family())
        self._families[name].here.add(request.id)

    def first_of(self, request: EngineRequest) -> str:
        """Returns the sample that was the first to get blocks; "" as long as none has."""
        family = self._families.get(_name(request))
        return "" if family is None else family.first

    def begins(self, request: EngineRequest) -> bool:
        """Whether a request that got blocks is the first of its samples."""
        family = self._families.setdefault(_name(request), _Family({request.id}))
        family.first = family.first or request.id
        return family.first == request.id

    def are_unbegun_without(self, request: EngineRequest) -> bool:
        """Whether none got blocks, and none is left when this one has ended."""
        family = self._families.get(_name(request))
        return family is None or not (family.first or family.here - {request.id})

    def ended(self, request: EngineRequest, told: dict[str, Any] | None) -> dict[str, Any] | None:
        """Counts a request out; returns what its answer tells: what the first told stands for all.

        Of what all tell, the engine's server passes on one.
        """
        name = _name(request)
        family = self._families.get(name)
        if family is None:
            return told
        family.told = told or family.told
        family.here.discard(request.id)
        if not family.here:
            del self._families[name]
            if request.family is not None:
                self._ended[name] = family
                if len(self._ended) > _MAX_ENDED:
                    del self._ended[next(iter(self._ended))]
        return family.told


def _name(request: EngineRequest) -> str:
    return request.id if request.family is None else request.family
