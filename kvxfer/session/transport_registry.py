"""The transports of this build, from the native registry; Python has no list of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from kvxfer.errors import translate

OptionValue = bool | int | str


@dataclass(frozen=True, slots=True)
class TransportOption:
    """An option of a transport, named as in ``AgentOptions.transport_options``, e.g. ``"tcp.rails"``."""

    name: str
    help: str
    default: OptionValue
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class TransportKind:
    """A transport's description of itself (native/include/kvxfer/transport_kind.h).

    Attributes
    ----------
    purpose, remedy
        What it is for; what most often prevents it, and what to do then.
    memory
        Kinds of memory that its rails reach: ``"host"``, ``"gpu"``.
    reach
        Peers of the same ``"process"``, of the same ``"host"``, or any (``"network"``).
    rank
        Order among transports of one reach, lower first, for agents that name no transports. Agents that name
        transports use the order in which they name them.
    is_default
        Whether agents that name no transports use it.
    why_off
        Why an agent without a GPU cannot use it here; ``""`` if it can.
    devices
        Sentences on the devices that its rails use on this machine and for which GPU's memory, and on the
        unused devices with the reason. Empty if there is no choice.
    """

    name: str
    purpose: str
    remedy: str
    options: tuple[TransportOption, ...]
    memory: tuple[str, ...]
    reach: str
    rank: int
    is_default: bool
    why_off: str
    devices: tuple[str, ...]

    @property
    def needs_gpu(self) -> bool:
        """Whether it moves only GPU pages, so that an agent that names it needs a GPU."""
        return "host" not in self.memory


@cache
def kinds() -> dict[str, TransportKind]:
    """Returns all transports of this build by name, ordered by reach (shortest first), then by rank.

    Raises
    ------
    ImportError
        The native module does not load.
    """
    from kvxfer import _native

    told = [
        TransportKind(
            **{
                **kind,
                "options": tuple(TransportOption(name, **spec) for name, spec in kind["options"].items()),
            }
        )
        for kind in _native.transports()
    ]
    nearness = ("process", "host", "network")
    told.sort(key=lambda kind: (nearness.index(kind.reach), kind.rank))
    return {kind.name: kind for kind in told}


def default_names() -> tuple[str, ...]:
    """Returns the transports of agents that name none."""
    return tuple(kind.name for kind in kinds().values() if kind.is_default)


def need_gpu(names: Iterable[str]) -> bool:
    """Returns whether an agent that names these needs a GPU."""
    return any(name in kinds() and kinds()[name].needs_gpu for name in names)


def least_staging_nbytes() -> int:
    """Returns the least pinned memory that rails need for staging GPU pages."""
    from kvxfer import _native

    return _native.MIN_STAGING_NBYTES


def check(names: Iterable[str], options: Mapping[str, OptionValue]) -> None:
    """Checks names of transports and their options against the native registry.

    Raises
    ------
    UsageError
        ``invalid-argument``; the message lists the valid ones.
    """
    from kvxfer import _native

    try:
        _native.check_transports(list(names), dict(options))
    except _native.NativeError as error:
        raise translate(error) from None
