"""Release files: the source distribution, its licences, and a wheel that is built from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scikit_build_core", reason="what builds kvxfer is not installed")
requirements = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = ROOT / "tests/constraints.txt"


def run(*command: str | Path, cwd: Path, timeout_s: float = 240.0, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = f"import scikit_build_core.build as backend; backend.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", build, cwd=ROOT)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


def sources() -> Iterator[str]:
    """What CMake compiles and the wheel takes, by its path in the repository."""
    for top in ("native", "kvxfer", "bench", "connectors"):
        # Links are not followed: kvxfer/bench is bench.
        for folder, inner, names in os.walk(ROOT / top):
            inner[:] = [name for name in inner if name not in ("__pycache__", "cubins")]
            paths = (Path(folder, name) for name in names if not name.endswith(".so"))
            yield from (str(path.relative_to(ROOT)) for path in paths if not path.is_symlink())


def test_the_source_distribution_has_every_source_and_no_build(unpacked: Path) -> None:
    expected = {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", *sources()}
    assert len(expected) > 400
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert expected - packed == set()
    assert [
        name for name in packed if re.search(r"(^|/)build/|\.so$|\.pyc$|\.stamp$|(^|/)\.venv", name)
    ] == []
    assert not (unpacked / "kvxfer/bench").exists(), "the wheel would have it twice"


def test_an_installation_from_it_has_cmake_build_the_modules(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An override that replaces `cmake.define` installs without the modules, and succeeds."""
    settings = pytest.importorskip("scikit_build_core.settings.skbuild_read_settings")
    defined = {}
    for folder in (ROOT, unpacked):
        monkeypatch.chdir(folder)
        read: Any = settings.SettingsReader.from_file(Path("pyproject.toml"), state="wheel")
        defined[folder] = {name: str(value) for name, value in read.settings.cmake.define.items()}
    assert defined[ROOT] == {"KVXFER_PYTHON": "ON"}
    assert defined[unpacked] == {"KVXFER_PYTHON": "ON", "KVXFER_WERROR": "OFF"}


def test_its_licence_names_all_that_a_wheel_is_made_of(unpacked: Path) -> None:
    told = message_from_string((unpacked / "PKG-INFO").read_text())
    table = (ROOT / "bench/data/README.md").read_text()
    rows = {
        path.name: next(row for row in table.splitlines() if row.startswith(f"| {path.name} |"))
        for path in (ROOT / "bench/data").iterdir()
        if path.suffix != ".md"
    }
    of_data = {row.split("|")[4].split(",")[0].strip() for row in rows.values()}
    linked = {"BSD-3-Clause", "MIT"}  # nanobind, and the robin_map in it
    assert set(told["License-Expression"].split(" AND ")) == {"Apache-2.0", *linked, *of_data}
    files = told.get_all("License-File") or []
    assert {"LICENSE", "bench/data/README.md"} < set(files)
    assert all((unpacked / name).is_file() for name in files)


def test_the_licence_of_nanobind_is_that_of_the_one_that_is_linked() -> None:
    told = distribution("nanobind").read_text("licenses/LICENSE")
    assert told == (ROOT / "native/licenses/nanobind.txt").read_text()


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_what_tests_install_is_pinned_for_every_python(python: str) -> None:
    pins: dict[str, list[str]] = {}
    for line in CONSTRAINTS.read_text().splitlines():
        if line and not line.startswith("#"):
            pin = requirements.Requirement(line)
            environment = {"python_version": python, "python_full_version": f"{python}.0"}
            if pin.marker is None or pin.marker.evaluate(environment):
                ((operator, version),) = ((each.operator, each.version) for each in pin.specifier)
                assert operator == "=="
                pins.setdefault(pin.name.replace("_", "-").lower(), []).append(version)
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"], "cmake", "ninja"]
    for extra in ("cli", "bench", "control", "dev"):
        asked += extras[extra]
    for line in asked:
        wanted = requirements.Requirement(line)
        (version,) = pins[wanted.name.replace("_", "-").lower()]
        assert wanted.specifier.contains(version), f"{line}: {version}; make constraints"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_wheel_that_is_built_of_it_hands_over_elsewhere(sdist: Path, tmp_path: Path) -> None:
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", tmp_path, sdist),
        cwd=tmp_path,
        timeout_s=2400,
    )
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "elsewhere", cwd=tmp_path)
    bin_ = tmp_path / "elsewhere/bin"
    run(
        *(bin_ / "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, f"{wheel}[cli]"),
        cwd=tmp_path,
        timeout_s=600,
    )
    # Nothing of this repository is reached by accident.
    outside = {**os.environ, "PYTHONPATH": "", "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}
    for module in ("kvxfer._native", "kvxfer.bench._limits"):
        where = f"import importlib; print(importlib.import_module({module!r}).__file__)"
        assert str(tmp_path) in run(bin_ / "python", "-c", where, cwd=tmp_path, env=outside)
    told = run(bin_ / "kvxfer", "doctor", cwd=tmp_path, env=outside)
    assert f"{PROJECT['project']['version']}, copy kernel" in told
    for transport in ("shm", "tcp"):
        command = ("bench", "handover", "--transport", transport, "--requests", "8")
        assert "every byte checked" in run(bin_ / "kvxfer", *command, cwd=tmp_path, env=outside)
