"""`kvxfer bench` over Soft-RoCE: every byte checked, beside perftest on the same device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.test_commands import HANDOVER, PAGES, check_figures, result_of

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine")]

VERBS = ["--transport", "verbs", "--device", "rxe0"]


def checked(*arguments: str) -> dict[str, Any]:
    result = result_of(*arguments, *VERBS)
    check_figures(result, "gb_per_s", "limit_ratio")
    assert result["limit"]["name"] == "ib-read-bw"
    return result


# Each takes a quarter of a minute in the emulated machine.
AT_NIGHT = [("read", 4), ("write", 64), ("write", 1024), ("read", 1024)]


@pytest.mark.parametrize(
    ("op", "block_kib"),
    [("write", 4), ("read", 64), *(pytest.param(*each, marks=pytest.mark.slow) for each in AT_NIGHT)],
)
def test_pages(op: str, block_kib: int) -> None:
    assert set(checked(*PAGES, "--op", op, "--block-kib", str(block_kib))["rails"]) == {"verbs"}


@pytest.mark.slow
def test_a_hundred_thousand_pages_in_one_transfer() -> None:
    result = checked("pages", "--total-mib", "391", "--block-kib", "4", "--iterations", "1")
    assert result["num_pages"] > 10**5


def test_handover() -> None:
    checked(*HANDOVER)
