"""Directories of pages that only claim to hold pages: whole heads, and files of pages that take no room.

A tier that is opened reads heads alone, so it finds as many pages as it would with their bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer._native import PAGE_FILE_BLOCK_NBYTES, PageFiles

# native/store/slot_format.h and .cpp. If these fall behind, the tier finds none of the pages, and the
# benchmark fails.
_SEGMENT: Final = np.dtype(
    [
        ("magic", "u8"),
        ("version", "u4"),
        ("num_slots", "u4"),
        ("id", "u8"),
        ("slot_nbytes", "u8"),
        ("crc", "u4"),
    ]
)
_SLOT: Final = np.dtype(
    [
        *(("magic", "u4"), ("crc", "u4"), ("digest", "V16"), ("segment_id", "u8"), ("generation", "u8")),
        *(("nbytes", "u8"), ("salt", "u4"), ("page_crc", "u4"), ("key_nbytes", "u2"), ("key_is_cut", "u2")),
        *(("unused", "u4"), ("key", "u1", 192)),
    ]
)
_SEGMENT_MAGIC: Final = 0x3167_6573_7866_766B
_SLOT_MAGIC: Final = 0x746F_6C73
_KEY_NBYTES: Final = 32

Bytes = NDArray[np.uint8]


def digests(num_pages: int, seed: int) -> Bytes:
    """Returns uint8 [num_pages, 16]: the pages that `make` makes."""
    return np.random.default_rng(seed).integers(0, 256, (num_pages, 16), dtype=np.uint8)


def nbytes_of_pages(num_pages: int, page_nbytes: int) -> int:
    """Returns the size of files that have room for the pages; a directory has 64 segments or fewer."""
    each = max(-(-num_pages // 64) * page_nbytes, 64 << 20)
    return -(-each // PAGE_FILE_BLOCK_NBYTES) * PAGE_FILE_BLOCK_NBYTES * 64


def make(directory: Path, num_pages: int, page_nbytes: int, seed: int) -> None:
    """Makes the files of as many pages in an empty directory, last used in random order, and syncs them."""
    # The tier itself says how large a segment is.
    PageFiles(str(directory), nbytes_of_pages(num_pages, page_nbytes), [0]).close(10.0)
    lines = (directory / "format").read_text().splitlines()
    version, segment_nbytes = (int(line.split()[-1]) for line in lines)
    chance = np.random.default_rng(seed + 1)
    generations = chance.permutation(num_pages).astype(np.uint64) + np.uint64(1)
    keys = digests(num_pages, seed)
    each = segment_nbytes // page_nbytes
    for segment, first in enumerate(range(0, num_pages, each)):
        part = slice(first, min(first + each, num_pages))
        head = np.zeros(1, _SEGMENT)
        head["magic"], head["version"], head["num_slots"] = _SEGMENT_MAGIC, version, each
        head["id"], head["slot_nbytes"] = segment + 1, page_nbytes
        head["crc"] = _crc32c(_bytes(head)[:, :-4])
        slots = np.zeros(len(keys[part]), _SLOT)
        slots["magic"], slots["segment_id"], slots["nbytes"] = _SLOT_MAGIC, segment + 1, page_nbytes
        slots["digest"] = keys[part].view("V16")[:, 0]
        slots["generation"], slots["key_nbytes"] = generations[part], _KEY_NBYTES
        slots["key"][:, :_KEY_NBYTES] = np.tile(keys[part], 2)
        slots["crc"] = _crc32c(_bytes(slots)[:, 8:])
        name = directory / f"{segment:05}"
        with name.with_suffix(".heads").open("wb") as heads:
            heads.write(_bytes(head).tobytes().ljust(PAGE_FILE_BLOCK_NBYTES, b"\0"))
            heads.write(slots.tobytes())
            heads.flush()
            os.fsync(heads.fileno())
        with name.with_suffix(".pages").open("wb") as pages:
            pages.truncate(segment_nbytes)


def forget(directory: Path) -> None:
    """Takes the heads out of the page cache, so that opening the directory reads the disk."""
    for file in directory.glob("*.heads"):
        with file.open("rb") as heads:
            os.posix_fadvise(heads.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes(rows: NDArray[Any]) -> Bytes:
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


def _crc32c(rows: Bytes) -> NDArray[np.uint32]:
    """Returns the checksum of each row, a column of all rows at a time."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    state = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(rows.T):
        state = table[(state ^ column) & 0xFF] ^ state >> np.uint32(8)
    return ~state
