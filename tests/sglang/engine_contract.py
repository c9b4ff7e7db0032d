"""What SGLang's classes promise the connector (`tests.engine_contract`).

    python -m tests.sglang.engine_contract > tests/sglang/contracts/0.5.24.json

writes down the engine that is installed.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Final

from tests.engine_contract import Engine

_DISAGGREGATION: Final = "sglang.srt.disaggregation"

ENGINE: Final = Engine(
    folder=Path(__file__).parent / "contracts",
    parts=3,
    classes={
        f"{_DISAGGREGATION}.base.conn": [
            *("KVArgs", "KVPoll", "KVTransferDestination", "KVTransferMetric", "StateType"),
        ],
        f"{_DISAGGREGATION}.common.conn": [
            *("AbortNotification", "CommonKVBootstrapServer"),
            *("CommonKVManager", "CommonKVReceiver", "CommonKVSender"),
        ],
        f"{_DISAGGREGATION}.utils": ["DisaggregationMode", "KVClassType", "TransferBackend"],
        "sglang.srt.plugins.hook_registry": ["HookRegistry", "HookType"],
        "sglang.srt.utils.network": ["NetworkAddress"],
    },
    bases=("CommonKVManager", "CommonKVReceiver", "CommonKVSender"),
    functions={
        f"{_DISAGGREGATION}.common.conn": ["ABORT_TAG"],
        f"{_DISAGGREGATION}.utils": ["get_kv_class"],
        "sglang.srt.plugins": ["GENERAL_PLUGINS_GROUP", "load_plugins"],
        "sglang.srt.runtime_context": ["get_device", "process_model_config"],
        "sglang.srt.server_args": ["add_disagg_transfer_backend_choices"],
    },
    annotated=("KVArgs",),
)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(ENGINE.installed(), sys.stdout, indent=2)
    print()
