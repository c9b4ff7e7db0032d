"""SGLang's model runner on the CPU; it continues prompts that it computed itself or fetched.

    python -m tests.between.sglang_decode WEIGHTS PAGE_TOKENS FOLDER

It has SGLang's batches, allocators and pools, but no scheduler. What a scheduler would need to know about a
request that another engine computed is an argument here.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from kvxfer.bench.engines.sglang_server import ENVIRONMENT
from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.regions import CacheMemory
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.statistics import PAGES, PULL
from kvxfer.connectors.common.step import FetchOrder, Step
from kvxfer.connectors.common.worker_half import WorkerHalf
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.sglang.cache_parts import CachePart, RankSlice, parts_of
from tests.between.process import serve
from tests.between.rows_connector import KEYS, VALUES
from tests.between.sglang_parts import half_of, in_floats
from tests.between.vllm_prefill import MODEL
from tests.connectors.requests import Request

_NUM_TOKENS: Final = 2048
_PATIENCE_S: Final = 60.0
#: What vLLM's connector adds to the digest of a prompt without media and adapter.
_BESIDE: Final = b"[]None"


class Decode:
    """The runner, and decode's half of kvxfer's connectors over its cache."""

    def __init__(self, weights: str, page_tokens: int, folder: str) -> None:
        os.environ.update(ENVIRONMENT)
        self._folder = Path(folder)
        self._page_tokens = page_tokens
        self._runner = _runner(weights, page_tokens)
        self._settings = Settings(model=MODEL, huge_pages=False, silent_timeout_s=60.0)
        (part,) = parts_of(self._kv_args(), self._rank())
        self._memory = _keys_and_values(part, page_tokens)
        self._half = WorkerHalf(WorkerRank("sglang decode"), self._settings)
        self._half.register(self._memory)
        self._number = 0

    # ---- what a scheduler would ask for -----------------------------------------------------------

    def compute(self, prompt: list[int], first: int, num_steps: int) -> dict[str, Any]:
        """Computes a prompt and continues from a token with the likeliest tokens, as one engine does."""
        batch = self._allocate(prompt)
        answer: dict[str, Any] = {"prompt": self._forward(batch), "pages": self._save(batch, len(prompt))}
        answer["tokens"], answer["steps"] = [first], []
        while len(answer["steps"]) < num_steps:
            answer["steps"].append(self._step(batch, answer["tokens"][-1]))
            answer["tokens"].append(int(np.argmax(answer["steps"][-1])))
        self._free()
        return answer

    def take_over(self, prompt: list[int], params: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        """Reads a prompt's pages from prefill and continues with these tokens; the first is prefill's."""
        batch = self._allocate(prompt)
        pages = self._pages(batch, len(prompt))
        for buffer in self._buffers():
            buffer[pages] = np.nan  # everything computed from a page that is not fetched whole is NaN
        num_read = self._fetch(self._half, self._handover(prompt, params), pages)
        answer = {"num_pages": num_read, "pages": self._save(batch, len(prompt))}
        answer["steps"] = [self._step(batch, token) for token in tokens]
        self._free()
        return answer

    def refusal(self, tokens: list[int], params: dict[str, Any], changed: dict[str, Any]) -> str:
        """Reads the pages of a prompt with changed layouts of its own; returns the text of the log."""
        memory = [replace(each, layout=replace(each.layout, **changed)) for each in self._memory]
        pages = list(range(1, 1 + -(-len(tokens) // self._page_tokens)))
        said: list[str] = []
        half = WorkerHalf(WorkerRank("another"), self._settings)
        log, handler = logging.getLogger("kvxfer"), logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        log.addHandler(handler)
        try:
            half.register(memory)
            self._fetch(half, self._handover(tokens, params), pages)
        finally:
            log.removeHandler(handler)
            half.close()
        return "\n".join(said)

    # ---- what kvxfer is told ----------------------------------------------------------------------

    def _kv_args(self) -> Any:
        """Returns what SGLang tells a transfer backend of its cache (``KVArgs``), from the same pool."""
        pointers, lengths, item_lengths = self._pool.get_contiguous_buf_infos()
        return SimpleNamespace(
            kv_data_ptrs=pointers,
            kv_data_lens=lengths,
            kv_item_lens=item_lengths,
            kv_cache_dtype_str="float32",
            page_size=self._page_tokens,
            state_types=[],
        )

    def _rank(self) -> RankSlice:
        model = self._runner.model_config
        return RankSlice(
            tp_rank=0,
            tp_size=1,
            state_tp_rank=0,
            state_tp_size=1,
            is_latent=False,
            total_heads=model.get_total_num_kv_heads(),
            is_staged=False,
            total_layers=0,
            gpu=None,
            model=self._settings.model,
        )

    def _handover(self, tokens: list[int], params: dict[str, Any]) -> Handover:
        return Handover.read(params, Request(tokens, params=params, beside=_BESIDE), 1, self._settings)

    def _fetch(self, half: WorkerHalf, handover: Handover, pages: list[int]) -> int:
        """Fetches a prompt as decode's worker does; returns how many pages were read, 0 for a failure."""
        self._number += 1
        name = f"request {self._number}"
        half.step(Step(fetches=[FetchOrder(name, handover, (tuple(pages),), 0, handover.num_tokens)]))
        deadline = time.monotonic() + _PATIENCE_S
        while name not in half.collect(set(), 0).received:
            assert time.monotonic() < deadline, f"{name} has not ended in {_PATIENCE_S:g} s"
        counts = half.take_statistics()
        assert counts is not None
        return sum(counts.data[PAGES].get(PULL, []))

    # ---- SGLang -----------------------------------------------------------------------------------

    @property
    def _pool(self) -> Any:
        return self._runner.token_to_kv_pool

    def _buffers(self) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Returns keys of each layer, then values: ``[page, token, head, dim]`` each."""
        return [
            buffer.numpy().reshape(-1, self._page_tokens, *buffer.shape[1:])
            for buffer in (*self._pool.k_buffer, *self._pool.v_buffer)
        ]

    def _allocate(self, tokens: list[int]) -> Any:
        """Returns a batch of one request that has pages for its prompt, with nothing in them yet."""
        from sglang.benchmark.one_batch import TreeCacheNamespace
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner = self._runner
        request = Req(
            rid="0",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=64),
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = len(tokens)
        batch = ScheduleBatch.init_new(
            reqs=[request],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=TreeCacheNamespace(
                page_size=self._page_tokens,
                device=runner.device,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            ),
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        return batch

    def _forward(self, batch: Any) -> list[float]:
        """Returns the logits of the last token."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        if batch.input_ids is None:
            batch.input_ids, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu, None
        with torch.no_grad():
            forward = ForwardBatch.init_new(batch, self._runner, return_hidden_states_before_norm=False)
            logits = self._runner.forward(forward).logits_output.next_token_logits
        return [float(each) for each in logits[0]]

    def _step(self, batch: Any, token: int) -> list[float]:
        """Continues with a token; returns the logits after it."""
        import torch

        batch.input_ids = torch.tensor([token])
        batch.prefill_input_ids_cpu = None
        batch.prepare_for_decode()
        return self._forward(batch)

    def _pages(self, batch: Any, num_tokens: int) -> list[int]:
        slots = self._runner.req_to_token_pool.req_to_token[int(batch.req_pool_indices[0]), :num_tokens]
        pages = [int(slot) // self._page_tokens for slot in slots[:: self._page_tokens]]
        assert 0 not in pages, "SGLang keeps page 0 for tokens that are none"
        return pages

    def _save(self, batch: Any, num_tokens: int) -> str:
        """Writes the contents of a request's pages, ``[keys and values of layers, token, head, dim]``."""
        pages = self._pages(batch, num_tokens)
        path = self._folder / f"pages-{time.monotonic_ns()}.npy"
        rows = [buffer[pages].reshape(-1, *buffer.shape[2:])[:num_tokens] for buffer in self._buffers()]
        np.save(path, np.stack(rows))
        return str(path)

    def _free(self) -> None:
        self._runner.req_to_token_pool.clear()
        self._runner.token_to_kv_pool_allocator.clear()


def _keys_and_values(part: CachePart, page_tokens: int) -> list[CacheMemory]:
    """Returns SGLang's keys and values as two regions, because vLLM's layouts of the two differ."""
    whole = in_floats(part, MODEL, "")
    layers = tuple(f"layer {layer}" for layer in whole.layers)
    return [
        CacheMemory(CacheGroup(0, name, layers, page_tokens, shape=at), part.memory, half_of(whole, at, name))
        for at, name in enumerate((KEYS, VALUES))
    ]


def _runner(weights: str, page_tokens: int) -> Any:
    """Returns a model runner as ``sglang.benchmark.one_batch`` makes one."""
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = [
        *("--model-path", weights, "--dtype", "float32", "--device", "cpu"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
        *("--grammar-backend", "none", "--page-size", str(page_tokens)),
        *("--max-total-tokens", str(_NUM_TOKENS), "--context-length", "1024", "--max-running-requests", "4"),
    ]
    settings = ServerArgs.from_cli_args(parser.parse_args(arguments))
    settings.resolve_once()
    one_batch._set_envs_and_config(settings)
    ports = PortArgs.init_new(settings)
    rank = spawn_world_rank(settings, tp_rank=0, pp_rank=0)
    publish(settings, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(settings, ports, 0, 0)
    return runner.torch_runner


if __name__ == "__main__":
    serve(lambda: Decode(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
