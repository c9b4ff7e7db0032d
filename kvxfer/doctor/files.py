"""Small files of /proc and /sys, which may be missing, unreadable or odd."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """Returns the text without surrounding blanks, or None where it cannot be read."""
    try:
        # Some of them refuse the read itself (a NIC's speed, while it is down).
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):
        return None


def read_int(path: Path) -> int | None:
    """Returns the number in a file, or None where there is none."""
    try:
        return int(read_text(path) or "")
    except ValueError:
        return None


def read_fields(path: Path) -> dict[str, str]:
    """Returns the ``name: value`` lines of a file; of a name that is repeated, the first."""
    fields: dict[str, str] = {}
    for line in (read_text(path) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def names_in(folder: Path) -> list[str]:
    """Returns the names in a folder, sorted; none if the folder does not exist."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def chosen(text: str) -> str:
    """Returns the choice in brackets of a setting such as ``"always [madvise] never"``."""
    _, bracket, rest = text.partition("[")
    return rest.partition("]")[0] if bracket else text


def binary_size(nbytes: int) -> str:
    """Writes a size for people: ``"8 MiB"``, ``"47.1 GiB"``."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
