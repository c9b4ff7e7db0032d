"""The transports of this build, as the native registry tells them: Python has no list of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from kvxfer.errors import translate

OptionValue = bool | int | str


@dataclass(frozen=True, slots=True)
class TransportOption:
    """An option of a transport, named as ``AgentOptions.transport_options`` has it, e.g. ``"tcp.rails"``."""

    name: str
    help: str
    default: OptionValue
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class TransportKind:
    """What a transport says of itself (native/include/kvxfer/transport_kind.h).

    Attributes
    ----------
    purpose, remedy
        What it is for; what most often forbids it, and what to do then.
    memory
        Which its rails reach: ``"host"``, ``"gpu"``.
    reach
        Peers of the same ``"process"``, of the same ``"host"``, or any (``"network"``).
    rank
        Lower is preferred among those of one reach by agents that name no transports; the others prefer by
        the order of their names.
    is_default
        Whether agents that name no transports use it.
    why_off
        Why an agent without a GPU cannot have it here; ``""`` where it can.
    devices
        Which devices its rails use on this machine, for the memory of which GPU, and which they do not use
        and why: sentences. Empty where there is no choice.
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
        """Whether it moves pages of GPUs alone: an agent that names it has one."""
        return "host" not in self.memory


@cache
def kinds() -> dict[str, TransportKind]:
    """Returns all of this build by name, those first that go less far, and then the preferred.

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
    """Returns what agents use that name no transports."""
    return tuple(kind.name for kind in kinds().values() if kind.is_default)


def need_gpu(names: Iterable[str]) -> bool:
    """Whether an agent that names these needs a GPU."""
    return any(name in kinds() and kinds()[name].needs_gpu for name in names)


def least_staging_nbytes() -> int:
    """Returns how much pinned memory rails need at least to stage pages of a GPU in."""
    from kvxfer import _native

    return _native.MIN_STAGING_NBYTES


def check(names: Iterable[str], options: Mapping[str, OptionValue]) -> None:
    """Passes names of transports and their options where the native registry does.

    Raises
    ------
    UsageError
        ``invalid-argument``, with what there is instead.
    """
    from kvxfer import _native

    try:
        _native.check_transports(list(names), dict(options))
    except _native.NativeError as error:
        raise translate(error) from None
