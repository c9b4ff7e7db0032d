"""The result of `make release` in dist/: complete, small, portable; it runs without another kvxfer."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.release.interface import ROOT, version
from tests.release.provenance import sha256
from tests.unit.test_packaging import CONSTRAINTS, run, sources

pytest.importorskip("auditwheel", reason="make test-release makes what is tested here")
validation = pytest.importorskip("cyclonedx.validation.json")
schema = pytest.importorskip("cyclonedx.schema")

DIST = ROOT / "dist"
MOST_NBYTES = 15_000_000
CUBINS = re.compile(r"kvxfer/gpu/cubins/\w+-sm_\w+\.cubin")


def the(pattern: str) -> Path:
    (found,) = DIST.glob(pattern)
    return found


@pytest.fixture(scope="module")
def wheel() -> Path:
    return the("*.whl")


def test_every_file_has_its_digest() -> None:
    lines = (line.split("  ") for line in (DIST / "SHA256SUMS").read_text().splitlines())
    told = {name: digest for digest, name in lines}
    assert told == {path.name: sha256(path) for path in DIST.iterdir() if path.name != "SHA256SUMS"}
    suffixes = sorted(re.sub(r".*\.(\w+\.\w+|whl)$", r"\1", name) for name in told)
    assert suffixes == ["cdx.json", "intoto.json", "tar.gz", "whl"]


def test_the_wheel_is_small_and_for_many_systems(wheel: Path) -> None:
    assert wheel.stat().st_size <= MOST_NBYTES
    tag = f"cp3{sys.version_info.minor}"
    found = re.fullmatch(
        rf"kvxfer-{re.escape(version())}-{tag}-{tag}-(manylinux_2_\d+_(?:x86_64|aarch64))\.whl", wheel.name
    )
    assert found, wheel.name
    seen = run(sys.executable, "-m", "auditwheel", "show", wheel, cwd=DIST)
    assert f'following platform tag: "{found[1]}"' in " ".join(seen.split())


def test_the_wheel_has_what_is_used_and_nothing_of_this_machine(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in names:
            assert str(ROOT).encode() not in archive.read(name), name
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"kvxfer", f"kvxfer-{version()}.dist-info"}
    modules = {name for name in names if ".so" in name}
    assert {re.sub(r"\.cpython.*", "", name) for name in modules} == {
        *("kvxfer/_native", "kvxfer/bench/_limits", "kvxfer/nixl_plugins/libplugin_KVXFER.so"),
    }
    wanted = {"kvxfer/py.typed", "kvxfer/_native.pyi", "kvxfer/gpu/native/include/kvxfer/device.cuh"}
    assert wanted <= set(names)
    assert sum(CUBINS.fullmatch(name) is not None for name in names) >= 12


def test_the_source_distribution_has_all_that_a_build_needs() -> None:
    with tarfile.open(the("*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "pyproject.toml", "PKG-INFO", "LICENSE", *sources()} - names == set()
    assert sum(CUBINS.fullmatch(name) is not None for name in names) >= 12
    # The configuration of cibuildwheel.
    assert "tests/constraints.txt" in names


def test_the_bill_of_materials_is_the_wheels(wheel: Path) -> None:
    text = the("*.cdx.json").read_text()
    errors = validation.JsonStrictValidator(schema.SchemaVersion.V1_7).validate_str(text)
    assert errors is None, errors
    bill: dict[str, Any] = json.loads(text)
    ours = bill["metadata"]["component"]
    assert (ours["name"], ours["version"]) == ("kvxfer", version())
    assert ours["hashes"] == [{"alg": "SHA-256", "content": sha256(wheel)}]
    parts = {each["name"]: each for each in bill["components"]}
    assert {"numpy", "typer", "nanobind", "robin-map"} <= set(parts)
    assert "pytest" not in parts, "nothing that tests alone need"
    assert [name for name, each in parts.items() if each.get("scope") == "required"] == ["numpy"]
    constraints = CONSTRAINTS.read_text()
    assert f"\nnanobind=={parts['nanobind']['version']}\n" in constraints


def test_the_provenance_is_of_these_files_and_this_commit() -> None:
    statement = json.loads(the("*.intoto.json").read_text())
    told = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    left_out = {"SHA256SUMS", the("*.intoto.json").name}
    assert told == {path.name: sha256(path) for path in DIST.iterdir() if path.name not in left_out}
    source, *tools = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    head = run("git", "rev-parse", "HEAD", cwd=ROOT).strip()
    assert source == {"name": "source", "digest": {"gitCommit": head}}
    assert all(re.fullmatch(r"pkg:pypi/[\w-]+@[\w.]+", each["uri"]) for each in tools)


@pytest.mark.smoke
def test_it_installs_beside_nothing_and_demonstrates(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "bare", cwd=tmp_path)
    folder = tmp_path / "empty"
    folder.mkdir()
    bin_ = tmp_path / "bare/bin"
    # Only the wheel's kvxfer: neither an index's nor this tree's.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    outside["PATH"] = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    install = ("-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, f"{wheel}[vllm]")
    run(bin_ / "python", *install, cwd=folder, timeout_s=600, env=outside)
    where = "import kvxfer._native as found; print(found.__file__, found.__version__)"
    file, built = run(bin_ / "python", "-c", where, cwd=folder, env=outside).split()
    assert file.startswith(str(tmp_path))
    assert built == version() == run(bin_ / "kvxfer", "--version", cwd=folder, env=outside).strip()
    command = ("bench", "handover", "--transport", "shm", "--requests", "8")
    assert "every byte checked" in run(bin_ / "kvxfer", *command, cwd=folder, env=outside)
    assert list(folder.iterdir()) == [], "it writes nothing where it was started"
