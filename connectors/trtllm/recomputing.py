"""Requests whose promised cache did not arrive: the engine's interface has no word for them.

It asks a connector once how many tokens will be there, counts these as computed, and asks nothing when they
have failed to arrive. What is left is to end the engine's loop, or to take the promise back in the engine's
own request: where that request waits for its load, its position is set to what is computed here, and the
ranks compute the rest. The requests are known to the engine's manager alone, whose members `FIELDS` are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

#: Of the manager, in every release that was read.
METHOD: Final = "get_finished"
FIELDS: Final = ("new_async_requests", "pending_async_requests", "local_finished_async_requests")

_MARK: Final = "kvxfer_shows_parked"


def show_parked(manager_class: Any) -> None:
    """Has the manager show a worker of ours which requests wait for their loads, before it asks the worker.

    Raises
    ------
    NotImplementedError
        This release's manager is another.
    """
    own = getattr(manager_class, METHOD, None)
    if own is None:
        raise NotImplementedError(
            f"failed_loads recompute needs KvCacheConnectorManager.{METHOD}, which "
            'this release of TensorRT-LLM has not: set "failed_loads": "stop"'
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
    """Has a waiting request computed from a token on.

    Raises
    ------
    RuntimeError
        It does not wait here.
    """
    if (request := parked.get(request_id)) is None:
        raise RuntimeError(
            f"kvxfer: request {request_id}: its cache was not loaded, and the engine does not show it to its "
            'connector: set "failed_loads": "stop"'
        )
    request.context_current_position = num_computed
