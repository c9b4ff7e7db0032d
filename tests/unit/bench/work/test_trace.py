import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.errors import BenchError
from kvxfer.bench.work.trace import TraceRequest, read_trace, scale

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]}


def test_lines_become_requests(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(json.dumps(GOOD) + "\n")
    assert read_trace(str(tmp_path / "trace.jsonl")) == [TraceRequest(600, 7)]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("not json", "JSONDecodeError"),
        ([1], "TypeError"),
        ({"input_length": 1}, "KeyError: 'output_length'"),
        ({**GOOD, "input_length": "six"}, "ValueError"),
    ],
)
def test_wrong_line_is_named(tmp_path: Path, record: Any, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{record if isinstance(record, str) else json.dumps(record)}\n")
    with pytest.raises(BenchError, match=r"trace\.jsonl:2: not a request: ") as caught:
        read_trace(str(path))
    assert words in str(caught.value)


def test_lengths_are_scaled_by_one_factor_to_the_longest_and_never_stretched() -> None:
    requests = [TraceRequest(1000, 10), TraceRequest(4000, 20), TraceRequest(1, 1)]
    assert [one.input_tokens for one in scale(requests, 3, 2000)] == [500, 2000, 1]
    assert scale([TraceRequest(10, 1)], 1, 2000)[0].input_tokens == 10
