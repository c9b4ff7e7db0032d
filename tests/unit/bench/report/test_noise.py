import subprocess
import sys
import time

from kvxfer.bench.report import noise
from kvxfer.bench.report.noise import Sample


def test_own_tree_is_not_noise_and_interrupts_are_nobodys() -> None:
    before = Sample(1.0, work_s=100.0, steal_s=1.0, total_s=1000.0, own_s=10.0)
    # Of 10 s more: 6 of work, 3.7 of them our own, 0.4 stolen.
    found = noise.between(before, Sample(6.0, work_s=106.0, steal_s=1.4, total_s=1010.0, own_s=13.7))
    assert found == {"wall_s": 5.0, "own_share": 0.37, "other_share": 0.23, "steal_share": 0.04}
    assert noise.between(before, before) is None


def test_words_come_only_above_a_few_percent() -> None:
    quiet = {"wall_s": 1.0, "own_share": 0.9, "other_share": 0.02, "steal_share": 0.01}
    assert noise.in_words(quiet) == noise.in_words(None) == ""
    assert "other processes used 45%" in noise.in_words({**quiet, "other_share": 0.45})
    assert "hypervisor took 12%" in noise.in_words({**quiet, "steal_share": 0.12})


def test_real_counters_give_own_work_to_this_tree() -> None:
    before = Sample.take()
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = Sample.take()
    # 0.3 s of an ended child; a tick is lost to rounding at each end of each sum.
    assert after.own_s - before.own_s >= 0.25
    found = noise.between(before, after)
    assert found is not None
    assert 0 < found["own_share"] <= 1
    assert found["wall_s"] <= time.monotonic() - before.at_s + 1e-3
