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
