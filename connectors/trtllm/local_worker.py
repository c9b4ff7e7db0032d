"""Lets an engine's scheduler find the worker beside it: rank 0 makes both at once, in two threads."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from kvxfer.connectors.common.step import OwnRank, Step
from kvxfer.connectors.trtllm.agreement import Said
from kvxfer.connectors.trtllm.pools import Pools


@dataclass(frozen=True, slots=True)
class Registered:
    """The facts that the ranks share once the engine has registered its cache.

    Attributes
    ----------
    engine_id
        The engine's id, the same on all ranks.
    pools
        The pools of rank 0.
    ranks
        The agents of all ranks.
    """

    engine_id: str
    pools: Pools
    ranks: tuple[OwnRank, ...]


class Listener(Protocol):
    """The scheduler, for the worker beside it: it receives each agreement of the ranks."""

    def idle_step(self) -> Step | None: ...

    def agreed(self, said: Said) -> None: ...


class LocalWorker(Protocol):
    """A worker, for the scheduler beside it."""

    registered: Registered | None
    listener: Listener | None


_lock = threading.Lock()
# Workers by the arguments from which the engine makes both.
_workers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def introduce(llm_args: object, worker: LocalWorker) -> None:
    """Registers a worker under its arguments."""
    with _lock:
        _workers[id(llm_args)] = worker


def find(llm_args: object) -> LocalWorker:
    """Returns the worker that was made from the same arguments in this process."""
    with _lock:
        found: LocalWorker | None = _workers.get(id(llm_args))
    if found is None:
        raise RuntimeError(
            "kvxfer: no KvxferConnectorWorker was created with this scheduler: name both classes in "
            "KvCacheConnectorConfig"
        )
    return found
