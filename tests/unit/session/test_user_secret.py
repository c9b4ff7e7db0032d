"""user_secret: one for each user, made once, used only if no other user can have made or read it."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from kvxfer.doctor import access
from kvxfer.errors import UsageError
from kvxfer.session.user_secret import existing_secret, secret_folder, user_secret


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return runtime / "kvxfer"


def test_it_is_made_once_and_for_this_user_alone(home: Path) -> None:
    assert secret_folder() == home
    assert existing_secret() is None
    assert not home.exists(), "looking makes nothing"
    secret = user_secret()
    assert existing_secret() == secret
    assert len(secret) == 64
    assert user_secret() == secret
    assert stat.S_IMODE((home / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert [path.name for path in home.iterdir()] == ["secret"], "nothing is left of the making"


def test_where_the_runtime_directory_is_none_or_anothers_it_is_in_the_cache(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "there is none"))
    assert secret_folder() == tmp_path / "cache" / "kvxfer"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home.parent))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert secret_folder() == tmp_path / "cache" / "kvxfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert secret_folder() == Path("/home/somebody/.cache/kvxfer")


def _make(_: int) -> bytes:
    return user_secret()


def test_processes_that_make_it_at_once_agree(home: Path) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        assert len(set(pool.map(_make, range(64), chunksize=1))) == 1
    assert [path.name for path in home.iterdir()] == ["secret"]


def _spoil(home: Path, how: str) -> None:
    user_secret()
    secret = home / "secret"
    match how:
        case "readable":
            secret.chmod(0o640)
        case "writable folder":
            home.chmod(0o770)
        case "empty":
            secret.write_bytes(b"")
        case "link":
            secret.rename(home / "elsewhere")
            secret.symlink_to(home / "elsewhere")
        case "pipe":
            secret.unlink()
            os.mkfifo(secret, 0o600)
        case "folder of another":
            os.chown(home, 65534, 65534)
        case "file of another":
            os.chown(secret, 65534, 65534)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("readable", "other users may read"),
        ("writable folder", "chmod 700"),
        ("empty", "holds 0 bytes"),
        ("link", "cannot be read"),
        ("pipe", "other users may read"),
        ("folder of another", "belongs to user 65534"),
        ("file of another", "belongs to user 65534"),
    ],
)
def test_what_another_user_may_know_is_refused_in_words(home: Path, how: str, words: str) -> None:
    if "another" in how and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    _spoil(home, how)
    with pytest.raises(UsageError, match=words) as caught:
        user_secret()
    assert caught.value.code == "invalid-argument"
    assert str(home) in str(caught.value)
    assert "KVXFER_SECRET_FILE" in str(caught.value)


def _access() -> dict[str, str]:
    return {finding.name: f"{finding.state}: {finding.found}" for finding in access.examine(Path("/"))}


def test_doctor_says_who_may_connect_and_who_can_read_what(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVXFER_SECRET_FILE", raising=False)
    monkeypatch.delenv("KVXFER_SECRET", raising=False)
    assert _access()["who may connect"].startswith(f"good: processes of user {os.geteuid()} on this host")
    assert _access()["who may connect"].endswith("secret, which the first agent makes")
    assert not home.exists(), "the doctor changes nothing"
    user_secret()
    (home / "secret").chmod(0o644)
    assert "other users may read" in _access()["who may connect"]
    (home / "secret").unlink()
    monkeypatch.setenv("KVXFER_SECRET", "0123456789abcdef")
    assert "any process that knows the secret of KVXFER_SECRET," in _access()["who may connect"]
    assert "read leased pages only" in _access()["who can read every page"]
    assert "every program that an engine starts" in _access()["programs that inherit the secret"]
    (home.parent / "given").write_text("0123456789abcdef\nfedcba9876543210\n")
    monkeypatch.delenv("KVXFER_SECRET")
    monkeypatch.setenv("KVXFER_SECRET_FILE", str(home.parent / "given"))
    assert "knows one of the two secrets of KVXFER_SECRET_FILE," in _access()["who may connect"]
    assert "programs that inherit the secret" not in _access()


@pytest.mark.parametrize(("mode", "is_open"), [(0o600, False), (0o640, False), (0o644, True), (0o604, True)])
def test_doctor_names_a_file_of_secrets_that_every_user_can_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_open: bool
) -> None:
    file = home.parent / "given secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(mode)
    monkeypatch.delenv("KVXFER_SECRET", raising=False)
    monkeypatch.setenv("KVXFER_SECRET_FILE", str(file))
    found = {finding.name: finding for finding in access.examine(Path("/"))}
    assert ("who can read the secret" in found) == is_open
    if is_open:
        finding = found["who can read the secret"]
        assert finding.found == f"every user of this host: {file} has mode {mode:04o}"
        assert (finding.state, finding.change) == ("limits", f"chmod 600 '{file}'")


def test_doctor_says_what_certificates_mean(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVXFER_SECRET_FILE", "KVXFER_SECRET"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CERTIFICATE", "KEY", "AUTHORITIES"):
        monkeypatch.setenv(f"KVXFER_TLS_{name}", f"/somewhere/{name.lower()}.pem")
    assert "issued by /somewhere/authorities.pem for its own tenant" in _access()["who may connect"]
    monkeypatch.setenv("KVXFER_TLS_ALLOW", "acme/*/* other/decode/*")
    assert "for acme/*/*, other/decode/*" in _access()["who may connect"]
    for use, offer, said in (
        ("auto", "new-keys", "the kernel"),
        ("auto", "one-key", "this process: the kernel does not renew keys"),
        ("auto", "nothing", "this process: no module"),
        ("always", "one-key", "each rail is replaced"),
        ("always", "nothing", "agents do not start"),
        ("never", "new-keys", "this process: as asked"),
    ):
        monkeypatch.setenv("KVXFER_TLS_KERNEL", use)
        monkeypatch.setattr(access, "kernel_tls", lambda offer=offer: (offer, "no module"))
        assert said in _access()["who encrypts pages over TCP"]
    monkeypatch.setenv("KVXFER_TLS_KERNEL", "perhaps")
    assert "KVXFER_TLS_KERNEL is 'perhaps'" in _access()["who may connect"]
    monkeypatch.delenv("KVXFER_TLS_KERNEL")
    monkeypatch.setenv("KVXFER_SECRET", "0123456789abcdef")
    assert "agents do not start: certificates" in _access()["who may connect"]
    monkeypatch.delenv("KVXFER_SECRET")
    monkeypatch.delenv("KVXFER_TLS_KEY")
    assert "KVXFER_TLS_KEY is not set" in _access()["who may connect"]
