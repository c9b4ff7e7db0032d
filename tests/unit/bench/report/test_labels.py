import pytest

from kvxfer.bench.report.labels import beside_prefill, label


@pytest.mark.parametrize(
    ("figure", "words", "unit"),
    [
        ("total_ms.median", "total", "ms"),
        ("gb_per_s.median", "rate", "GB/s"),
        ("limit.gb_per_s", "limit, rate", "GB/s"),
        ("limit_nt_ratio", "ratio to the limit with non-temporal stores", ""),
        ("cpu_s_per_gib", "processor time", "s/GiB"),
        ("rss_mib.prefill", "resident memory, prefill", "MiB"),
        ("stages_ms.decode_may_start.p50", "decode may start, p50, from the end of prefill", "ms"),
        ("rows [peers 3] goodput_gb_per_s", "goodput, peers 3", "GB/s"),
        ("delays [name word, waited 1 ms] p50_us", "p50, delays, name word, waited 1 ms", "us"),
        ("systems kvxfer.ttft_ms.p50", "kvxfer, ttft, p50, systems", "ms"),
        ("wake_ups", "wake ups", ""),
    ],
)
def test_a_figure_has_words_and_a_unit(figure: str, words: str, unit: str) -> None:
    assert label(figure) == (words, unit)


@pytest.mark.parametrize(
    ("values", "words", "shown"),
    [
        ([-33.5, -32.0], "post, p50, before prefill ended", [33.5, 32.0]),
        ([0.0, 0.4], "post, p50, after prefill ended", [0.0, 0.4]),
        ([-0.1, 0.4], "post, p50, from the end of prefill", [-0.1, 0.4]),
    ],
)
def test_a_stage_has_a_sign_only_where_runs_lie_on_both_sides(
    values: list[float], words: str, shown: list[float]
) -> None:
    assert beside_prefill("stages_ms.post.p50", values) == (words, shown)
    assert beside_prefill("total_ms.median", values) == ("total", values)
