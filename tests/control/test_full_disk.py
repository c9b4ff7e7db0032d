"""A state folder on a disk that is really full: what goes on, what is refused, and what is told of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.control.serving import BOUND_S, program, reasons_of
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nsenter") is None, reason="only root mounts a small disk"
)


class SmallDisk:
    """A file system of some MiB, as the state folder of daemons, in a mount namespace of its own."""

    def __init__(self, holder: int, folder: Path) -> None:
        self.under = ("nsenter", "-t", str(holder), "-m", "--")
        self.state = Path(f"/proc/{holder}/root{folder}/state")

    def fill(self) -> None:
        """Takes all that is free, to the last block."""
        with (self.state / "ballast").open("ab", buffering=0) as file:
            for nbytes in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(nbytes))
                except OSError:
                    continue

    def free(self) -> None:
        (self.state / "ballast").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (tmp_path / "state").mkdir()
    mount = f"mount -t tmpfs -o size=48m,mode=700 none {tmp_path}/state && echo mounted && exec sleep 1000"
    holder = subprocess.Popen(["unshare", "-m", "sh", "-c", mount], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            pytest.skip("nothing can be mounted here")
        yield SmallDisk(holder.pid, tmp_path)
    finally:
        holder.kill()
        holder.communicate()


def admin(folder: Path) -> httpx.Client:
    """A client over the socket, which needs no token."""
    transport = httpx.HTTPTransport(uds=str(folder / "run/api.sock"))
    return httpx.Client(transport=transport, base_url="http://node", timeout=BOUND_S)


def test_revoking_and_draining_go_on_and_a_restart_keeps_them(tmp_path: Path, disk: SmallDisk) -> None:
    def refused(client: httpx.Client) -> None:
        answer = client.post("/v1/tokens", json={"name": "x"}, headers={"Idempotency-Key": "k"})
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable"), answer.text

    with program(tmp_path, under=disk.under) as daemon, admin(tmp_path) as client:
        ids = [client.post("/v1/tokens", json={"name": "victim"}).json()["id"] for _ in range(200)]
        disk.fill()
        refused(client)
        for id_ in ids[:100]:
            assert client.delete(f"/v1/tokens/{id_}").status_code == 200
        refused(client)
        assert client.put("/v1/drain", json={"deadline_s": 600.0}).json()["draining"]
        for method, path in (("DELETE", "/v1/leases/x"), ("POST", "/v1/transfers/x/cancel")):
            answer = client.request(method, path, headers={"Idempotency-Key": "k"})
            assert answer.status_code == 404, answer.text
        disk.fill()  # also what the reserve has left
        daemon.end(signal.SIGKILL)
    disk.fill()
    with program(tmp_path, under=disk.under) as daemon, admin(tmp_path) as client:
        refused(client)
        left = [each["id"] for each in client.get("/v1/tokens", params={"limit": 250}).json()["items"]]
        assert set(ids[100:]) <= set(left)
        assert not set(ids[:100]) & set(left)
        assert client.get("/v1/drain").json()["draining"]
        disk.free()
        assert client.post("/v1/tokens", json={"name": "x"}).status_code == 201
        assert client.delete("/v1/drain").status_code == 200
        disk.fill()  # the reserve was taken again
        refused(client)
        assert client.delete(f"/v1/tokens/{ids[100]}").status_code == 200
        assert daemon.end() == 0, daemon.said
    # A line that did not fit was written before the next ones.
    audit = [json.loads(line) for line in (disk.state / "audit.log").read_text().splitlines()]
    done = [line for line in audit if (line["what"], line["result"]) == ("revoke_token", "done")]
    assert len(done) == 101


def test_a_full_disk_is_a_reason_a_gauge_and_one_line_of_the_log(tmp_path: Path, disk: SmallDisk) -> None:
    with program(tmp_path, under=disk.under) as daemon, admin(tmp_path) as client:
        assert reasons_of(client) == set()
        disk.fill()
        for _ in range(3):
            answer = client.post("/v1/tokens", json={"name": "during"})
            assert (answer.status_code, answer.json()["code"]) == (503, "unavailable"), answer.text
        for path in ("/v1/node", "/v1/tokens", "/v1/transfers", "/healthz", "/v1/drain"):
            assert client.get(path).status_code == 200, path
        (reason,) = client.get("/readyz").json()["reasons"]
        assert reason.startswith("the audit log cannot be written")
        assert reasons_of(client) == {"audit-log"}
        disk.free()
        # Also if nobody asks for a change meanwhile.
        until(lambda: client.get("/readyz").status_code == 200, "it is not ready again")
        assert reasons_of(client) == set()
        assert client.put("/v1/drain", json={}).status_code == 200
        assert [each["name"] for each in client.get("/v1/tokens").json()["items"]] == ["admin"]
        assert reasons_of(client) == {"draining"}
        until(lambda: sum("not ready: it is draining" in line for line in daemon.said) == 1, "no line")
        told = [re.sub(r".* (WARNING|INFO) ", "", line.strip()) for line in daemon.said if "ready" in line]
        assert told == ["ready", f"not ready: {reason}", "ready", "not ready: it is draining"]


def test_the_first_start_on_a_full_disk_waits_for_room(tmp_path: Path, disk: SmallDisk) -> None:
    disk.fill()
    with program(tmp_path, under=disk.under), admin(tmp_path) as client:
        assert client.put("/v1/drain", json={}).status_code == 503
        assert client.get("/v1/tokens").json()["items"] == []
        disk.free()
        assert client.post("/v1/tokens", json={"name": "x"}).status_code == 201
        assert [each["name"] for each in client.get("/v1/tokens").json()["items"]] == ["x"]
