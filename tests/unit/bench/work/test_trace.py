import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.errors import BenchError
from kvxfer.bench.work.trace import TraceRequest, find_trace, read_trace, scale

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]}


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_lines_become_requests(tmp_path: Path) -> None:
    mooncake, azure = tmp_path / "trace.jsonl", tmp_path / "trace.csv"
    mooncake.write_text(json.dumps(GOOD) + "\n")
    assert read_trace(mooncake) == [TraceRequest(1.5, 600, 7, (0, 3))]
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,396,109\n"
    azure.write_text(f"# a licence\n{HEADER}\n{rows}")
    first, second = read_trace(azure)
    assert (first.input_tokens, first.output_tokens, first.prefix_ids) == (374, 44, ())
    assert second.arrival_s - first.arrival_s == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["mooncake", "azure"])
def test_samples_are_carried(name: str) -> None:
    requests = read_trace(find_trace(name))
    assert len(requests) >= 32
    assert all(request.input_tokens > 0 for request in requests)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("not json", "JSONDecodeError"),
        ([1], "TypeError"),
        ({"timestamp": 0, "input_length": 1, "output_length": 1}, "KeyError: 'hash_ids'"),
        *(
            ({**GOOD, **wrong}, "expected whole numbers")
            for wrong in (
                {"input_length": "6"},
                {"input_length": True},
                {"input_length": 0},
                {"hash_ids": [-1]},
            )
        ),
    ],
)
def test_wrong_line_is_named(tmp_path: Path, record: Any, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{record if isinstance(record, str) else json.dumps(record)}\n")
    with pytest.raises(BenchError, match=r"trace\.jsonl:2: no \.jsonl request: ") as caught:
        read_trace(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("row", ["2023-11-16 18:15:46,1", "noon,1,2", "2023-11-16 18:15:46,x,2"])
def test_wrong_row_is_named(tmp_path: Path, row: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}\n{row}\n")
    with pytest.raises(BenchError, match=r"trace\.csv:2: no \.csv request: ValueError"):
        read_trace(path)


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="neither a file nor one of mooncake, azure"):
        find_trace("sharegpt")
    with pytest.raises(BenchError, match=r"ends in \.jsonl \(Mooncake\) or \.csv \(Azure\)"):
        read_trace(tmp_path / "trace.parquet")
    (tmp_path / "trace.csv").write_text(HEADER)
    with pytest.raises(BenchError, match="holds no request"):
        read_trace(tmp_path / "trace.csv")
    with pytest.raises(BenchError, match="holds 1 requests, fewer than --requests 2"):
        scale([TraceRequest(0, 10, 1)], 2, 100)


def test_lengths_are_scaled_by_one_factor_to_the_longest_and_never_stretched() -> None:
    requests = [TraceRequest(0, 1000, 10), TraceRequest(1, 4000, 20), TraceRequest(2, 1, 1)]
    assert [r.input_tokens for r in scale(requests, 3, 2000)] == [500, 2000, 1]
    assert scale([TraceRequest(0, 10, 1)], 1, 2000)[0].input_tokens == 10
