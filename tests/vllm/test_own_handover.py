"""A handover that returns to the engine that computed it, which happens if every engine has both roles."""

from __future__ import annotations

import pytest

from kvxfer.bench.engines.vllm_server import complete
from tests.vllm.engine import Engines, random_prompt


@pytest.mark.parametrize("length", [20, 64, 200])
def test_an_engine_goes_on_from_what_it_has_and_fetches_nothing(engines: Engines, length: int) -> None:
    prompt = random_prompt(length)
    before = engines.prefill.prompt_tokens("external_kv_transfer")
    request_id = f"own {length}"
    params = engines.prefilled(prompt, request_id)
    assert complete(engines.prefill, prompt, kv_transfer_params=params).token_ids == engines.expected(prompt)
    assert engines.prefill.prompt_tokens("external_kv_transfer") == before
    engines.wait_empty()
    assert not engines.has_expired(request_id)
