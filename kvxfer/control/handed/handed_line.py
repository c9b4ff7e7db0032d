"""The line of JSON with which a process hands memory over, checked."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.errors import UsageError, invalid
from kvxfer.gpu.peer_pages import DESCRIPTOR, FABRIC, MOST_NBYTES
from kvxfer.layout.kv_layout import MAX_ENCODED_NBYTES, KVLayout
from kvxfer.layout.schema import decode_object
from kvxfer.naming import is_text

#: The longest line: a layout, as text in JSON, and little else.
MAX_LINE_NBYTES: Final = 2 * MAX_ENCODED_NBYTES + 4096
_MAX_NAME_NBYTES: Final = 64
_HANDLE: Final = re.compile(r"[0-9a-f]{128}")
_NO_HANDLE: Final = bytes(64)


@dataclass(frozen=True, slots=True)
class GpuHandle:
    """The handle with which another process maps an allocation on a GPU (`kvxfer.gpu.peer_pages`).

    Attributes
    ----------
    kind
        `DESCRIPTOR`, which is sent beside the line, or `FABRIC`.
    allocated_nbytes
        Of the whole allocation; the driver refuses to map it with another size.
    handle
        64 bytes; zeros if it is a descriptor.
    """

    kind: int
    allocated_nbytes: int
    handle: bytes

    @property
    def num_descriptors(self) -> int:
        """How many descriptors are sent beside the line."""
        return int(self.kind == DESCRIPTOR)


@dataclass(frozen=True, slots=True)
class HandedLine:
    """The memory that a process hands over.

    Attributes
    ----------
    name
        Printable text of 1 to 64 bytes.
    layout
        Where the elements lie, counted from `offset`.
    offset
        Where the memory begins in the memfd, or in the allocation.
    nbytes
        Bytes from there on; None for the rest of a memfd.
    gpu
        None for a memfd.
    """

    name: str
    layout: KVLayout
    offset: int
    nbytes: int | None
    gpu: GpuHandle | None

    @classmethod
    def read(cls, line: bytes) -> HandedLine:
        """Reads a line without its end.

        Raises
        ------
        UsageError
            ``invalid-argument``: the line is malformed. ``length-mismatch``: the layout spans more than the
            named part of a GPU's allocation. ``unsupported``: a handle that does not keep its memory alive.
        """
        wanted = decode_object(line, MAX_LINE_NBYTES, "what is handed over")
        name = wanted.get("name")
        if not is_text(name) or not 0 < len(name.encode()) <= _MAX_NAME_NBYTES:
            raise invalid(f"name must be a text of 1 to {_MAX_NAME_NBYTES} bytes")
        if not name.isprintable():
            raise invalid("name contains characters that cannot be printed")
        layout = _layout_of(wanted.get("layout"))
        offset = _count(wanted, "offset", 0)
        nbytes = _count(wanted, "nbytes", None)
        if (told := wanted.get("cuda_handle")) is None:
            return cls(name, layout, offset, nbytes, None)
        gpu = _gpu_handle(told)
        if nbytes is None:
            nbytes = gpu.allocated_nbytes - offset
        if nbytes < 1 or offset + nbytes > gpu.allocated_nbytes:
            raise invalid(
                f"{nbytes} bytes at offset {offset} exceed an allocation of {gpu.allocated_nbytes} bytes"
            )
        require_span(layout, nbytes)
        return cls(name, layout, offset, nbytes, gpu)


def require_span(layout: KVLayout, nbytes: int) -> None:
    """Refuses a layout that extends beyond its memory."""
    if layout.nbytes > nbytes:
        raise UsageError(
            f"the layout spans {layout.nbytes} bytes, but the memory has {nbytes}", code="length-mismatch"
        )


def _layout_of(document: Any) -> KVLayout:
    if not isinstance(document, dict):
        raise invalid("layout must be a JSON object, as KVLayout.to_bytes writes it")
    return KVLayout.from_bytes(json.dumps(document).encode())


def _count(told: dict[str, Any], name: str, default: int | None) -> Any:
    value = told.get(name, default)
    if value is default:
        return value
    if type(value) is not int or not 0 <= value < 1 << 56:
        raise invalid(f"{name} must be a whole number of bytes, not {value!r:.100}")
    return value


def _gpu_handle(told: Any) -> GpuHandle:
    if not isinstance(told, dict) or not told.keys() <= {"kind", "allocated_nbytes", "handle"}:
        raise invalid(
            'cuda_handle must be an object, e.g. {"kind": "descriptor", "allocated_nbytes": 2097152}'
        )
    kind, handle = told.get("kind"), told.get("handle")
    if kind == "ipc":
        raise UsageError(
            "memory of cudaMalloc (cudaIpcGetMemHandle) is not accepted: it is freed under the "
            "daemon's copies when its process dies. Allocate it by cuMemCreate, and export a file "
            "descriptor or a fabric handle",
            code="unsupported",
        )
    allocated = _count(told, "allocated_nbytes", -1)
    if not 0 < allocated <= MOST_NBYTES:
        raise invalid("allocated_nbytes must be the size of the whole allocation, in bytes")
    if kind == "descriptor" and handle is None:
        return GpuHandle(DESCRIPTOR, allocated, _NO_HANDLE)
    if kind == "fabric" and isinstance(handle, str) and _HANDLE.fullmatch(handle):
        return GpuHandle(FABRIC, allocated, bytes.fromhex(handle))
    raise invalid('kind must be "descriptor", sent with the line, or "fabric" with a handle of 128 digits')
