"""SGLang's own NIXL backend, unchanged, on kvxfer's facade as ``nixl``: tokens of one engine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from kvxfer.bench.engines.sglang_server import TOKENS_PER_PAGE, generate_apart
from kvxfer.bench.serving import sglang_host_memory
from tests.sglang.engine import CHUNK, Engines, Server, random_prompt, server

AS_NIXL = Path(__file__).parents[2] / "connectors" / "nixl" / "distribution"


class NixlPair:
    """A prefill and a decode engine; decode computes no prompt itself."""

    def __init__(self, weights: Path, folder: Path, stack: ExitStack) -> None:
        self._weights, self._folder, self._stack = weights, folder, stack
        self._started = 0
        self.prefill, self.decode = self.start("prefill"), self.start("decode")

    def start(self, role: str) -> Server:
        self._started += 1
        made = server(
            f"nixl-{role}-{self._started}",
            self._weights,
            self._folder,
            role,
            backend="nixl",
            functions={sglang_host_memory.NAME: sglang_host_memory.ENTRY_POINT},
            environment={"PYTHONPATH": str(AS_NIXL)},
        )
        return self._stack.enter_context(made)


@pytest.fixture(scope="module")
def pair(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NixlPair]:
    with ExitStack() as stack:
        made = NixlPair(weights, tmp_path_factory.mktemp("nixl"), stack)
        made.prefill.wait_ready()
        made.decode.wait_ready()
        yield made


def test_tokens_are_those_of_one_server(engines: Engines, pair: NixlPair) -> None:
    for num_tokens in (2, TOKENS_PER_PAGE, TOKENS_PER_PAGE + 1, CHUNK + 1, 900):
        prompt = random_prompt(num_tokens, "by NIXL's interface")
        assert generate_apart(pair.prefill, pair.decode, prompt).token_ids == engines.expected(prompt)
    # The module named ``nixl`` was kvxfer.
    for engine in (pair.prefill, pair.decode):
        for process in psutil.Process(engine.pid).children(recursive=True):
            assert "libnixl" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_many_at_once(engines: Engines, pair: NixlPair) -> None:
    prompts = [random_prompt(100 + 80 * at, ("at once", at)) for at in range(8)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda each: generate_apart(pair.prefill, pair.decode, each), prompts))
    assert [each.token_ids for each in answers] == [engines.expected(each) for each in prompts]


def test_a_prefill_that_is_killed_fails_its_own_requests(engines: Engines, pair: NixlPair) -> None:
    prompt = random_prompt(300, "after a kill")
    pair.prefill.signal(signal.SIGKILL)
    pair.prefill = pair.start("prefill")
    pair.prefill.wait_ready()
    assert generate_apart(pair.prefill, pair.decode, prompt).token_ids == engines.expected(prompt)
