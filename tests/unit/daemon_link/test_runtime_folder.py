"""Where agents look for their daemon."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.daemon_link import runtime_folder as tested
from kvxfer.errors import UsageError


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("KVXFER_DAEMON_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory(prefix="kvxfer") as made:  # its path is short enough for a socket
        monkeypatch.setattr(tested, "_OF_ROOT", Path(made) / "of-root")
        yield Path(made)


def listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(os.fspath(path))
    return listening


def test_the_folder_is_the_environments_or_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert tested.runtime_folder() == folder / "of-root"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert tested.runtime_folder() == Path("/tmp/kvxfer-12345")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert tested.runtime_folder() == Path("/tmp/kvxfer-12345"), "another user's, as su leaves it"
    monkeypatch.undo()
    monkeypatch.delenv("KVXFER_DAEMON_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert tested.runtime_folder() == folder / "kvxfer"
    monkeypatch.setenv("KVXFER_DAEMON_DIR", "/somewhere")
    assert tested.runtime_folder() == Path("/somewhere")


@pytest.mark.parametrize("named", ["", "relative/folder"])
def test_a_variable_that_names_no_folder_is_refused(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_DAEMON_DIR", named)
    with pytest.raises(UsageError, match="absolute path"):
        tested.runtime_folder()


def test_an_agent_finds_a_socket_that_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert tested.socket_of(None) is None
    root, own = folder / "of-root" / "agents.sock", folder / "kvxfer" / "agents.sock"
    with listen(root):
        assert tested.socket_of(None) == root
        with listen(own):
            assert tested.socket_of(None) == own
            monkeypatch.setenv("KVXFER_DAEMON_DIR", "")
            assert tested.socket_of(None) is None
    own.unlink()
    own.write_text("no socket")
    monkeypatch.delenv("KVXFER_DAEMON_DIR")
    assert tested.socket_of(None) == root


@pytest.mark.parametrize(
    ("named", "path"),
    [("", None), ("/x", "/x/agents.sock"), ("/x/my.sock", "/x/my.sock")],
)
def test_what_is_named_need_not_be_there(named: str, path: str | None) -> None:
    assert tested.socket_of(named) == (path and Path(path))


@pytest.mark.parametrize("named", ["x", "/" + "x" * 100, "/x\0y"])
def test_a_path_that_no_socket_has_is_refused(named: str) -> None:
    with pytest.raises(UsageError, match="absolute path of at most"):
        tested.socket_of(named)
