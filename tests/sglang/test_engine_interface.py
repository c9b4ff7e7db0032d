"""Checks that SGLang still has what the connector needs, with the same signatures.

`tests/sglang/contracts/` has what each release promised. The tests compare the installed engine with the
newest contract that is not newer than it. They fail for changes in what the connector overrides, calls,
reads, hooks or must implement, and only report other changes.
"""

from __future__ import annotations

import inspect
import pickle
import pkgutil
import warnings
from pathlib import Path
from typing import Final

import pytest
import sglang
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.common import conn
from sglang.srt.plugins.hook_registry import HookRegistry

import kvxfer.connectors.sglang
from kvxfer.connectors.sglang import plugin
from kvxfer.connectors.sglang.manager import KvxferKVManager
from kvxfer.connectors.sglang.receiver import KvxferKVReceiver
from kvxfer.connectors.sglang.sender import KvxferKVSender
from tests.engine_contract import concerns, describe, drift, misfits, names_in
from tests.sglang.engine_contract import ENGINE

CONTRACTS: Final = ENGINE.recorded()
OURS: Final = {
    "CommonKVManager": KvxferKVManager,
    "CommonKVReceiver": KvxferKVReceiver,
    "CommonKVSender": KvxferKVSender,
}


def overrides(base: str, promised: dict[str, str]) -> dict[str, str]:
    """Returns the methods of a base that the connector implements."""
    cls = OURS[base]
    given = describe(cls, with_private=True)
    return {name: given[name] for name in vars(cls).keys() & promised.keys() if "(" in promised[name]}


def test_the_installed_engine_is_as_it_was_written_down() -> None:
    release = max(each for each in CONTRACTS if each <= ENGINE.release_of(sglang.__version__))
    found = drift(CONTRACTS[release], ENGINE.installed())
    names = names_in(Path(kvxfer.connectors.sglang.__file__).parent)
    names |= {target.rpartition(".")[2] for target in plugin.HOOKED}
    ours = concerns(found, names, {name for cls in OURS.values() for name in vars(cls)})
    for each in set(found) - set(ours):
        warnings.warn(f"SGLang {sglang.__version__}: {each}", stacklevel=1)
    assert not ours, f"since SGLang {'.'.join(map(str, release))}: " + "; ".join(map(str, ours))


@pytest.mark.parametrize("base", OURS)
@pytest.mark.parametrize("release", CONTRACTS, ids=lambda release: ".".join(map(str, release)))
def test_every_recorded_release_can_call_the_connector(release: tuple[int, ...], base: str) -> None:
    promised = CONTRACTS[release][base]
    given = overrides(base, promised)
    assert given
    assert not misfits(given, {name: promised[name] for name in given})
    assert not inspect.isabstract(OURS[base])


def test_a_contract_names_what_moved() -> None:
    before = CONTRACTS[min(CONTRACTS)]
    moved = {owner: dict(members) for owner, members in before.items()}
    moved["CommonKVSender"]["send"] = "method (self, pages, state_indices=, num_kv_tokens=, indices_event=)"
    del moved["CommonKVManager"]["_send_multipart_locked"]
    del moved["sglang.srt.disaggregation.utils"]["get_kv_class"]
    assert {str(each) for each in drift(before, moved)} == {
        "CommonKVSender.send calls its parameter kv_indices pages now",
        "CommonKVManager._send_multipart_locked was removed "
        f"(it was {before['CommonKVManager']['_send_multipart_locked']})",
        "sglang.srt.disaggregation.utils.get_kv_class was removed "
        "(it was method (transfer_backend, class_type))",
    }


def test_the_plug_in_answers_for_its_name_alone() -> None:
    for target in plugin.HOOKED:
        assert callable(pkgutil.resolve_name(target))
    kvxfer.connectors.sglang.register()
    HookRegistry.apply_hooks()
    assert plugin.NAME in DISAGG_TRANSFER_BACKEND_CHOICES
    backend = utils.TransferBackend(plugin.NAME)
    assert backend is utils.TransferBackend(plugin.NAME)
    assert pickle.loads(pickle.dumps(backend)) is backend  # noqa: S301  # SGLang spawns processes
    assert (backend.name, backend.value) == ("KVXFER", "kvxfer")
    found = {kind: utils.get_kv_class(backend, kind) for kind in utils.KVClassType}
    assert found == {
        utils.KVClassType.KVARGS: utils.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.KVARGS),
        utils.KVClassType.MANAGER: KvxferKVManager,
        utils.KVClassType.SENDER: KvxferKVSender,
        utils.KVClassType.RECEIVER: KvxferKVReceiver,
        utils.KVClassType.BOOTSTRAP_SERVER: conn.CommonKVBootstrapServer,
    }
    fake = utils.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.SENDER)
    assert fake.__module__.startswith("sglang.")
    with pytest.raises(ValueError, match="kvxfr"):
        utils.TransferBackend("kvxfr")
