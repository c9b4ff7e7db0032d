"""The user's settings for the backend, read from the environment because SGLang has no option for them."""

from __future__ import annotations

from typing import Final

from kvxfer.connectors.common.settings import Settings, given_in

#: The environment variable: a JSON object.
VARIABLE: Final = "KVXFER_SGLANG"

#: The connectors' settings that this backend uses.
NAMES: Final = (
    "host",
    "port",
    "advertise",
    "secret_file",
    "allowed_hosts",
    "load_timeout_s",
    "connect_timeout_s",
    "silent_timeout_s",
    "transports",
    "huge_pages",
    "model",
)


def settings_of_environment() -> Settings:
    """Returns the settings from the environment.

    Raises
    ------
    ValueError
        The variable is no JSON object, or a setting is unknown or out of range.
    """
    return Settings.of(given_in(VARIABLE, NAMES, '{"host": "10.0.0.7"}'), VARIABLE)
