"""A state folder on a disk that is really full: what is taken back goes on, and the daemon starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.control.serving import BOUND_S, program

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


def test_the_first_start_on_a_full_disk_waits_for_room(tmp_path: Path, disk: SmallDisk) -> None:
    disk.fill()
    with program(tmp_path, under=disk.under), admin(tmp_path) as client:
        assert client.put("/v1/drain", json={}).status_code == 503
        assert client.get("/v1/tokens").json()["items"] == []
        disk.free()
        assert client.post("/v1/tokens", json={"name": "x"}).status_code == 201
        assert [each["name"] for each in client.get("/v1/tokens").json()["items"]] == ["x"]
