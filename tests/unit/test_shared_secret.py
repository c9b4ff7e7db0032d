"""shared_secret: where secrets come from, what is refused, and that nothing shows them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import shared_secret
from kvxfer.control.serve import ServeOptions
from kvxfer.errors import UsageError
from kvxfer.options import AgentOptions
from kvxfer.shared_secret import SecretOption, Secrets, find_secrets

ONE, TWO = "the first of two: 0123", "the other of two: 4567"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVXFER_SECRET", raising=False)
    monkeypatch.delenv("KVXFER_SECRET_FILE", raising=False)
    monkeypatch.setattr(shared_secret, "_warned", False)


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        (ONE, (ONE.encode(),)),
        (ONE.encode(), (ONE.encode(),)),
        ((ONE,), (ONE.encode(),)),
        ((ONE, TWO.encode()), (ONE.encode(), TWO.encode())),
        ("", ()),
        (b"", ()),
        ("\u00e4" * 8, ("\u00e4" * 8).encode()),
    ],
)
def test_what_is_given_counts_before_the_environment(
    given: SecretOption, accepted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVXFER_SECRET", "what is not looked at")
    wanted = (accepted,) if isinstance(accepted, bytes) else accepted
    assert find_secrets(given) == Secrets(wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "uid", "says"),
    [
        (0o600, None, ""),
        (0o440, None, ""),
        (0o644, None, "every user of this host can read the secret"),
        (0o666, None, "another user may write the secret"),
        (0o602, None, "another user may write the secret"),
        (0o600, 12345, "another user may write the secret"),
    ],
)
def test_a_file_that_others_may_read_or_write_is_told(
    mode: int, uid: int | None, says: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(ONE)
    file.chmod(mode)
    if uid is not None:
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(file, uid, uid)
    told = AgentOptions(secret=file)
    if mode & 0o002 or uid is not None:
        with pytest.raises(UsageError, match=says):
            told.to_native()
        return
    for _ in range(3):
        told.to_native()
    assert [record.levelname for record in caplog.records] == (["WARNING"] if says else [])
    assert says in caplog.text
    assert ONE not in caplog.text


def test_the_environment_names_a_value_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_secrets(None) == Secrets()
    monkeypatch.setenv("KVXFER_SECRET", ONE)
    assert find_secrets(None) == Secrets((ONE.encode(),), variable="KVXFER_SECRET")
    file = tmp_path / "secret"
    monkeypatch.setenv("KVXFER_SECRET_FILE", str(file))
    with pytest.raises(UsageError, match="both set"):
        find_secrets(None)
    monkeypatch.delenv("KVXFER_SECRET")
    with pytest.raises(UsageError, match="cannot be read"):
        find_secrets(None)
    file.write_text(f"{ONE}\n{TWO}\n")
    found = find_secrets(None)
    assert found == Secrets((ONE.encode(), TWO.encode()), str(file), "KVXFER_SECRET_FILE")
    assert (found.first, found.second) == (ONE.encode(), TWO.encode())
    file.write_bytes(b"short\n")
    with pytest.raises(UsageError, match="5 bytes"):
        find_secrets(None)


def test_a_file_is_kept_by_its_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(ONE)
    monkeypatch.chdir(tmp_path)
    assert find_secrets(Path("secret")).file == str(tmp_path / "secret")


def test_an_empty_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_SECRET", "")
    with pytest.raises(UsageError, match="0 bytes"):
        find_secrets(None)


def test_a_value_that_is_no_text_is_taken_as_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_SECRET", (b"\xff" * 16).decode("utf-8", "surrogateescape"))
    assert find_secrets(None).first == b"\xff" * 16


@pytest.mark.parametrize("secret", [ONE, ONE.encode(), (ONE, TWO), (ONE.encode(), TWO.encode())])
def test_nothing_that_holds_a_secret_shows_it(secret: SecretOption) -> None:
    for shown in (
        repr(AgentOptions(secret=secret)),
        repr(ServeOptions(secret=secret)),
        repr(find_secrets(secret)),
        f"{find_secrets(secret)}",
    ):
        assert "of two" not in shown


@pytest.mark.parametrize("secret", [(ONE, TWO, ONE), (ONE, "of 2"), [ONE, TWO], (ONE, [TWO]), {ONE: TWO}])
def test_no_error_tells_a_secret(secret: SecretOption) -> None:
    with pytest.raises(UsageError) as caught:
        find_secrets(secret)
    assert not any(told in str(caught.value) for told in (ONE, TWO, "of 2"))
    assert caught.value.__cause__ is None


def test_a_value_in_the_environment_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    caplog.set_level(logging.DEBUG, "kvxfer")
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text(ONE)
    for options in (
        AgentOptions(secret=TWO),
        AgentOptions(secret=tmp_path / "secret"),
        AgentOptions(secret=b""),
    ):
        options.to_native()
    assert not caplog.records
    monkeypatch.setenv("KVXFER_SECRET", ONE)
    for _ in range(3):
        AgentOptions().to_native()
    (record,) = caplog.records
    assert "KVXFER_SECRET_FILE" in record.getMessage()
    assert "inherits" in record.getMessage()
    assert ONE not in record.getMessage()


def test_a_value_stays_in_the_environment_for_an_engines_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine makes its agents in processes that it starts, which find it there."""
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    monkeypatch.setenv("KVXFER_SECRET", ONE)
    AgentOptions().to_native()
    program = "from kvxfer.shared_secret import find_secrets; print(find_secrets(None).first.decode())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == ONE
