"""SGLang's disaggregation backend: ``--disaggregation-transfer-backend kvxfer``.

SGLang finds it by the entry point group ``sglang.srt.plugins``. README.md describes the installation and the
settings, and lists what has run.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Registers the backend's name with SGLang. SGLang calls this in each of its processes."""
    from kvxfer.connectors.sglang.plugin import add_backend

    add_backend()
