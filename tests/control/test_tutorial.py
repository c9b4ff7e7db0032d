"""docs/daemon-tutorial.md works when it is pasted: its blocks run in one bash, in order."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="kvxfer[cli] is not installed")

from tests.unit.test_documents import ROOT

DOCUMENT = ROOT / "docs/daemon-tutorial.md"
MARK = "-- what a block printed ends here --"
BOUND_S = 250.0
PROGRAMS = Path(sys.executable).parent


def blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)


def free_ports() -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return [str(each.getsockname()[1]) for each in (one, other)]


@contextmanager
def short_folder() -> Iterator[Path]:
    """A path short enough for a unix socket's name, which pytest's folders may not be."""
    with tempfile.TemporaryDirectory(prefix="tutorial-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def paste(folder: Path) -> tuple[int, list[str], str]:
    """Sends the blocks to a bash; returns its status, what each block printed, and its errors."""
    port_a, port_b = free_ports()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    with subprocess.Popen(
        ["bash"],
        cwd=folder,
        env={
            **kept,
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
            "TUTORIAL_DIR": str(folder / "t"),
            "PORT_A": port_a,
            "PORT_B": port_b,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as bash:
        try:
            out, errors = bash.communicate(
                "".join(f"{block}\necho '{MARK}'\n" for block in blocks()), BOUND_S
            )
            with pytest.raises(ProcessLookupError):  # it has ended all that it started
                os.killpg(bash.pid, 0)
        finally:
            try:
                os.killpg(bash.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            bash.wait(BOUND_S)
    return bash.returncode, out.split(MARK), errors


@pytest.mark.skipif(
    not all((shutil.which("bash"), shutil.which("curl"), (PROGRAMS / "kvxfer").exists())),
    reason="bash, curl, or the command kvxfer is not installed",
)
def test_the_tutorial_works_as_it_is_pasted() -> None:
    with short_folder() as folder:
        status, printed, errors = paste(folder)
        assert not (folder / "t").exists()
    assert (status, errors) == (0, ""), printed
    serving, _, parked, fetched, moved, looked, stopped, rest = (text.strip() for text in printed)
    assert " INFO ready\n" in f"{serving}\n"
    assert [page["state"] for page in json.loads(parked.splitlines()[0])["pages"]] == ["parked", "parked"]
    assert [line.split()[0] for line in parked.splitlines()[2:]] == ["0-x", "0-y", "1-x", "1-y"]
    assert fetched == told("decode-0 has"), "the document shows what is printed"
    assert moved.endswith(told("handed over as memory/receiver@b"))
    words = looked.split()
    for agent in ("daemon/a", "prefill-0", "prefill-1", "daemon/b", "decode-0", "decode-1"):
        assert agent in words
    read = next(json.loads(line) for line in looked.splitlines() if line.startswith("{"))
    assert (read["context"], read["state"], read["num_blocks"]) == ("decode-0", "done", 2)
    assert looked.endswith("<title>kvxfer</title>")
    assert (stopped, rest) == ("", "")


def told(start: str) -> str:
    """Returns the block of expected output with this beginning."""
    found = re.search(rf"^```\n({re.escape(start)}.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, start
    return found[1].strip()
