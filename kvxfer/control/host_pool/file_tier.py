"""The pool's second tier: pages in files of a directory, which outlive the daemon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvxfer.control.host_pool.page import PageKey
from kvxfer.control.host_pool.page_salts import PageSalts
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.log import logger
from kvxfer.memory.page_files import PageFiles, open_page_files

if TYPE_CHECKING:
    from kvxfer.memory.page_files import PageAnswer, PageEnd

# A disk that stands still must not hold up the daemon's end for longer.
_CLOSING_S: Final = 5.0
_LOOK_S: Final = 1.0

#: Called with the tier's state (``up``, ``read-only``, ``out``) and its reason when it changes.
OnState = Callable[[str, str], None]
#: Called with digests of pages that the tier had to evict.
OnEvicted = Callable[[list[bytes]], None]

# Memory of reads and writes that never ended: the disk may still use it.
_left: list[Any] = []


class PageInFiles(NamedTuple):
    """A page as its head names it; a long key is cut, and ends in dots."""

    key: PageKey
    nbytes: int
    place: tuple[int, int]


class FileTier:
    """Writes, reads and drops pages of one directory. All methods belong to one event loop.

    Make it with `open`. Nothing waits for the disk but the returned futures.
    """

    def __init__(
        self,
        files: PageFiles,
        salts: PageSalts,
        directory: Path,
        on_evicted: OnEvicted | None = None,
        on_state: OnState | None = None,
    ) -> None:
        self._files = files
        self._salts = salts
        self._salting = asyncio.Lock()
        self.directory = directory
        self._on_evicted = on_evicted
        self._on_state = on_state
        self._state = "up"
        self._ended: dict[int, asyncio.Future[PageEnd | PageAnswer]] = {}
        self._last_ticket = 0
        #: What a tenant may have in all, or None; `PagePool` sets it.
        self.bound_of: Callable[[str], int | None] = lambda tenant: None
        asyncio.get_running_loop().add_reader(files.event_fd, self._take)
        self._looking = asyncio.create_task(self._look())

    @classmethod
    async def open(
        cls,
        directory: Path,
        nbytes: int,
        on_evicted: OnEvicted | None = None,
        on_state: OnState | None = None,
    ) -> FileTier:
        """Opens a directory, and finds the pages that are whole.

        Raises
        ------
        KvxferError
            As for `open_page_files`.
        OSError
            The directory cannot be made or read.
        """

        def work() -> tuple[PageFiles, PageSalts]:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            salts = PageSalts(directory)
            return open_page_files(directory, nbytes, [each.tenant_number for each in salts.all]), salts

        files, salts = await asyncio.to_thread(work)
        if not files.is_direct:
            logger().warning("kvxfer: pages go through the page cache: %s", files.why_not_direct)
        return cls(files, salts, directory, on_evicted, on_state)

    async def aclose(self, memory: object) -> None:
        """Ends it; what waits for the disk fails. Idempotent.

        Parameters
        ----------
        memory
            What pages are read into and written from. It stays for good if the disk still uses it then.
        """
        if self._looking.done():
            return
        self._looking.cancel()
        idle = await asyncio.to_thread(self._files.close, _CLOSING_S)
        asyncio.get_running_loop().remove_reader(self._files.event_fd)
        self._take()
        if not idle:
            _left.append(memory)
            logger().error("kvxfer: %s: the disk stands still; its memory is not freed", self.directory)
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result("out")

    # ---- pages -------------------------------------------------------------------------------------

    def layout(self, digest: str) -> KVLayout | None:
        """Returns the layout of pages that may be there."""
        return self._salts.layouts.get(digest)

    def look_up(self, keys: Sequence[PageKey], *, counts: bool = False) -> list[bool]:
        """Returns for each key whether its page is there; `counts`: as hits and misses."""
        there = self._files.look_up(b"".join(key.digest() for key in keys), counts)
        return [found != 0 for found in there]

    async def number(self, key: PageKey, layout: KVLayout) -> int | None:
        """Returns the number that pages of this kind have in files, or None if they can have none."""
        if (number := self._salts.find(key)) is not None:
            return number
        async with self._salting:
            if (number := self._salts.find(key)) is not None:
                return number
            if not self._salts.has_room(key):
                return None
            try:
                salt = await asyncio.to_thread(self._salts.add, key, layout)
            except OSError as error:
                logger().warning("kvxfer: %s", error)
                return None
            number = len(self._salts.all) - 1
            self._files.set_tenant(number, salt.tenant_number)
            return number

    def write(
        self, key: PageKey, number: int, address: int, nbytes: int, memory_nbytes: int
    ) -> asyncio.Future[PageEnd | PageAnswer]:
        """Begins to write a page. The future has how that ended; until then the page's memory must stay.

        Parameters
        ----------
        number
            From `number`.
        memory_nbytes
            What the key's tenant has in memory: its bound is for both.
        """
        bound = self.bound_of(key.tenant)
        most_nbytes = 2**63 if bound is None else max(bound - memory_nbytes, 0)
        self._files.set_bound(self._salts.all[number].tenant_number, most_nbytes)
        ticket = self._ticket()
        return self._end(
            ticket, self._files.write(key.digest(), number, key.key, address, nbytes, False, ticket)
        )

    def read(self, key: PageKey, address: int, nbytes: int) -> asyncio.Future[PageEnd | PageAnswer]:
        """Begins to read a page; until the future is done, bytes land in its memory."""
        ticket = self._ticket()
        return self._end(ticket, self._files.read(key.digest(), address, nbytes, 0.0, ticket))

    def sync(self, key: PageKey) -> asyncio.Future[PageEnd | PageAnswer]:
        """The future has ``"done"`` when a page that is there would survive a loss of power."""
        ticket = self._ticket()
        return self._end(ticket, self._files.sync(key.digest(), ticket))

    def drop(
        self, keys: Sequence[PageKey]
    ) -> tuple[list[PageKey], list[asyncio.Future[PageEnd | PageAnswer]]]:
        """Takes pages away at once; no restart finds them any more when the futures are done.

        Returns the keys that were there, and the futures.
        """
        there, ends = [], []
        for key in keys:
            ticket = self._ticket()
            if (answer := self._files.drop(key.digest(), ticket)) == "begun":
                there.append(key)
                ends.append(self._end(ticket, answer))
        return there, ends

    def read_s(self, nbytes: int, count: int) -> float:
        """Returns how long reading `count` pages will take, by what is known of the disk."""
        return self._files.read_s(nbytes) * max(count / 16, 1.0)

    async def pages(self, tenant: str | None, after: tuple[int, int], most: int) -> list[PageInFiles]:
        """Returns pages in the order of their places, from the place `after` on; waits for the disk."""
        number = None if tenant is None else self._salts.tenants().get(tenant)
        if tenant is not None and number is None:
            return []
        found = await asyncio.to_thread(self._files.pages, *after, number, most)
        return [
            PageInFiles(
                PageKey(*self._salts.all[salt][:4], f"{key}..." if is_cut else key), nbytes, (segment, slot)
            )
            for segment, slot, salt, key, is_cut, nbytes in found
        ]

    # ---- figures -----------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Returns the figures of `PageFiles`."""
        return self._files.figures()

    def tenants_nbytes(self) -> dict[str, int]:
        """Returns what each tenant has in files."""
        used = {tenant: self._files.tenant_nbytes(number) for tenant, number in self._salts.tenants().items()}
        return {tenant: nbytes for tenant, nbytes in used.items() if nbytes}

    # ---- inside ------------------------------------------------------------------------------------

    def _ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def _end(self, ticket: int, answer: PageAnswer) -> asyncio.Future[PageEnd | PageAnswer]:
        future: asyncio.Future[PageEnd | PageAnswer] = asyncio.get_running_loop().create_future()
        if answer == "begun":
            self._ended[ticket] = future
        else:
            future.set_result(answer)
        return future

    def _take(self) -> None:
        ended, evicted = self._files.take_ended()
        for ticket, how, error in ended:
            if how == "failed":
                logger().warning("kvxfer: %s: %s", self.directory, os.strerror(error))
            elif how == "damaged":
                logger().error("kvxfer: %s: a page came back damaged, and was dropped", self.directory)
            future = self._ended.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(how)
        if evicted and self._on_evicted is not None:
            self._on_evicted([digest for digest, _ in evicted])

    async def _look(self) -> None:
        """Says when the disk goes out, or comes back."""
        while True:
            figures = self._files.figures()
            if figures["state"] != self._state:
                self._state = figures["state"]
                log = logger().info if self._state == "up" else logger().error
                log("kvxfer: pages in %s: %s %s", self.directory, self._state, figures["why"])
                if self._on_state is not None:
                    self._on_state(self._state, figures["why"])
            await asyncio.sleep(_LOOK_S)
