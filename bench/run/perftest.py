"""``ib_read_bw`` of perftest, where it is installed: READs of one size on one device, and nothing of ours."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Annotated, Final

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.options import Option

_COMMAND: Final = "ib_read_bw"
# As many as the transport has for a peer.
_NUM_PAIRS: Final = 4
_LEAST: Final = 5  # perftest takes no fewer
_MOST: Final = 20_000
_LIMIT_S: Final = 60.0
_ATTEMPTS: Final = 3
_REFUSED: Final = "Couldn't connect"
_DEVICES: Final = Path("/sys/class/infiniband")


Device = Annotated[
    str, Option("RDMA device for verbs, used by both ends; the default is the first active one.")
]


def require_device(transport: str, device: str) -> None:
    """Raises `BenchError` where a device is named that nothing goes over, or none is there."""
    if device and transport != "verbs":
        raise BenchError(f"--device needs --transport verbs, not {transport}")
    if transport == "verbs" and not device_of(transport, device):
        raise BenchError("this host has no RDMA device with an active port (`kvxfer doctor` says more)")


def device_of(transport: str, device: str) -> str:
    """Returns which device `transport` uses; "" for none."""
    return "" if transport != "verbs" else device or _first_device()


def is_installed() -> bool:
    """Whether there is one to run."""
    return shutil.which(_COMMAND) is not None


def read_rate(device: str, nbytes: int, count: int) -> float:
    """Returns GB/s of so many READs of `nbytes` between two processes of this host, on one device.

    Raises
    ------
    BenchError
        With the last words of either process.
    """
    # Of a few READs on an emulated device that others keep from the processor it has said 0.
    for _ in range(_ATTEMPTS):
        if (rate := _read_rate(device, nbytes, count)) > 0:
            return rate
    raise BenchError(f"{_COMMAND} measured 0 Gb/s {_ATTEMPTS} times: does another process use {device}?")


def _read_rate(device: str, nbytes: int, count: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(_COMMAND, "-d", device, "-p", str(port), "-s", str(nbytes), "-q", str(_NUM_PAIRS)),
        *("-n", str(min(max(count, _LEAST), _MOST)), "-F", "--report_gbits", "--output=bandwidth"),
    ]
    words = " ".join(command)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            # Refused as long as the server does not listen.
            give_up_at = time.monotonic() + _LIMIT_S
            while (client := _client(command)).returncode and _REFUSED in client.stdout:
                if server.poll() is not None or time.monotonic() > give_up_at:
                    break
                time.sleep(0.05)
            return float(client.stdout.split()[-1]) / 8
        except subprocess.TimeoutExpired:
            raise BenchError(f"{words} took more than {_LIMIT_S:g} s") from None
        except (ValueError, IndexError):
            server.kill()
            said = f"{client.stdout.strip()[-500:]} {server.communicate()[0].strip()[-500:]}"
            raise BenchError(f"{words} failed: {said.strip()}") from None
        finally:
            server.kill()


def _client(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def _first_device() -> str:
    for device in sorted(_DEVICES.glob("*")):
        if any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state")):
            return device.name
    return ""
