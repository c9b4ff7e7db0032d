"""SGLang's disaggregation backend: ``--disaggregation-transfer-backend kvxfer``.

SGLang finds it by the entry point group ``sglang.srt.plugins``. README.md has the installation, the settings
and what has run.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Makes the backend known to SGLang by its name. SGLang calls it in each of its processes."""
    from kvxfer.connectors.sglang.plugin import add_backend

    add_backend()
