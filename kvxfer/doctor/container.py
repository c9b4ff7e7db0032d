"""Whether this is a container, and which namespaces peers on the host must have in common with it."""

from __future__ import annotations

from pathlib import Path

from kvxfer.doctor.files import read_text
from kvxfer.doctor.finding import Finding, State

SUBJECT = "container"

# include/linux/proc_ns.h: PROC_PID_INIT_INO, the number of the first pid namespace of a boot.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_MARKS = {".dockerenv": "Docker", "run/.containerenv": "Podman", "run/secrets/kubernetes.io": "Kubernetes"}
_WORDS = ("docker", "kubepods", "containerd", "libpod", "lxc")


def examine(root: Path) -> list[Finding]:
    """Looks for a container's marks and reads this process's namespaces."""
    kind = runtime(root)
    found = f"this looks like a {kind} container" if kind else "this does not look like a container"
    why = "containers separate processes by namespaces and limits: see the findings below and those of memory"
    return [
        Finding(SUBJECT, "runtime", State.NOTE, found, why),
        pid_namespace(root),
        network_namespace(root, kind),
    ]


def runtime(root: Path) -> str:
    """Returns which container runtime left its marks, ``""`` for none."""
    for mark, name in _MARKS.items():
        try:
            if (root / mark).exists():
                return name
        except OSError:
            continue
    groups = read_text(root / "proc/self/cgroup") or ""
    return next((word for word in _WORDS if word in groups), "")


def pid_namespace(root: Path) -> Finding:
    """Says whether this process shares its pid namespace with the host."""
    why = (
        "shm reads an engine's own memory by the peer's process id, so both must share a pid "
        "namespace; for pools they need not"
    )
    namespace = _namespace(root, "pid")
    if not namespace:
        return Finding(SUBJECT, "pid namespace", State.NOTE, "cannot be read", why)
    if namespace == _FIRST_PID_NAMESPACE:
        found = f"the host's ({namespace}): processes outside containers are visible"
        return Finding(SUBJECT, "pid namespace", State.GOOD, found, why)
    change = (
        "for engines in different containers: docker run --pid=container:<other> (or --pid=host), Kubernetes "
        "shareProcessNamespace: true"
    )
    found = f"not the host's ({namespace}): foreign memory works only between processes in it"
    return Finding(SUBJECT, "pid namespace", State.LIMITS, found, why, change)


def network_namespace(root: Path, kind: str) -> Finding:
    """Names this process's network namespace, by which two engines can be compared."""
    why = (
        "shm and unix connect through an abstract unix socket, which belongs to a network namespace: "
        "peers of one host in different ones use tcp"
    )
    namespace = _namespace(root, "net")
    if not namespace:
        return Finding(SUBJECT, "network namespace", State.NOTE, "cannot be read", why)
    change = ""
    if kind:
        change = (
            f"run `readlink /proc/self/ns/net` in the other container: it must print {namespace}; "
            "otherwise use docker run --network=host or --network=container:<other>, or one "
            "Kubernetes pod"
        )
    return Finding(SUBJECT, "network namespace", State.NOTE, namespace, why, change)


def _namespace(root: Path, name: str) -> str:
    try:
        return str((root / "proc/self/ns" / name).readlink())
    except OSError:
        return ""
