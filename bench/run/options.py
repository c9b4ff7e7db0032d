"""Options of benchmarks, declared once: fields ``Annotated[type, Option(...)]`` of a frozen dataclass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_args, get_type_hints

from kvxfer.bench.errors import BenchError

# A worker imports numpy and the engine and faults in its memory before its first reply: a minute, where the
# machine is emulated.
REPLY_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Option:
    """What an option means, and its bounds. Of a tuple each item is looked at.

    ``value`` is what help calls the value; by default it is made of the option's name.
    """

    help: str = ""
    one_of: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float = float("inf")
    hidden: bool = False
    value: str = ""


Seed = Annotated[int, Option("Seed of all random orders.", at_least=0)]
#: A transfer that misses its deadline is to be told by its worker, not by that worker's silence.
Timeout = Annotated[float, Option("Deadline of one transfer.", above=0, at_most=REPLY_TIMEOUT_S - 10.0)]
Corrupt = Annotated[bool, Option("Flip a byte after arrival, so that the check must fail.", hidden=True)]


def declared(options: type[Any]) -> dict[str, tuple[Any, Option]]:
    """Returns the type and the `Option` of each field of a dataclass, in order."""
    found = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        kind, *extras = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        found[name] = kind, next((extra for extra in extras if isinstance(extra, Option)), Option())
    return found


def flag(name: str) -> str:
    """Returns an option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def check(options: Any) -> None:
    """Raises `BenchError` for the first option that is not what it may be."""
    for name, (_, option) in declared(type(options)).items():
        given = getattr(options, name)
        if isinstance(given, tuple) and not given:
            raise BenchError(f"{flag(name)} is empty; give one or more values, separated by commas")
        for each in given if isinstance(given, tuple) else (given,):
            _check_one(flag(name), each, option)


def _check_one(name: str, given: Any, option: Option) -> None:
    if option.one_of and given not in option.one_of:
        raise BenchError(f"unknown {name} {given!r}; known are {', '.join(option.one_of)}")
    if option.at_least is not None and given < option.at_least:
        raise BenchError(f"{name} must be at least {option.at_least:g}, not {given:g}")
    if option.above is not None and not option.above < given <= min(option.at_most, 1e300):
        most = f" and at most {option.at_most:g}" if option.at_most < float("inf") else ""
        raise BenchError(f"{name} must be above {option.above:g}{most}, not {given:g}")


def described(options: Any) -> dict[str, Any]:
    """Returns the options as a result has them; tuples as lists, hidden ones not at all."""
    shown = declared(type(options))
    fields = {name: value for name, value in asdict(options).items() if not shown[name][1].hidden}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
