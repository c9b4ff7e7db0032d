import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvxfer.bench.run.counters import EVENTS, Counters

# It has a thread before it is counted, and starts another one for each line that it reads.
BUSY = """
import sys, threading
def work():
    for _ in range(10**6): pass
stays = threading.Event()
threading.Thread(target=stays.wait, daemon=True).start()
print(flush=True)
for _ in sys.stdin:
    each = threading.Thread(target=work)
    each.start()
    each.join()
    print(flush=True)
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_what_a_process_does_within_the_block_is_counted_or_it_is_said_why_not(
    busy: subprocess.Popen[bytes],
) -> None:
    counted = Counters()

    def work() -> None:
        assert busy.stdin is not None
        assert busy.stdout is not None
        busy.stdin.write(b"\n")
        busy.stdin.flush()
        busy.stdout.readline()

    work()
    for _ in range(2):
        with counted.counting(busy.pid):
            work()
    figures = counted.figures(2)
    assert not figures.keys() & counted.not_counted.keys()
    assert {*figures, *counted.not_counted} == set(EVENTS)
    # A million rounds of a loop in a thread that did not exist when counting began.
    least = {"processor_us": 0, "switches": 0, "cycles": 10**6, "instructions": 10**6}
    for name, figure in figures.items():
        assert figure > least[name]
    counted.forget()
    with counted.counting(busy.pid):
        pass
    assert counted.figures(1).get("instructions", 0) < 10**6
