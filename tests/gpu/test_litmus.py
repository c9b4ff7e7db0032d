"""The litmus test on a GPU: words that kernels, this host and streams pass to each other arrive unchanged."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 2000


def test_nothing_overtakes_the_words_that_tell_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    from kvxfer.bench.gpu import litmus as gpu_litmus

    fenced, unfenced = gpu_litmus.run(0, NUM_ROUNDS)
    # Without fences a GPU may be right or wrong, so this is printed and not asserted.
    with capsys.disabled():
        print(f" {unfenced.num_wrong} words wrong without fences ", end="")
    assert (fenced.at_host, fenced.at_stream, fenced.of_host) == (0, 0, 0)
    assert fenced.num_rounds == NUM_ROUNDS
