"""The public interface of a release, by name: Python, commands, REST, metrics, kernels, codes, protocols.

`make interface` records this version's (interface.json). test_interface.py checks later versions against it,
by the rules of docs/versions.md.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

from kvxfer._native import CODES
from kvxfer.connectors.common.metric_table import METRICS
from kvxfer.connectors.common.settings import Settings
from kvxfer.control.app.build import DaemonApp
from kvxfer.control.app.scrape import Metrics
from kvxfer.daemon_link import frames
from tests.control.serving import serving

ROOT: Final = Path(__file__).parents[2]
RECORDED: Final = Path(__file__).parent / "interface.json"

#: name -> its parts; the part "is" says what it is, the others what it takes or has. A part that ends in
#: "required" must be given.
Interface = dict[str, dict[str, str]]

#: Public modules, and the public names of those without ``__all__``.
MODULES: Final[dict[str, tuple[str, ...]]] = {
    "kvxfer": (),
    "kvxfer.control": (
        *("AsyncClient", "Client", "ControlError", "DaemonDirectory", "Missed", "Retry"),
        "layout_digest",
    ),
    "kvxfer.control.handed.hand_over": ("HandedOver", "hand_over", "shared_array"),
    "kvxfer.directory": (),
    "kvxfer.directory.etcd": ("EtcdDirectory",),
    "kvxfer.engine_layouts": ("opaque_rows", "sglang", "trtllm", "vllm", "vllm_group"),
    "kvxfer.gpu": (),
    "kvxfer.plan": (),
    "kvxfer.testing": (),
}
#: Classes whose instances verbs return: their constructors are private.
RETURNED: Final = {
    *("Cache", "CommandRing", "CopyProgram", "HandedOver", "Incoming", "Lease", "LeaseToken", "Message"),
    *("Missed", "Notification", "Pair", "Peer", "Region", "RegionDescriptor", "Share", "StoreOffer"),
    *("Transfer", "Trigger"),
}
#: Measures, and changes with its measurements.
UNSTABLE_COMMANDS: Final = {"bench"}


def collect() -> Interface:
    """Returns this version's interface, sorted. Starts a daemon in this process."""
    document, families = asyncio.run(_of_a_daemon())
    found: Interface = {}
    for name, parts in (
        *_python(),
        *_commands(),
        *_rest(document),
        *_metrics(families),
        *_kernels(),
        *_others(),
    ):
        assert name not in found, name
        found[name] = parts
    return dict(sorted(found.items()))


def breaks(recorded: Interface, current: Interface) -> Iterator[tuple[str, str]]:
    """Yields what breaks users of `recorded` in `current`: the name, and what happened to it."""
    for name, had in recorded.items():
        has = current.get(name)
        if has is None:
            yield name, "is gone"
            continue
        for part, value in had.items():
            now = has.get(part)
            # A required part may become optional.
            is_eased = value.endswith("required") and str(now).startswith(value.removesuffix("required"))
            if now is None:
                yield name, f"{part} is gone"
            elif now != value and not is_eased:
                yield name, f"{part} was {value!r}, and is {now!r}"
        for part in has.keys() - had.keys():
            if has[part].endswith("required"):
                yield name, f"{part} has to be given now"


def violations(recorded: dict[str, Any], current: Interface, version: str, notes: str) -> list[str]:
    """Returns the breaks that docs/versions.md does not allow.

    Parameters
    ----------
    recorded
        Of `RECORDED`: the version, and its interface.
    version
        Of `current`.
    notes
        The newest section of the changelog, which names the breaks.
    """
    found = list(breaks(recorded["interface"], current))
    if not may_break(recorded["version"], version):
        return [f"{name} {what}; {recorded['version']} -> {version} may not break it" for name, what in found]
    named = {name: re.findall(r"[\w-]+", name)[-1] for name, _ in found}
    return [
        f"{name} {what}, and the changelog does not say so"
        for name, what in found
        if named[name] not in notes
    ]


def may_break(recorded: str, version: str) -> bool:
    """Whether the major number was raised; before 1.0, the minor number."""
    (old_major, old_minor), (major, minor) = (
        tuple(map(int, each.split(".")[:2])) for each in (recorded, version)
    )
    return major > old_major or (major == old_major == 0 and minor > old_minor)


