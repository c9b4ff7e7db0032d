"""``kvxfer bench demo``: disaggregated serving with vLLM, shown (`DemoOptions` says how)."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.options import DISPATCHES, DemoOptions
from kvxfer.bench.engines.router_server import RouterServer
from kvxfer.bench.engines.server_process import ServerProcess
from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK, VllmServer, complete, kvxfer_config
from kvxfer.bench.errors import BenchError
from kvxfer.bench.report.document import Table, Words, print_parts

_TEXT = (
    "When prefill ends, the cache of the request, thousands of small pages spread over every layer, "
    "must reach the decode worker at once: every millisecond is time to first token. "
)
# Within a block, a token more than a block, blocks to the last token, and many. The first letters
# differ, so that none finds the beginning of another in a cache.
_NUM_TOKENS = (20, 33, 64, 150, 400, 900)
# What each way in which a router asks makes of the transfer.
_HOW = ("pull", "push")  # of `DISPATCHES`
_MAX_TOKENS = 32


@dataclass(frozen=True)
class Answer:
    """One prompt, answered by one engine and by two."""

    how: str
    num_prompt_tokens: int
    num_moved_tokens: int
    alone: list[int]
    together: list[int]
    text: str

    @property
    def verdict(self) -> str:
        """``equal``, or what is wrong."""
        if self.together != self.alone:
            pairs = zip(self.together, self.alone, strict=False)
            first = next((number for number, (a, b) in enumerate(pairs) if a != b), "the end")
            return f"differs from {first} on"
        if self.num_moved_tokens == 0 and self.num_prompt_tokens > TOKENS_PER_BLOCK:
            return "computed again: nothing was moved"
        return "equal"


def run(options: DemoOptions) -> int:
    """Runs the demonstration; returns the status of the process."""
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-demo-"))
    try:
        with ExitStack() as stack:
            answers = _answers(stack, folder)
    except BenchError as error:
        _say(f"{error}\nlogs: {folder}")
        return 1
    rows = [
        (
            f"{answer.how}, {answer.num_prompt_tokens} tokens",
            f"{answer.num_moved_tokens} tokens",
            answer.verdict,
            ascii(answer.text),
        )
        for answer in answers
    ]
    print_parts([Table(("prompt", "moved", "tokens of both", ""), rows)])
    wrong = sum(answer.verdict != "equal" for answer in answers)
    if wrong:
        _say(f"{wrong} of {len(answers)} prompts went wrong; logs: {folder}")
        return 1
    _say(f"{len(answers)} prompts, the tokens of one engine each; logs: {folder}")
    return 0


def _say(words: str) -> None:
    print_parts([Words(words)])


def _answers(stack: ExitStack, folder: Path) -> list[Answer]:
    weights = tiny_models.save("llama", folder / "model")
    _say("starting three engines, about a minute ...")
    started_s = time.monotonic()
    alone = stack.enter_context(VllmServer("the engine alone", weights, folder / "alone.log"))
    prefill, decode = (
        stack.enter_context(
            VllmServer(role, weights, folder / f"{role}.log", kv_transfer_config=kvxfer_config(kind))
        )
        for role, kind in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    )
    routers = [
        stack.enter_context(
            RouterServer([prefill.url], [decode.url], folder / f"{dispatch}-router.log", dispatch)
        )
        for dispatch in DISPATCHES
    ]
    servers: list[ServerProcess] = [alone, prefill, decode, *routers]
    for server in servers:
        server.wait_ready()
    _say(f"up after {time.monotonic() - started_s:.0f} s")
    # A router learns from the first answer where prefill's agents are.
    complete(routers[-1], "Where?", 1)
    return [
        _answer(how, alone, router, decode, f"{how} {number}. {_TEXT * 6}"[:length])
        for router, how in zip(routers, _HOW, strict=True)
        for number, length in enumerate(_NUM_TOKENS)
    ]


def _answer(how: str, alone: VllmServer, router: RouterServer, decode: VllmServer, prompt: str) -> Answer:
    moved_before = decode.prompt_tokens("external_kv_transfer")
    together = complete(router, prompt, _MAX_TOKENS)
    return Answer(
        how,
        len(together.prompt_token_ids),
        decode.prompt_tokens("external_kv_transfer") - moved_before,
        complete(alone, prompt, _MAX_TOKENS).token_ids,
        together.token_ids,
        together.text,
    )
