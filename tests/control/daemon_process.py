"""A daemon's end of the link in a process of its own, to be stopped and killed.

It prints a line once it listens, and for each line that it reads one JSON object: of each agent by name, how
many records came, and some of what it told.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Self

from kvxfer.control.agents.agent_links import AgentLinks
from kvxfer.control.agents.attached import Attached
from kvxfer.session.records import Record
from tests.fork_server import Forked


async def serve(folder: Path) -> None:
    records: Counter[str] = Counter()

    def count(attached: Attached, told: list[Record]) -> None:
        records[attached.name] += len(told)

    links = AgentLinks(folder, on_records=count, on_change=lambda attached, changed: None)
    await links.start()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        told = {
            attached.name: {
                "records": records[attached.name],
                "dropped": attached.records_dropped,
                "regions": attached.num_regions,
                "peers": attached.num_peers,
                "draining": attached.draining,
            }
            for attached in links.agents.values()
        }
        print(json.dumps(told), flush=True)
    await links.aclose()


class DaemonProcess:
    """Such a process."""

    def __init__(self, folder: Path) -> None:
        program = "from tests.control import daemon_process; daemon_process.main()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        engine = "tests.control.forked"
        self._process = Forked(program, os.fspath(folder), engine=engine, **pipes, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def told(self) -> dict[str, dict[str, Any]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, dict[str, Any]] = json.loads(self._process.stdout.readline())
        return found

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def rss_nbytes(self) -> int:
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    asyncio.run(serve(Path(sys.argv[1])))
