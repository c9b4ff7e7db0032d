"""The user's settings for the backend, read from the environment because SGLang has no option for them."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from kvxfer.connectors.common.settings import Settings

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
    text = os.environ.get(VARIABLE, "") or "{}"
    try:
        given: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f'{VARIABLE} is {text!r:.100}: write an object, e.g. {{"host": "10.0.0.7"}}')
    if unknown := [name for name in given if name not in NAMES]:
        raise ValueError(f"{VARIABLE}: {', '.join(unknown)} is not a setting (settings: {', '.join(NAMES)})")
    return Settings.of(given, VARIABLE)
