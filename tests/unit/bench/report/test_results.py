import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import results

RESULT = {"bench": "pages", "gb_per_s": 3.0}
NOISE = {"wall_s": 1.0, "own_share": 0.5, "other_share": 0.0, "steal_share": 0.0}


def lines(folder: Path) -> list[str]:
    return (folder / results.FILE_NAME).read_text().splitlines()


def test_what_is_kept_is_read_with_machine_time_and_noise(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    results.keep(folder, RESULT, NOISE)
    results.keep(folder, {**RESULT, "gb_per_s": 4.0}, None)
    found = results.read(folder)
    assert [record.result["gb_per_s"] for record in found.records] == [3.0, 4.0]
    assert [record.noise for record in found.records] == [NOISE, None]
    assert found.records[0].machine["cores"] == os.cpu_count()
    assert found.records[0].time.endswith("+00:00")
    assert found.warnings == []
    assert results.read(folder / results.FILE_NAME) == found


def test_line_that_was_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    results.keep(tmp_path, RESULT, None)
    whole = (tmp_path / results.FILE_NAME).read_bytes()
    (tmp_path / results.FILE_NAME).write_bytes(whole + whole[: len(whole) // 2])
    found = results.read(tmp_path)
    assert len(found.records) == 1
    assert found.warnings[0].startswith(f"{tmp_path / results.FILE_NAME}:2: left out: not JSON")


@pytest.mark.parametrize("change", [{"version": 2}, {"weather": "fine"}, {"result": {"gb_per_s": 1}}])
def test_record_that_does_not_fit_is_left_out_in_words(tmp_path: Path, change: dict[str, Any]) -> None:
    results.keep(tmp_path, RESULT, None)
    record = json.loads(lines(tmp_path)[0])
    with (tmp_path / results.FILE_NAME).open("a") as file:
        file.write(json.dumps({**record, **change}) + "\n")
    found = results.read(tmp_path)
    assert len(found.records) == 1
    assert "not a record of version 1: use the kvxfer that wrote it" in found.warnings[0]


def test_what_holds_no_results_says_why_and_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"there are no results; .* --out "):
        results.read(tmp_path)
    (tmp_path / results.FILE_NAME).write_text('{"version": 1, "result": {}}\n')
    words = r"has no usable result.*not a record of version 1"
    with pytest.raises(BenchError, match=words):
        results.read(tmp_path)


def test_directory_that_cannot_be_is_refused_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BenchError, match="is a file; name a directory"):
        results.check_directory(file / "below")
    with pytest.raises(BenchError, match="cannot be written"):
        results.keep(file / "below", RESULT, None)
    results.check_directory(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()


def test_processes_that_end_together_do_not_mix_their_lines(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from kvxfer.bench.report import results\n"
        "for i in range(5): results.keep(Path(sys.argv[1]), {'bench': 'x', 'fill': 'y' * 20000}, None)"
    )
    writers = [subprocess.Popen([sys.executable, "-P", "-c", program, str(tmp_path)]) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = results.read(tmp_path)
    assert (len(found.records), found.warnings) == (15, [])
