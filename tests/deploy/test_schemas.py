"""Files that other programs read, checked against those programs' own schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    # And a wrong one is found.
    wrong = tmp_path / Path(path).name
    wrong.write_text((ROOT / path).read_text().replace("services:", "servces:").replace("jobs:", "job:"))
    if wrong.suffix == ".json":
        wrong.write_text('{"type": "objekt"}')
    assert check(wrong).returncode == 1


def test_grafana_knows_each_field_of_the_dashboard() -> None:
    """Reads by Grafana's own models and writes again: unknown fields are lost."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()

    def read(dashboard: Any) -> Any:
        return json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(dashboard)))

    told = json.loads((ROOT / "deploy/grafana/kvxfer.json").read_text())
    # Of the data source's own annotations, for which the models have no type.
    assert set(lost(told, read(told))) == {"titleFormat", "textFormat"}
    told["panels"][1]["fieldConfig"]["defaults"]["unitt"] = "s"
    assert "unitt" in lost(told, read(told))


def lost(told: Any, read: Any) -> Iterator[str]:
    """Yields names of fields that are missing or different."""
    if isinstance(told, dict):
        for name, value in told.items():
            if not isinstance(read, dict) or name not in read:
                yield name
            else:
                yield from (
                    lost(value, read[name])
                    if isinstance(value, dict | list)
                    else [name] * (value != read[name])
                )
    elif isinstance(told, list):
        for one, other in zip(told, read, strict=True):
            yield from lost(one, other)
