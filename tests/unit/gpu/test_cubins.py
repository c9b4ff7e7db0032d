"""Cubins on disk: the cache that processes share, and the cubins in the package."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.errors import UsageError
from kvxfer.gpu import cubin, cubin_cache, origin, prebuilt, sources
from kvxfer.gpu.cubin import Cubin
from kvxfer.gpu.kernels import kernel_of
from kvxfer.gpu.origin import Origin

COPY = kernel_of("copy_vectors")
COMPILER = (13, 5)


def made(code: bytes = b"\x7fELF" + bytes(range(256)), key: str = "ab" * 32) -> Cubin:
    return Cubin("copy_vectors", "sm_90a", key, COMPILER, code)


def load(key: str = "ab" * 32) -> Cubin | None:
    return cubin_cache.load("copy_vectors", "sm_90a", key, COMPILER)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache that is not there yet."""
    monkeypatch.setenv("KVXFER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


# ---- the cache ----------------------------------------------------------------------------------


def test_what_was_stored_is_loaded_and_nobody_else_may_write_there(cache: Path) -> None:
    assert load() is None
    cubin_cache.store(made())
    assert load() == made()
    assert load("cd" * 32) is None
    assert cubin_cache.load("copy_vectors", "sm_90a", "ab" * 32, (13, 6)) is None
    assert cache.stat().st_mode & 0o077 == 0
    assert only_file(cache).stat().st_mode & 0o077 == 0


def test_a_file_that_is_torn_or_altered_anywhere_is_noticed(cache: Path) -> None:
    cubin_cache.store(made())
    file = only_file(cache)
    whole = file.read_bytes()
    for nbytes in range(len(whole)):
        file.write_bytes(whole[:nbytes])
        assert load() is None, nbytes
    for index in range(len(whole)):
        file.write_bytes(whole[:index] + bytes([whole[index] ^ 0x20]) + whole[index + 1 :])
        assert load() is None, index
    file.write_bytes(whole + b"\0")
    assert load() is None
    file.write_bytes(whole)
    assert load() == made()


@pytest.mark.parametrize(
    "text",
    ["", "\n", "[]\n", "null\n", "{}\n", '{"compiler": [1e999, 1]}\n', "[" * 999 + "\n", "\xff\n", "1" * 999]
)  # fmt: skip
def test_a_foreign_file_is_none_of_ours(cache: Path, text: str) -> None:
    cubin_cache.store(made())
    only_file(cache).write_bytes(text.encode("latin-1"))
    assert load() is None


def test_a_file_under_the_name_of_another_is_noticed(cache: Path) -> None:
    cubin_cache.store(made())
    file = only_file(cache)
    file.write_bytes(made(key="cd" * 32).to_bytes())
    assert load() is None
    head, _, code = made().to_bytes().partition(b"\n")
    older = json.dumps({**json.loads(head), "compiler": [12, 9]}).encode()
    file.write_bytes(older + b"\n" + code)
    assert load() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_loaded(cache: Path) -> None:
    cubin_cache.store(made())
    file = only_file(cache)
    assert cubin.read(file, "copy_vectors", "sm_90a", "ab" * 32, uid=1000) == made()  # root's
    os.chown(file, 12345, -1)
    assert load() is None


def test_processes_that_write_and_read_at_once_see_whole_files_only(cache: Path) -> None:
    script = (
        "import sys\n"
        "from kvxfer.gpu import cubin_cache\n"
        "from kvxfer.gpu.cubin import Cubin\n"
        "cubin = Cubin('copy_vectors', 'sm_90a', 'ab' * 32, (13, 5), bytes(range(256)) * 400)\n"
        "sys.stdin.readline()\n"
        "for _ in range(200):\n"
        "    cubin_cache.store(cubin)\n"
        "    assert cubin_cache.load('copy_vectors', 'sm_90a', 'ab' * 32, (13, 5)) == cubin\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors.decode()
    assert only_file(cache).suffix == ".cubin"


def test_a_cache_stays_small(cache: Path) -> None:
    for number in range(cubin_cache._MAX_FILES + 5):
        cubin_cache.store(made(key=f"{number:064x}"))
    assert len(list(cache.iterdir())) == cubin_cache._MAX_FILES
    assert load(f"{cubin_cache._MAX_FILES + 4:064x}") is not None


def test_a_folder_that_cannot_be_written_is_told_once_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Below a file: root, too, makes no folder there.
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("KVXFER_CACHE_DIR", str(file))
    with caplog.at_level(logging.WARNING, "kvxfer"):
        cubin_cache.store(made())
        cubin_cache.store(made())
    assert load() is None
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert "KVXFER_CACHE_DIR" in record.getMessage()


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVXFER_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cubin_cache.folder() == tmp_path / ".cache/kvxfer/cubins"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cubin_cache.folder() == Path("/var/cache/me/kvxfer/cubins")
    monkeypatch.setenv("KVXFER_CACHE_DIR", "/fast")
    assert cubin_cache.folder() == Path("/fast/cubins")


# ---- where a cubin is from ----------------------------------------------------------------------


@pytest.fixture
def no_prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation that brought no cubins."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    return tmp_path / "prebuilt"


def test_compiled_once_then_cached_and_compiled_anew_where_the_file_is_torn(
    cache: Path, no_prebuilt: Path
) -> None:
    assert origin.look(COPY, "sm_90a") == (Origin.COMPILED, None)
    assert not cache.exists()
    first = origin.find(COPY, "sm_90a")
    assert first[0] is Origin.COMPILED
    assert first[1].code.startswith(b"\x7fELF")
    assert origin.find(COPY, "sm_90a") == (Origin.CACHED, first[1])
    file = only_file(cache)
    file.write_bytes(file.read_bytes()[:-1])
    assert origin.find(COPY, "sm_90a") == first
    assert origin.look(COPY, "sm_90a") == (Origin.CACHED, first[1])


def test_what_came_with_the_package_is_used_while_its_sources_are_the_same(
    cache: Path, no_prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = prebuilt.build(no_prebuilt, ("sm_80",))[:1]
    found = origin.find(COPY, "sm_80", (99, 0))
    assert found[0] is Origin.PREBUILT
    assert not cache.exists()
    # A driver of an earlier CUDA does not load it; nor what NVRTC of this version makes.
    with pytest.raises(UsageError, match=r"makes kernels that this driver does not load.*gpu-cu12"):
        origin.find(COPY, "sm_80", (11, 8))
    before = path.stat().st_mtime_ns
    assert path in prebuilt.build(no_prebuilt, ("sm_80",))
    assert path.stat().st_mtime_ns == before
    (no_prebuilt / "gone-sm_80.cubin").write_bytes(b"")
    monkeypatch.setattr(sources, "key_of", lambda *_: "of other sources")
    assert origin.look(COPY, "sm_80", (99, 0)) == (Origin.COMPILED, None)
    assert prebuilt.build(no_prebuilt, ("sm_90a",))
    assert "sm_80" not in "".join(file.name for file in no_prebuilt.iterdir())


def test_cubins_tell_nothing_of_where_they_were_made(cache: Path, no_prebuilt: Path) -> None:
    _, found = origin.find(COPY, "sm_80")
    assert str(sources.ROOT).encode() not in found.to_bytes()
    assert b"/include" not in found.code


def test_architectures_that_nvrtc_does_not_know_are_refused(cache: Path, no_prebuilt: Path) -> None:
    with pytest.raises(UsageError, match=r"does not know sm_250a.*pip install") as caught:
        origin.find(COPY, "sm_250a")
    assert caught.value.code == "unsupported"


def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(
    tmp_path: Path, cache: Path, no_prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / COPY.source).write_text("__global__ void f() { nonsense }\n")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    with pytest.raises(UsageError, match=r"(?s)could not compile.*\"nonsense\" is undefined") as caught:
        origin.find(COPY, "sm_80")
    assert caught.value.code == "unsupported"
