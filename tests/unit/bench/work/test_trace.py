import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.errors import BenchError
from kvxfer.bench.work.trace import TraceRequest, find_trace, read_trace, scale

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]}


def write_jsonl(folder: Path, *records: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def write_csv(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_mooncake_lines_become_requests(tmp_path: Path) -> None:
    assert read_trace(write_jsonl(tmp_path, GOOD)) == [TraceRequest(1.5, 600, 7, (0, 3))]


def test_azure_rows_become_requests_with_arrivals_from_the_first(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:48.1805900,396,109",
    )
    first, second = read_trace(path)
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival_s == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["mooncake", "azure"])
def test_samples_are_carried(name: str) -> None:
    requests = read_trace(find_trace(name))
    assert len(requests) >= 32
    assert all(request.input_tokens > 0 for request in requests)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("not json", "trace.jsonl:2: not JSON"),
        ([1], "trace.jsonl:2: expected an object, found list"),
        ({**GOOD, "extra": 1}, "trace.jsonl:2: fields do not fit: unknown 'extra'"),
        (
            {k: v for k, v in GOOD.items() if k != "hash_ids"},
            "trace.jsonl:2: fields do not fit: missing 'hash_ids'",
        ),
        ({**GOOD, "input_length": "600"}, "trace.jsonl:2: field 'input_length': expected a whole number"),
        ({**GOOD, "input_length": True}, "field 'input_length': expected a whole number"),
        ({**GOOD, "input_length": 0}, "field 'input_length': expected at least 1"),
        ({**GOOD, "hash_ids": 5}, "field 'hash_ids': expected a list"),
        ({**GOOD, "hash_ids": [-1]}, "field 'hash_ids': expected at least 0"),
    ],
)
def test_wrong_line_is_named(tmp_path: Path, record: Any, words: str) -> None:
    with pytest.raises(BenchError) as caught:
        read_trace(write_jsonl(tmp_path, GOOD, record))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["TIMESTAMP,Tokens"],
            "header: fields do not fit: missing 'ContextTokens', 'GeneratedTokens'; unknown",
        ),
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1"],
            ":2: expected 3 fields",
        ),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,2"], ":2: field 'TIMESTAMP': expected a date"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,x,2"], "field 'ContextTokens'"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "holds no request"),
    ],
)
def test_wrong_row_is_named(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(BenchError) as caught:
        read_trace(write_csv(tmp_path, *lines))
    assert words in str(caught.value)


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="neither a file nor one of mooncake, azure"):
        find_trace("sharegpt")
    with pytest.raises(BenchError, match=r"ends in \.jsonl \(Mooncake\) or \.csv \(Azure\)"):
        read_trace(tmp_path / "trace.parquet")
    with pytest.raises(BenchError, match="holds 1 requests, fewer than --requests 2"):
        scale([TraceRequest(0, 10, 1)], 2, 100)


def test_lengths_are_scaled_by_one_factor_to_the_longest_and_never_stretched() -> None:
    requests = [TraceRequest(0, 1000, 10), TraceRequest(1, 4000, 20), TraceRequest(2, 1, 1)]
    assert [r.input_tokens for r in scale(requests, 3, 2000)] == [500, 2000, 1]
    assert scale([TraceRequest(0, 10, 1)], 1, 2000)[0].input_tokens == 10
