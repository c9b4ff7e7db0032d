import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvxfer.bench.report import noise
from kvxfer.bench.report.noise import Sample


def process(proc: Path, pid: int, parent: int, *times: int, name: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    fields = ["S", str(parent), *["0"] * 9, *map(str, times), *["0"] * 30]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def machine(proc: Path, *ticks: int) -> None:
    proc.mkdir(parents=True, exist_ok=True)
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, ticks))} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")


def test_own_tree_is_not_noise_and_interrupts_are_nobodys(tmp_path: Path) -> None:
    machine(tmp_path, 1000, 0, 0, 5000, 0, 0, 0, 10)
    process(tmp_path, 50, 1, 100, 0, 0, 0)
    before = Sample.take(tmp_path, pid=50)
    # Of 1000 ticks: 500 user, 100 system, 50 softirq, 40 steal, 310 idle.
    machine(tmp_path, 1500, 0, 100, 5310, 0, 0, 50, 50)
    process(tmp_path, 50, 1, 200, 50, 60, 40)  # itself 150 more, and 100 of a child that ended
    process(tmp_path, 51, 50, 100, 0, 0, 0, name="a) b (c")  # a living child
    process(tmp_path, 52, 51, 20, 0, 0, 0)  # and its own
    process(tmp_path, 99, 1, 700, 0, 0, 0)  # a neighbour
    found = noise.between(before, Sample.take(tmp_path, pid=50))
    assert found is not None
    assert found["own_share"] == pytest.approx(0.37)
    assert found["other_share"] == pytest.approx(0.23)
    assert found["steal_share"] == pytest.approx(0.04)


def test_words_come_only_above_a_few_percent() -> None:
    quiet = {"wall_s": 1.0, "own_share": 0.9, "other_share": 0.02, "steal_share": 0.01}
    assert noise.in_words(quiet) == ""
    assert noise.in_words(None) == ""
    assert "other processes used 45%" in noise.in_words({**quiet, "other_share": 0.45})
    assert "hypervisor took 12%" in noise.in_words({**quiet, "steal_share": 0.12})


def test_machine_that_shows_nothing_is_not_called_quiet(tmp_path: Path) -> None:
    assert Sample.take(tmp_path) is None
    assert noise.between(None, Sample.take()) is None


def test_real_counters_give_own_work_to_this_tree() -> None:
    before = Sample.take()
    assert before is not None
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = Sample.take()
    assert after is not None
    # 0.3 s of an ended child; a tick is lost to rounding at each end of each sum.
    assert (after.own_ticks - before.own_ticks) / os.sysconf("SC_CLK_TCK") >= 0.25
    found = noise.between(before, after)
    assert found is not None
    assert 0 < found["own_share"] <= 1
    assert found["wall_s"] <= time.monotonic() - before.at_s + 1e-3
