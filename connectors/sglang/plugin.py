"""Registers ``kvxfer`` as a transfer backend of SGLang. It changes three places of SGLang and no other.

1. The choices of ``--disaggregation-transfer-backend``: SGLang lets plug-ins extend them.
2. ``TransferBackend``, a closed Enum: a hook on ``_missing_`` returns a member for the name.
3. ``get_kv_class``, which knows only SGLang's own backends: a hook around it returns our classes.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any, Final

_log = logging.getLogger("kvxfer")

NAME: Final = "kvxfer"
#: The release that the backend was tested with.
RELEASE: Final = "0.5.23"

_UTILS: Final = "sglang.srt.disaggregation.utils"
#: The functions of SGLang that are hooked.
HOOKED: Final = (f"{_UTILS}.TransferBackend._missing_", f"{_UTILS}.get_kv_class")

_members: dict[type, Any] = {}


def add_backend() -> None:
    """Registers the choice and both hooks; SGLang applies them before it parses its arguments."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_disagg_transfer_backend_choices

    if (installed := importlib.metadata.version("sglang")) != RELEASE:
        _log.warning(
            "kvxfer's backend was tested with SGLang %s, and this is %s: `make test-sglang` shows what "
            "changed",
            RELEASE,
            installed,
        )
    add_disagg_transfer_backend_choices([NAME])
    for target, hook in zip(HOOKED, (_missing, _kv_class), strict=True):
        HookRegistry.register(target, hook, HookType.AROUND)


def backend() -> Any:
    """Returns the member of ``TransferBackend`` that stands for this backend."""
    from sglang.srt.disaggregation.utils import TransferBackend

    if TransferBackend not in _members:
        member = object.__new__(TransferBackend)
        member._name_, member._value_ = NAME.upper(), NAME
        _members[TransferBackend] = member
    return _members[TransferBackend]


def _missing(original: Callable[..., Any], value: object) -> Any:
    return backend() if value == NAME else original(value)


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    from sglang.srt.disaggregation.utils import KVClassType

    # The class that carries the pointers is the same for all backends.
    if transfer_backend is not backend() or class_type == KVClassType.KVARGS:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from kvxfer.connectors.sglang.manager import KvxferKVManager
    from kvxfer.connectors.sglang.receiver import KvxferKVReceiver
    from kvxfer.connectors.sglang.sender import KvxferKVSender

    return {
        KVClassType.MANAGER: KvxferKVManager,
        KVClassType.SENDER: KvxferKVSender,
        KVClassType.RECEIVER: KvxferKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
    }.get(class_type)
