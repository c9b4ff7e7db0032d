"""Groups the samples of one request: for ``n > 1``, the engine makes n requests of it.

The samples share one prompt and one set of parameters, which name one prompt's cache. One sample fetches the
cache, or hands it over, and the others follow. The engine does not say how many samples there are, so every
request may be one of several. `EngineRequest.family` is the name that they share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.connectors.common.engine_request import EngineRequest

# Ended families are remembered: the engine may finish the first sample before the front end sends the second.
_MAX_ENDED: Final = 256


@dataclass(slots=True)
class _Family:
    here: set[str] = field(default_factory=set)  # samples that have not ended
    first: str = ""  # the first sample that got blocks
    told: dict[str, Any] | None = None


class Samples:
    """Tracks which requests of an engine are samples of one request."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._ended: dict[str, _Family] = {}  # bounded

    def __len__(self) -> int:
        return len(self._families)

    def arrived(self, request: EngineRequest) -> None:
        """Adds a request to its family."""
        name = _name(request)
        if name not in self._families:
            self._families[name] = self._ended.pop(name, _Family())
        self._families[name].here.add(request.id)

    def first_of(self, request: EngineRequest) -> str:
        """Returns the sample that got blocks first; "" if none has."""
        family = self._families.get(_name(request))
        return "" if family is None else family.first

    def begins(self, request: EngineRequest) -> bool:
        """Whether a request that got blocks is the first of its family to get some."""
        family = self._families.setdefault(_name(request), _Family({request.id}))
        family.first = family.first or request.id
        return family.first == request.id

    def are_unbegun_without(self, request: EngineRequest) -> bool:
        """Whether no sample got blocks, and this request is the last one that has not ended."""
        family = self._families.get(_name(request))
        return family is None or not (family.first or family.here - {request.id})

    def ended(self, request: EngineRequest, told: dict[str, Any] | None) -> dict[str, Any] | None:
        """Removes a request; returns its answer's parameters: its own, or those that another sample got.

        The engine's server passes on the parameters of one sample only.
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
