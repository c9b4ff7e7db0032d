"""What each rank of a test's engines imports: everything except the engine and the modules that need it."""

from __future__ import annotations

import kvxfer
from kvxfer.connectors.common import prompt_lookup, scheduler_half, worker_half
from tests.trtllm import replay

# Names that the package imports on first use.
LOADED = [
    *(prompt_lookup, scheduler_half, worker_half, replay),
    *(getattr(kvxfer, name) for name in ("Agent", "AgentOptions", "KVLayout", "LeaseToken", "Pool")),
]
