"""What each rank of a test's engines imports: all but the engine, and what of the connector stands on it."""

from __future__ import annotations

import kvxfer
from kvxfer.connectors.common import prompt_lookup, scheduler_half, worker_half
from tests.trtllm import executor

# Names that the package imports when they are first asked for.
LOADED = [
    *(prompt_lookup, scheduler_half, worker_half, executor),
    *(getattr(kvxfer, name) for name in ("Agent", "AgentOptions", "KVLayout", "LeaseToken", "Pool")),
]
