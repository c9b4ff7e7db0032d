"""A process that opens a directory of pages, as a daemon that starts again does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kvxfer._native import PageFiles
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.process import End
from kvxfer.bench.store import slot_heads


class OpeningEnd(End):
    """One that has opened nothing yet, so that what it takes more is what the pages take."""

    def __init__(self, fields: Message, coordinator: Channel, peers: Any = ()) -> None:
        super().__init__(fields, coordinator, peers)
        self._num_pages: int = fields["num_pages"]
        self._page_nbytes: int = fields["page_nbytes"]
        self._directory = Path(fields["directory"])
        self._seed: int = fields["seed"]
        self._files: PageFiles | None = None

    def open(self) -> Message:
        """Opens it; returns how long that took, and the resident memory that came with it."""
        nbytes = slot_heads.nbytes_of_pages(self._num_pages, self._page_nbytes)
        before, started = psutil.Process().memory_info().rss, time.perf_counter()
        self._files = PageFiles(str(self._directory), nbytes, [0])
        took_s = time.perf_counter() - started
        found = self._files.figures()["pages"]
        if found != self._num_pages:
            raise CheckFailedError(f"the files hold {self._num_pages} pages, and {found} were found")
        grown = psutil.Process().memory_info().rss - before
        return {"open_s": took_s, "nbytes_per_page": grown / self._num_pages}

    def look_up(self, num_keys: int, times: int) -> Message:
        """Looks for as many random pages at once, each time others; returns the milliseconds of each time."""
        assert self._files is not None
        keys = slot_heads.digests(self._num_pages, self._seed)
        chance = np.random.default_rng(self._seed)
        took_ms = []
        for _ in range(times):
            asked = keys[chance.integers(0, self._num_pages, num_keys)].tobytes()
            started = time.perf_counter_ns()
            there = self._files.look_up(asked, False)
            took_ms.append((time.perf_counter_ns() - started) / 1e6)
            if there != b"\1" * num_keys:
                raise CheckFailedError("a page that is there was not found")
        return {"took_ms": took_ms}

    async def aclose(self) -> None:
        if self._files is not None:
            self._files.close(10.0)
