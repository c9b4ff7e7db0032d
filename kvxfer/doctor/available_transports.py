"""Which transports carry pages on this machine, and what the others lack here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvxfer.doctor import trial
from kvxfer.doctor.finding import Finding, State
from kvxfer.errors import invalid
from kvxfer.gpu.availability import availability
from kvxfer.session import transport_registry as registry
from kvxfer.session.transport_registry import TransportKind

SUBJECT = "transports"
_WHY_DEVICES = (
    "the pages of a memory go first over the devices that are near it; "
    "AgentOptions(transport_options={...}) chooses other devices (verbs.devices) "
    "or another library (ucx.library)"
)


def check_names(names: tuple[str, ...], what: str = "") -> None:
    """Raises `UsageError` for an unknown transport, unless the registry cannot be read.

    ``what`` begins the message: the option that named it.
    """
    kinds, failure = _kinds()
    unknown = [name for name in names if name not in kinds]
    if unknown and not failure:
        begin = f"{what}: " if what else ""
        raise invalid(
            f"{begin}unknown transport {', '.join(map(repr, unknown))}; known are {', '.join(kinds)}"
        )


def examine(root: Path, required: tuple[str, ...] = ()) -> list[Finding]:
    """Tries every transport of host memory, and checks what the others need.

    Parameters
    ----------
    root
        Where ``proc`` and ``sys`` are. The trials always use this machine.
    required
        Transports without which the answer is `State.BLOCKS`.
    """
    kinds, failure = _kinds()
    if failure:
        why = "the native module contains the transports, and moves every page"
        return [Finding(SUBJECT, "all", State.BLOCKS, failure, why, "reinstall kvxfer: see software")]
    lacking = {name: State.BLOCKS if name in required else State.LIMITS for name in kinds}
    findings = [_written(kind, lacking[kind.name]) for kind in kinds.values() if not kind.needs_gpu]
    # A missing transport that agents use only on request is not a limit unless it is required.
    unasked = [name for name, kind in kinds.items() if not kind.is_default and name not in required]
    findings = [
        replace(each, state=State.NOTE) if each.name in unasked and each.state is not State.GOOD else each
        for each in findings
    ]
    # If no transport can move a page, that always blocks.
    if all(finding.state is not State.GOOD for finding in findings):
        findings = [replace(finding, state=State.BLOCKS) for finding in findings]
    on_gpu = [_on_gpu(kind, lacking[kind.name]) for kind in kinds.values() if kind.needs_gpu]
    devices = [
        Finding(SUBJECT, f"{kind.name} devices", State.NOTE, words, _WHY_DEVICES)
        for kind in kinds.values()
        for words in kind.devices
    ]
    return [*findings, *devices, *on_gpu]


def _kinds() -> tuple[dict[str, TransportKind], str]:
    """The registry, or why it cannot be read."""
    try:
        return registry.kinds(), ""
    except ImportError as error:
        return {}, f"the list of transports cannot be read: {error}"


def _written(kind: TransportKind, lacking: State) -> Finding:
    if failure := kind.why_off or trial.try_transport(kind.name):
        found = f"does not work here: {failure}"
        return Finding(SUBJECT, kind.name, lacking, found, kind.purpose, kind.remedy)
    pages = f"{trial.NUM_PAGES} pages of {trial.PAGE_NBYTES // 1024} KiB"
    found = f"works: two agents moved {pages}, every byte checked"
    return Finding(SUBJECT, kind.name, State.GOOD, found, kind.purpose)


def _on_gpu(kind: TransportKind, lacking: State) -> Finding:
    able = availability()
    if able.device is not None and able.usable:
        # A process cannot open its own memory's handles, as a peer does.
        found = (
            f"kernels can run on {able.device.name}; moving pages was not tried, because it takes two "
            "processes"
        )
        return Finding(SUBJECT, kind.name, State.NOTE, found, kind.purpose)
    found = f"GPU kernels cannot run here: {able.missing}"
    # A missing GPU is not a limit unless it is required.
    state = lacking if lacking is State.BLOCKS else State.NOTE
    return Finding(SUBJECT, kind.name, state, found, kind.purpose, able.change)
