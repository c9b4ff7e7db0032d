"""Takes back the promise of a cache that did not arrive, because the engine's interface cannot report it.

The engine asks a connector once how many tokens it can load, and counts these as computed. It never asks
whether they arrived. The connector can end the engine's loop, or take the promise back in the engine's own
request: while that request waits for its load, its position is set to the tokens that are here, and the ranks
compute the rest. Only the engine's manager knows these requests; they are read from its members `FIELDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

#: Members of the manager, in every release that was read.
METHOD: Final = "get_finished"
FIELDS: Final = ("new_async_requests", "pending_async_requests", "local_finished_async_requests")

_MARK: Final = "kvxfer_shows_parked"


def show_parked(manager_class: Any) -> None:
    """Wraps the manager, so that it shows our worker the requests that wait for loads before it asks it.

    Raises
    ------
    NotImplementedError
        This release's manager lacks the method.
    """
    own = getattr(manager_class, METHOD, None)
    if own is None:
        raise NotImplementedError(
            f"failed_loads recompute needs KvCacheConnectorManager.{METHOD}, which this release of "
            'TensorRT-LLM lacks: set "failed_loads": "stop"'
        )
    if hasattr(own, _MARK):
        return
    inner: Callable[..., Any] = own

    def get_finished(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (see := getattr(self.worker, "see_parked", None)) is not None:
            see({key: each for name in FIELDS for key, each in getattr(self, name).loading.items()})
        return inner(self, *args, **kwargs)

    setattr(get_finished, _MARK, True)
    setattr(manager_class, METHOD, get_finished)


def take_back(parked: Mapping[int, Any], request_id: int, num_computed: int) -> None:
    """Makes the engine compute a waiting request from a token on.

    Raises
    ------
    RuntimeError
        The engine does not show the request as waiting.
    """
    if (request := parked.get(request_id)) is None:
        raise RuntimeError(
            f"kvxfer: request {request_id}: its cache was not loaded, and the engine does not show it to its "
            'connector: set "failed_loads": "stop"'
        )
    request.context_current_position = num_computed
