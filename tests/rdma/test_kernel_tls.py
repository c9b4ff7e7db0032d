"""Pages over tcp that the kernel encrypts. This machine has the module tls, which test hosts may lack."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from kvxfer._native import kernel_tls
from tests.bench.test_commands import PAGES, check_figures, result_of
from tests.certificates import Authority
from tests.fault.node import Node

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine")]

Kernel = Literal["auto", "always", "never"]


def num_sockets() -> tuple[int, int]:
    """Returns the number of sockets that the kernel has encrypted, and the number that it has decrypted."""
    counts = dict(line.split() for line in Path("/proc/net/tls_stat").read_text().splitlines())
    return int(counts["TlsTxSw"]), int(counts["TlsRxSw"])


@pytest.mark.parametrize(
    ("here", "there"), [("always", "always"), ("always", "never"), ("never", "always"), ("auto", "auto")]
)
def test_every_byte_arrives_whoever_encrypts(tmp_path: Path, here: Kernel, there: Kernel) -> None:
    authority = Authority(tmp_path)
    offer, why = kernel_tls()
    assert offer != "nothing", why
    before = num_sockets()
    ours, theirs = (
        replace(authority.issue(f"kvxfer://acme/test/{name}"), kernel=kernel)
        for name, kernel in (("here", here), ("there", there))
    )
    with closing(Node("here", "tcp", tls=ours)) as reader, closing(Node("there", "tcp", tls=theirs)) as owner:
        owner.fill(3)
        reader.set(0)
        reader.connect(owner.address())
        owner.accept("here")
        owner.grant("read")
        for _ in range(3):
            reader.read()
            assert reader.end() is None
        assert reader.holds(3)
        by_kernel = {"always", "auto"} if offer == "new-keys" else {"always"}
        count = sum(kernel in by_kernel for kernel in (here, there))
        num_sent, num_received = (now - then for now, then in zip(num_sockets(), before, strict=True))
        assert num_sent == num_received
        # Each rail is a socket at either end.
        assert (num_sent > 0) == (count > 0)
        assert num_sent % max(count, 1) == 0


@pytest.mark.slow
def test_the_benchmark_has_both() -> None:
    result = result_of(*PAGES, "--transport", "tcp", "--tls")
    for who in ("tls", "kernel_tls"):
        check_figures(result, f"{who}_gb_s", f"{who}_ratio", f"{who}_cpu_s_per_gib")
