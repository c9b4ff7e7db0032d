"""Files that other programs read, held to those programs' own schemas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("check_jsonschema", reason="no schemas: `make test-deploy` fetches them")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (("--builtin-schema", "vendor.compose-spec"), "deploy/compose/compose.yaml"),
        (("--builtin-schema", "vendor.github-workflows"), ".github/workflows/release.yml"),
        (("--check-metaschema",), "deploy/chart/values.schema.json"),
    ],
    ids=lambda each: Path(each).name if isinstance(each, str) else each[-1],
)
def test_it_is_as_its_schema_has_it(tmp_path: Path, schema: tuple[str, ...], path: str) -> None:
    def check(file: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "check_jsonschema", *schema, str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    done = check(ROOT / path)
    assert done.returncode == 0, done.stdout + done.stderr
    # And one that is not is found.
    wrong = tmp_path / Path(path).name
    wrong.write_text((ROOT / path).read_text().replace("services:", "servces:").replace("jobs:", "job:"))
    if wrong.suffix == ".json":
        wrong.write_text('{"type": "objekt"}')
    assert check(wrong).returncode == 1
