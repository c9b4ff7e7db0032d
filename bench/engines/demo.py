"""Disaggregated serving with vLLM, shown: are the tokens those of one engine?

``make demo-vllm``. A prefill and a decode engine of a tiny model run on the CPU with kvxfer's
connector and routers before them: one asks prefill and then decode, which pulls; one asks both at
once, and prefill pushes. A third engine, alone, says what the tokens must be. Status 1 when one
differs, or when decode computed by itself what it was to get.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.router_server import RouterServer
from kvxfer.bench.engines.server_process import ServerProcess
from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK, VllmServer, complete, kvxfer_config
from kvxfer.bench.errors import BenchError

_TEXT = (
    "When prefill ends, the cache of the request, thousands of small pages spread over every layer, "
    "must reach the decode worker at once: every millisecond is time to first token. "
)
# Within a block, a token more than a block, blocks to the last token, and many. The first letters
# differ, so that none finds the beginning of another in a cache.
_NUM_TOKENS = (20, 33, 64, 150, 400, 900)
# How a router asks, and what that makes of the transfer.
_DISPATCHES = (("sequential", "pull"), ("concurrent", "push"))
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


def main() -> int:
    """Runs the demonstration; returns the status of the process."""
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-demo-"))
    try:
        with ExitStack() as stack:
            answers = _answers(stack, folder, console)
    except BenchError as error:
        console.print(f"{error}\nlogs: {folder}", markup=False, soft_wrap=True)
        return 1
    console.print(_table(answers))
    wrong = [answer for answer in answers if answer.verdict != "equal"]
    if wrong:
        console.print(f"{len(wrong)} of {len(answers)} prompts went wrong; logs: {folder}")
        return 1
    console.print(f"{len(answers)} prompts, the tokens of one engine each; logs: {folder}")
    return 0


def _answers(stack: ExitStack, folder: Path, console: Console) -> list[Answer]:
    weights = tiny_models.save("llama", folder / "model")
    console.print("starting three engines, about a minute ...")
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
        for dispatch, _ in _DISPATCHES
    ]
    servers: list[ServerProcess] = [alone, prefill, decode, *routers]
    for server in servers:
        server.wait_ready()
    console.print(f"up after {time.monotonic() - started_s:.0f} s")
    # A router learns from the first answer where prefill's agents are.
    complete(routers[-1], "Where?", 1)
    return [
        _answer(how, alone, router, decode, f"{how} {number}. {_TEXT * 6}"[:length])
        for router, (_, how) in zip(routers, _DISPATCHES, strict=True)
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


def _table(answers: list[Answer]) -> Table:
    table = Table("", "prompt", "moved", "answer", "tokens of both", box=None, header_style="bold")
    for answer in answers:
        table.add_row(
            answer.how,
            f"{answer.num_prompt_tokens} tokens",
            f"{answer.num_moved_tokens} tokens",
            # Brackets in an answer are no markup.
            ascii(answer.text).replace("[", r"\["),
            answer.verdict,
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
