"""Settings: which source each value comes from, and errors when the engine starts."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.connectors.common.settings import Settings

HOSTS: list[tuple[str | None, dict[str, Any], str]] = [
    (None, {}, "127.0.0.1"),
    ("10.1.2.3", {}, "10.1.2.3"),
    ("fd00::7", {}, "fd00::7"),
    ("0.0.0.0", {"lease_ttl_s": 5}, "0.0.0.0"),
    ("10.1.2.3", {"host": "10.9.9.9"}, "10.9.9.9"),
    ("no host", {"host": "10.9.9.9"}, "10.9.9.9"),
]


@pytest.mark.parametrize(("variable", "given", "host"), HOSTS)
def test_the_environment_says_where_to_listen_unless_a_setting_does(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: dict[str, Any], host: str
) -> None:
    monkeypatch.delenv("KVXFER_HOST", raising=False)
    if variable is not None:
        monkeypatch.setenv("KVXFER_HOST", variable)
    assert Settings.of(given, "settings").host == host
    assert Settings().host == "127.0.0.1"


@pytest.mark.parametrize("variable", ["", "$(POD_IP)", "[fd00::7]", "10.1.2.3:7301", "tcp://10.1.2.3"])
def test_a_variable_that_names_no_host_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("KVXFER_HOST", variable)
    with pytest.raises(ValueError, match=r"^the engine's settings: KVXFER_HOST: .*is not a host: write"):
        Settings.of({}, "the engine's settings")
    with pytest.raises(ValueError, match=r"^the engine's settings: host: .*is not a host: write"):
        Settings.of({"host": variable}, "the engine's settings")
