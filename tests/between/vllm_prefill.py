"""A vLLM engine on the CPU that computes prompts and keeps their pages for a reader.

python -m tests.between.vllm_prefill WEIGHTS BLOCK_TOKENS
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from kvxfer.bench.engines.vllm_server import ENVIRONMENT, kvxfer_config
from tests.between.process import serve

#: What both engines call the model.
MODEL: Final = "tiny llama"
_TO_PREFILL: Final = {"do_remote_decode": True, "do_remote_prefill": False}
# Of a float32: 2**64 times as much.
_EXPONENT_BIT: Final = 0x2000_0000


class Prefill:
    """The engine, in this process."""

    def __init__(self, weights: str, block_tokens: int) -> None:
        os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        # The engine gives blocks back in a step, and it steps only for a request.
        config = kvxfer_config("kv_producer", model=MODEL, lease_ttl_s=600.0, silent_timeout_s=60.0)
        config.update(kv_connector="RowsConnector", kv_connector_module_path="tests.between.rows_connector")
        self._llm = LLM(
            model=weights,
            dtype="float32",
            enforce_eager=True,
            block_size=block_tokens,
            num_gpu_blocks_override=64,
            max_model_len=1024,
            max_num_seqs=4,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            kv_transfer_config=KVTransferConfig(**config),
        )

    def prefill(self, tokens: list[int]) -> tuple[int, dict[str, Any]]:
        """Computes a prompt; returns the first token after it, and the parameters for the reader."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, extra_args={"kv_transfer_params": _TO_PREFILL}
        )
        (answer,) = self._llm.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
        return answer.outputs[0].token_ids[0], answer.kv_transfer_params

    def flip_a_bit(self, block: int, token: int) -> tuple[float, float]:
        """Flips a bit of the exponent of one value of a token; returns what the element was, and is."""
        import torch

        from tests.between import rows_connector

        row = rows_connector.views[rows_connector.VALUES][0][block, 0, token]
        # The bit is clear in values of 2 and more. In smaller values it is set, and clearing it would make
        # them tiny.
        at = int((row.abs() >= 2).nonzero()[0])
        before = float(row[at])
        row[at : at + 1].view(torch.int32).bitwise_xor_(_EXPONENT_BIT)
        return before, float(row[at])

    def num_blocks_kept(self) -> int:
        """Computes a prompt of one token, so that the engine steps; returns how many blocks are held then."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self._llm.generate({"prompt_token_ids": [5]}, sampling, use_tqdm=False)
        pool = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        # Block 0 is never handed out.
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


if __name__ == "__main__":
    serve(lambda: Prefill(sys.argv[1], int(sys.argv[2])))
