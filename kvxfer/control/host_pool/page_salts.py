"""Numbers for what pages of one kind share: tenant, model, revision and layout; kept beside the pages' files.

A slot's head has room for a number and not for the texts. A number is on disk before any page has it, and is
never given to other texts.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Final, NamedTuple

from kvxfer.control.host_pool.page import PageKey
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.log import logger

#: What one tenant may take of them: each is kept for good.
MOST_OF_TENANT: Final = 4096


class PageSalt(NamedTuple):
    """The parts of a key besides the page's own name, and the tenant's number."""

    tenant: str
    model: str
    revision: str
    layout: str
    tenant_number: int


class PageSalts:
    """The file ``salts`` of a directory: one line for each, with a checksum before it.

    Not safe for several threads. `add` waits for the disk; everything else is memory.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "salts"
        self.all: list[PageSalt] = []
        #: The layouts of pages, by digest.
        self.layouts: dict[str, KVLayout] = {}
        self._numbers: dict[tuple[str, ...], int] = {}
        self._tenants: dict[str, int] = {}
        self._num_of_tenant: dict[str, int] = {}
        self._good_nbytes = 0
        self._read()

    def find(self, key: PageKey) -> int | None:
        """Returns the number for pages of this kind, or None if they have none yet."""
        return self._numbers.get(key[:4])

    def has_room(self, key: PageKey) -> bool:
        """Returns whether the key's tenant may have one more."""
        return self._num_of_tenant.get(key.tenant, 0) < MOST_OF_TENANT

    def tenants(self) -> dict[str, int]:
        """Returns each tenant's number."""
        return self._tenants

    def add(self, key: PageKey, layout: KVLayout) -> PageSalt:
        """Writes a new one down; when this returns, pages may have it. Its number is its place in `all`.

        Raises
        ------
        OSError
            The disk refuses it.
        """
        text = json.dumps([*key[:4], json.loads(layout.to_bytes())], separators=(",", ":"))
        line = f"{zlib.crc32(text.encode()):08x} {text}\n".encode()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # What is damaged, or a part of a line that failed before, would hide the lines behind it. Only a
            # daemon that has the directory comes here: reading it changes nothing, whoever does.
            os.ftruncate(fd, self._good_nbytes)
            if os.pwrite(fd, line, self._good_nbytes) != len(line):
                raise OSError(f"{self._path}: the disk took only a part of a line")
            os.fdatasync(fd)
        finally:
            os.close(fd)
        self._good_nbytes += len(line)
        return self._take(key[:4], layout)

    def _take(self, parts: tuple[str, ...], layout: KVLayout) -> PageSalt:
        tenant, model, revision, digest = parts
        number = self._tenants.setdefault(tenant, len(self._tenants))
        salt = PageSalt(tenant, model, revision, digest, number)
        self._numbers[parts] = len(self.all)
        self.all.append(salt)
        self._num_of_tenant[tenant] = self._num_of_tenant.get(tenant, 0) + 1
        self.layouts.setdefault(digest, layout)
        return salt

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        for line in data.splitlines(keepends=True):
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            try:
                if not line.endswith(b"\n") or int(checksum, 16) != zlib.crc32(text):
                    break
            except ValueError:
                break
            *parts, layout = json.loads(text)
            self._take(tuple(parts), KVLayout.from_bytes(json.dumps(layout).encode()))
            self._good_nbytes += len(line)
        if self._good_nbytes < len(data):
            logger().warning(
                "kvxfer: %s is damaged from byte %d on: pages that need the rest are lost",
                self._path,
                self._good_nbytes,
            )