def version() -> str:
    """Returns the version of this tree."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def newest_notes() -> str:
    """Returns the newest section of the changelog, with its heading."""
    return "## " + (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]


# ---- Python -------------------------------------------------------------------------------------


def _python() -> Iterator[tuple[str, dict[str, str]]]:
    kvxfer = importlib.import_module("kvxfer")
    for place, names in MODULES.items():
        module = kvxfer.engine_layouts if place == "kvxfer.engine_layouts" else importlib.import_module(place)
        for name in names or module.__all__:
            yield from _object(f"{place}.{name}", getattr(module, name))


def _object(name: str, found: Any) -> Iterator[tuple[str, dict[str, str]]]:
    if not inspect.isclass(found):
        yield name, _callable(found)
        return
    is_made = not issubclass(found, Exception | enum.Enum | dict) and not getattr(
        found, "_is_protocol", False
    )
    takes = _parameters(found) if is_made and found.__name__ not in RETURNED else {}
    yield name, {"is": "class", **takes}
    for member, kind in _members(found):
        yield f"{name}.{member}", kind


def _members(found: type) -> Iterator[tuple[str, dict[str, str]]]:
    if issubclass(found, enum.Enum):
        yield from ((name, {"is": f"member {each.value!r}"}) for name, each in found.__members__.items())
    for name in sorted({*_fields(found), *dir(found)}):
        static = inspect.getattr_static(found, name, None)
        function = getattr(static, "__func__", None) or getattr(static, "fget", None) or static
        if name.startswith("_") or isinstance(static, enum.Enum):
            continue
        if name in _fields(found) or isinstance(static, property):
            yield name, {"is": "attribute"}
        elif inspect.isfunction(function) and function.__module__.startswith("kvxfer"):
            bound = static if isinstance(static, staticmethod) else getattr(found, name)
            is_bound = isinstance(static, staticmethod | classmethod)
            yield name, _callable(bound, without_self=not is_bound)


def _fields(found: type) -> set[str]:
    """Names of attributes: declared ones, and those that the docstring lists."""
    declared: set[str] = set(getattr(found, "_fields", ()))
    if dataclasses.is_dataclass(found):
        declared |= {field.name for field in dataclasses.fields(found)}
    if issubclass(found, dict):
        declared |= set(found.__annotations__)
    section = re.search(
        r"^Attributes\n-+\n(.*?)(?:\n\n\w+\n-+\n|\Z)", inspect.getdoc(found) or "", re.M | re.S
    )
    for line in section[1].splitlines() if section else ():
        if re.match(r"\w", line):
            declared |= set(re.findall(r"\w+", line.partition(":")[0]))
    return declared


def _callable(found: Any, *, without_self: bool = False) -> dict[str, str]:
    kind = "coroutine" if inspect.iscoroutinefunction(found) else "function"
    if inspect.isasyncgenfunction(found):
        kind = "asynchronous iterator"
    return {"is": kind, **_parameters(found, without_self=without_self)}


def _parameters(found: Any, *, without_self: bool = False) -> dict[str, str]:
    takes = {}
    parameters = list(inspect.signature(found).parameters.values())[int(without_self) :]
    for index, each in enumerate(parameters):
        if each.name.startswith("_"):
            continue
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            takes[each.name] = "any more" if each.kind == each.VAR_POSITIONAL else "any more by name"
            continue
        place = "by name" if each.kind == each.KEYWORD_ONLY else f"argument {index + 1}"
        takes[each.name] = f"{place}, {_default(each.default, each.empty)}"
    return takes


def _default(value: Any, empty: Any) -> str:
    if value is empty:
        return "required"
    if isinstance(value, enum.Enum):
        value = value.value
    plain = value is None or isinstance(value, bool | int | float | str | bytes | tuple)
    return f"{value!r} by default" if plain else "may be left out"


# ---- Commands -----------------------------------------------------------------------------------


def _commands() -> Iterator[tuple[str, dict[str, str]]]:
    app = importlib.import_module("kvxfer.cli.app").build()
    yield from _command("kvxfer", importlib.import_module("typer.main").get_command(app))


def _command(name: str, command: Any) -> Iterator[tuple[str, dict[str, str]]]:
    takes = {}
    index = 0
    for each in command.params:
        need = "required" if each.required else "may be left out"
        if each.param_type_name == "argument":
            index += 1
            takes[each.name] = f"argument {index}, {need}"
        else:
            takes |= dict.fromkeys((*each.opts, *each.secondary_opts), f"option, {need}")
    yield f"{name} (command)", {"is": "command", **takes}
    for inner, sub in getattr(command, "commands", {}).items():
        if inner not in UNSTABLE_COMMANDS:
            yield from _command(f"{name} {inner}", sub)


# ---- The daemon ---------------------------------------------------------------------------------


async def _of_a_daemon() -> tuple[dict[str, Any], list[Any]]:
    """Returns its OpenAPI and the families of its metrics."""
    with tempfile.TemporaryDirectory(prefix="kvxfer") as folder:
        async with serving(Path(folder), own_agent=True, pool_gib=0.01) as served:
            app = DaemonApp(served.daemon)
            families = list(Metrics(served.daemon, app.streams).collect())
            return app.api.openapi(), families


def _rest(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    schemas = document["components"]["schemas"]
    sent: set[str] = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            takes = {"is": f"operation {operation['operationId']}"}
            for each in operation.get("parameters", ()):
                need = "required" if each.get("required") else "may be left out"
                takes[each["name"]] = f"in {each['in']}, {need}"
            if body := operation.get("requestBody"):
                takes["body"] = "required" if body.get("required") else "may be left out"
                sent |= _referred(body, schemas)
            yield f"{method.upper()} {path}", takes
    for name, schema in schemas.items():
        needed = schema.get("required", ()) if name in sent else ()
        fields = {each: "required" if each in needed else "field" for each in schema.get("properties", ())}
        values = {str(each): "value" for each in schema.get("enum", ())}
        yield f"{name} (JSON)", {"is": "object", **fields, **values}


def _referred(part: Any, schemas: dict[str, Any]) -> set[str]:
    """Names of the schemas that a part of the document is made of."""
    found = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(part)))
    return found.union(*(_referred(schemas[each], schemas) for each in found))


def _metrics(families: list[Any]) -> Iterator[tuple[str, dict[str, str]]]:
    for each in families:
        labels = ", ".join(sorted(each._labelnames)) or "no label"
        if each.type == "info":
            labels = ", ".join(sorted(each.samples[0].labels))
        yield f"{each.name} (metric)", {"is": f"{each.type} by {labels}"}
    for metric in METRICS:
        labels = ", ".join(sorted(metric.labels)) or "no label"
        yield f"vllm:kvxfer_{metric.name} (metric)", {"is": f"{metric.kind} by the engine's and {labels}"}


# ---- What is spoken, and the rest ----------------------------------------------------------------


def _kernels() -> Iterator[tuple[str, dict[str, str]]]:
    """Yields what a CUDA kernel calls: functions of ``kvxfer/device.cuh``, and methods of `PageStores`."""
    for header in ("device", "device_stores", "device_threads"):
        text = (ROOT / f"native/include/kvxfer/{header}.cuh").read_text()
        text = re.sub(r"//.*", "", text)
        public = re.sub(r"\n private:.*?\n};", "", text, flags=re.DOTALL)
        declared = re.findall(
            r"^(?P<indent> *)__device__ (?:inline |explicit )?(?P<type>[\w ]+?[ *&]+)?(?P<name>\w+)"
            r"\((?P<parameters>[^()]*(?:\(\)[^()]*)?)\)",
            public,
            flags=re.MULTILINE,
        )
        for indent, returned, name, parameters in declared:
            if "static" in returned or name in ("store_page_by", "sync"):  # parts of those that are public
                continue
            name = f"PageStores::{name}" if indent else name
            parts = {"is": "function", f"returns {returned.strip()}": "type"}
            for place, each in enumerate(" ".join(parameters.split()).split(", ") if parameters else ()):
                declaration, _, default = each.partition(" = ")
                parts[f"{place} {declaration}"] = default or "required"
            yield f"kernel {name} of {len(parts) - 2}" if name == "arrive" else f"kernel {name}", parts


def _others() -> Iterator[tuple[str, dict[str, str]]]:
    header = (ROOT / "native/core/control/wire.h").read_text()
    newest, oldest = (
        int(re.findall(rf"\b{name} = (\d+);", header)[0])
        for name in ("kProtocolVersion", "kOldestProtocolVersion")
    )
    spoken = {str(number): "spoken" for number in range(oldest, newest + 1)}
    yield "protocol between agents", {"is": "protocol", **spoken}
    yield "protocol of daemon links", {"is": "protocol", str(frames.VERSION): "spoken"}
    yield "error codes", {"is": "words", **dict.fromkeys(CODES, "code")}
    fields = Settings.model_fields.items()
    needs = {name: "required" if each.is_required() else "may be left out" for name, each in fields}
    values = {f"{name}={value}": "value" for name, each in fields for value in _literals(each.annotation)}
    yield "settings of the connectors", {"is": "settings", **needs, **values}


def _literals(annotation: Any) -> list[str]:
    return [str(each) for each in get_args(annotation) if isinstance(each, str)]


def main() -> int:
    """Records the interface of this version, unless it has breaks that are not allowed."""
    current = collect()
    if RECORDED.exists():
        recorded = json.loads(RECORDED.read_text())
        if found := violations(recorded, current, version(), newest_notes()):
            print(*found, "see docs/versions.md", sep="\n", file=sys.stderr)
            return 1
    # One name per line, so that a diff shows what a release changes.
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(parts)}" for name, parts in current.items())
    made = f'{{"version": {json.dumps(version())}, "interface": {{\n{lines}\n}}}}\n'
    RECORDED.write_text(made)
    print(f"{RECORDED.relative_to(ROOT)}: {len(current)} names of {version()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
