import os
import socket
import threading

import pytest

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.run import memory
from kvxfer.bench.run.limit import LimitDestination, LimitSource, LimitSpec, limits_for, pages_within


def spec_of(*names: str) -> LimitSpec:
    return LimitSpec(names, page_nbytes=4096, num_pages=600, pattern="random", seed=3)


def ends_of(spec: LimitSpec) -> tuple[LimitSource, LimitDestination]:
    """Both ends in this process."""
    src_passed: list[int] = []
    dst_passed: list[int] = []
    if spec.is_shared:
        shared = memory.create_shared(spec.nbytes, "src")
        src_passed = [shared]
        dst_passed = [shared, memory.create_shared(spec.nbytes, "dst")]
    elif spec.is_stream:
        ours, theirs = socket.socketpair()
        src_passed, dst_passed = [ours.detach()], [theirs.detach()]
    descriptors = {*src_passed, *dst_passed}
    source = LimitSource(spec, lambda: src_passed.pop(0))
    address = source.address()["address"]
    destination = LimitDestination(spec, lambda: dst_passed.pop(0), os.getpid(), address)
    if not spec.is_stream:
        for descriptor in descriptors:
            os.close(descriptor)
    return source, destination


@pytest.mark.parametrize("name", ["shared-copy", "shared-copy-nt", "process-vm-readv"])
def test_copy_moves_every_page_to_its_place(name: str) -> None:
    source, destination = ends_of(spec_of(name))
    source.fill(iteration=5)
    destination.clear()
    assert destination.move(name)["elapsed_ns"] > 0
    destination.check(iteration=5)


def test_stream_moves_every_page_to_its_place() -> None:
    source, destination = ends_of(spec_of("unix-stream"))
    source.fill(iteration=5)
    destination.clear()
    sender = threading.Thread(target=source.send)
    sender.start()
    destination.move("unix-stream")
    sender.join()
    destination.check(iteration=5)
    source.close()
    destination.close()


def test_pages_of_another_iteration_fail_the_check() -> None:
    source, destination = ends_of(spec_of("shared-copy"))
    source.fill(iteration=5)
    destination.move("shared-copy")
    with pytest.raises(CheckFailedError, match="the limit shared-copy itself moved wrong bytes"):
        destination.check(iteration=6)


def test_each_transport_has_the_limit_of_its_kind() -> None:
    assert limits_for("shm", "pool")[0] == "shared-copy"
    assert limits_for("shm", "foreign") == ("process-vm-readv",)
    assert limits_for("tcp", "foreign") == ("tcp-stream",)
    with pytest.raises(BenchError, match="known are shm, unix, tcp"):
        limits_for("verbs", "pool")


def test_limit_stays_within_its_memory() -> None:
    assert pages_within(4096, 10, most_nbytes=1 << 20) == 10
    assert pages_within(4096, 10_000, most_nbytes=1 << 20) == 256
