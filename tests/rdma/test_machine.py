"""The RDMA machine itself: two devices that carry RoCE v2 over one link, and faults that can be injected."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import pytest

from tests.rdma import links
from tests.rdma.image import find_image
from tests.rdma.links import RXE0, RXE1, Device

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine")]

#: The interpreter of the distribution, which has pyverbs.
PYTHON: Final = "/usr/bin/python3"
QUEUE_PAIRS: Final = Path(__file__).with_name("queue_pairs.py")
both_devices = pytest.mark.parametrize("device", [RXE0, RXE1], ids=["rxe0", "rxe1"])


def called(*command: str) -> str:
    """Returns what a command printed. A command that fails makes the test fail, and its output is shown."""
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert ended.returncode == 0, f"{command}: {ended.stdout}"
    return ended.stdout


@contextmanager
def started(ready: re.Pattern[str], *command: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a command and waits until it has printed a line that says it is ready."""
    with subprocess.Popen(
        ("stdbuf", "--output=L", *command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert any(ready.search(line) for line in process.stdout), f"{command} ended before it was ready"
            yield process
        finally:
            process.kill()


@both_devices
def test_a_device_is_active_with_the_address_of_its_end(device: Device) -> None:
    assert device.state() == "4: ACTIVE"
    first, second, third, last = (f"{int(part):02x}" for part in device.address.split("."))
    assert device.gid(device.gid_index) == f"0000:0000:0000:0000:0000:ffff:{first}{second}:{third}{last}"
    assert device.gid_type(device.gid_index) == "RoCE v2"


#: A server that listens on rxe0, the line in which it says so, and its client on rxe1.
PROGRAMS: Final = {
    "send": (
        r"GID",
        "ibv_rc_pingpong -d {0} -g 1 -s 65536 -n 20",
        "ibv_rc_pingpong -d {1} -g 1 -s 65536 -n 20 {2}",
    ),
    "write": (
        r"Waiting",
        "ib_write_bw -d {0} -x 1 -s 65536 -n 20",
        "ib_write_bw -d {1} -x 1 -s 65536 -n 20 {2}",
    ),
    "read": (
        r"Waiting",
        "ib_read_bw -d {0} -x 1 -s 65536 -n 20",
        "ib_read_bw -d {1} -x 1 -s 65536 -n 20 {2}",
    ),
    "rdma_cm": (r"bind_addr", "rping -s -d -a {2} -C 5", "rping -c -a {2} -I {3} -C 5 -v"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_distributions_programs_move_bytes_over_the_link(kind: str) -> None:
    ready, *commands = PROGRAMS[kind]
    server, client = (
        command.format(RXE0.name, RXE1.name, RXE0.address, RXE1.address).split() for command in commands
    )
    before = RXE0.sent_nbytes() + RXE1.sent_nbytes()
    with started(re.compile(ready), *server) as process:
        called(*client)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    assert RXE0.sent_nbytes() + RXE1.sent_nbytes() - before > (1000 if kind == "rdma_cm" else 20 * 65536)


@pytest.mark.parametrize(
    ("work", "fault", "device", "status"),
    [
        ("read", nullcontext, None, "SUCCESS"),
        ("write", nullcontext, None, "SUCCESS"),
        ("read-other-key", nullcontext, None, "REM_ACCESS_ERR"),
        ("write-other-key", nullcontext, None, "REM_ACCESS_ERR"),
        ("read-beyond", nullcontext, None, "REM_ACCESS_ERR"),
        ("write-beyond", nullcontext, None, "REM_ACCESS_ERR"),
        ("read", links.disordered, RXE1, "SUCCESS"),
        ("write", links.disordered, RXE0, "SUCCESS"),
        ("read", links.lossy, RXE0, "RETRY_EXC_ERR"),
        ("write", links.lossy, RXE0, "RETRY_EXC_ERR"),
        ("read", links.lossy, RXE1, "RETRY_EXC_ERR"),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", value)),
)
def test_work_ends_as_on_hardware(
    work: str,
    fault: Callable[[Any], AbstractContextManager[None]],
    device: Device | None,
    status: str,
    seed: int,
) -> None:
    before = links.faults_seen()
    with fault(device):
        printed = called(PYTHON, str(QUEUE_PAIRS), work, str(seed))
    assert printed.splitlines() == [status, "bytes as expected"]
    if fault is links.disordered:  # 20 of 1,024 packets on average: no run in 10**9 has none
        assert links.faults_seen() > before


@both_devices
def test_a_link_that_goes_down_and_up_is_told_to_the_application(device: Device) -> None:
    with started(re.compile("async event FD"), "ibv_asyncwatch", "-d", device.name) as watch:
        assert watch.stdout is not None
        with links.down(RXE0):
            assert any("IBV_EVENT_PORT_ERR" in line for line in watch.stdout)
        assert any("IBV_EVENT_PORT_ACTIVE" in line for line in watch.stdout)


def test_the_mtu_of_the_interface_is_the_ports() -> None:
    def active() -> list[str]:
        return re.findall(r"active_mtu:\s+(\d+)", called("ibv_devinfo", "-d", RXE0.name))

    assert active() == ["4096"]
    with links.mtu(RXE0, 1500):
        assert active() == ["1024"]
    assert active() == ["4096"]


def test_a_small_memlock_limit_refuses_what_no_limit_allows(seed: int) -> None:
    command = (PYTHON, str(QUEUE_PAIRS), "read", str(seed))
    assert called("bash", "-c", "ulimit -l").strip() == "unlimited"
    called(*command)
    limited = subprocess.run(links.with_memlock(4096, *command), capture_output=True, text=True, timeout=120)
    assert limited.returncode != 0
    assert "Cannot allocate memory" in limited.stderr


#: rdma-core's own tests of what a transport uses.
SUITES: Final = (
    "addr",
    "cq",
    "cq_events",
    "cqex",
    "device",
    "mr",
    "pd",
    "qp",
    "qpex",
    "rdmacm",
    "relaxed_ordering",
)
#: Tests that do not pass with this kernel and rdma-core, and why.
KNOWN: Final = {
    "test_qpex.QpExTestCase.test_qp_ex_rc_atomic_write": "rxe of Linux 6.1 has no atomic write",
}


def test_rdma_cores_own_tests_pass() -> None:
    folder = find_image().rdma_core_tests
    ended = subprocess.run(
        [
            PYTHON,
            "run_tests.py",
            "--dev",
            RXE0.name,
            "--gid",
            "1",
            "-v",
            *(f"test_{suite}" for suite in SUITES),
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    failed = set(re.findall(r"^(?:FAIL|ERROR): \S+ \(tests\.(\S+)\)$", ended.stdout, re.MULTILINE))
    assert failed == set(KNOWN), ended.stdout
    assert len(re.findall(r"\.\.\. ok$", ended.stdout, re.MULTILINE)) > 50, ended.stdout
