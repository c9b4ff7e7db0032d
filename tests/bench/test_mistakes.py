"""What is wrong on a command line is one line on stderr and status 2, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer", reason="kvxfer[cli] is not installed")

from kvxfer import cli

BAD_TRACE = '{"timestamp": 0, "input_length": 5}\n'
PEER = "doctor --peer 127.0.0.1:7301"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench pages --out FILE", "is a file; name a directory"),
        ("bench handover --trace FILE", "trace.jsonl:1: not a request: KeyError: 'output_length'"),
        ("bench pages --src-layout tp4+nhdx --dst-layout tp2", "unknown name 'nhdx' in the layout"),
        ("bench pages --dst-layout tp2", "--src-layout is missing"),
        ("bench pages --copy-threads 1,two", "--copy-threads takes numbers separated by commas"),
        ("bench scale --series peers,elephants", "unknown --series 'elephants'; known are transfers"),
        ("bench handover --model GPT-2", "unknown model 'GPT-2'; known are Llama-3.1-8B"),
        ("bench compare --against ucx", "unknown --against 'ucx'; known are nixl, mooncake"),
        ("doctor --require shm,nvlink", "--require: unknown transport 'nvlink'; known are loopback,"),
        ("doctor --peer decode-0", """--peer is 'tcp://decode-0': write "tcp://host:port\""""),
        (f"{PEER} --transports pigeon", "--transports: unknown transport 'pigeon'"),
        (f"{PEER} --timeout-s 0", "--timeout-s must be a positive number of seconds"),
        (f"{PEER} --timeout-s nan", "--timeout-s must be a positive number of seconds"),
        (f"{PEER} --measure-s 0", "--measure-s must be above 0"),
        (f"{PEER} --serve", "--peer cannot be combined with --serve"),
        ("doctor --serve --problems", "--problems cannot be combined with --serve"),
        ("doctor --serve --transports pigeon", "--transports: unknown transport 'pigeon'"),
        ("doctor --serve --listen tcp://0.0.0.0:0", "--listen tcp://0.0.0.0:0 without a secret"),
        ("doctor --serve --listen 7301", "--listen is 'tcp://7301': write"),
        ("doctor --listen tcp://127.0.0.1:0", "--listen is for --serve: add --serve"),
        ("doctor --transports tcp", "--transports is for --peer and --serve: add one"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    command: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("KVXFER_SECRET", raising=False)
    (tmp_path / "trace.jsonl").write_text(BAD_TRACE)
    assert cli.main(command.replace("FILE", str(tmp_path / "trace.jsonl")).split()) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert "option " not in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
