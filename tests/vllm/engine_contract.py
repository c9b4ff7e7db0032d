"""What vLLM's classes promise the connector (`tests.engine_contract`).

    python -m tests.vllm.engine_contract > tests/vllm/contracts/0.34.json

writes down the engine that is installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from tests.engine_contract import Engine

#: The classes that the connector inherits from, fills in or reads, by module.
CLASSES: Final = {
    "vllm.distributed.kv_transfer.kv_connector.factory": ["KVConnectorFactory"],
    "vllm.distributed.kv_transfer.kv_connector.v1.base": [
        "KVConnectorBase_V1",
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "SupportsHMA",
    ],
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": ["KVConnectorPromMetrics", "KVConnectorStats"],
    "vllm.v1.core.sched.output": ["KVConnectorBlockState", "SchedulerOutput"],
    "vllm.v1.kv_cache_interface": [
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
    ],
    "vllm.v1.outputs": ["KVConnectorOutput"],
    "vllm.v1.request": ["Request", "RequestStatus"],
}

ENGINE: Final = Engine(
    folder=Path(__file__).parent / "contracts",
    parts=2,
    classes=CLASSES,
    bases=("KVConnectorBase_V1", "KVConnectorPromMetrics", "KVConnectorStats", "SupportsHMA"),
)

if __name__ == "__main__":
    json.dump(ENGINE.installed(), sys.stdout, indent=2)
    print()
