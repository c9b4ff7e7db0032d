"""``kvxfer bench demo``: disaggregated serving, shown (`DemoOptions` says how)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.options import DISPATCHES, ENGINES, DemoOptions
from kvxfer.bench.engines.server_process import RouterServer, ServerProcess
from kvxfer.bench.engines.sglang_server import SglangRouter, SglangServer, generate
from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK, VllmServer, complete, kvxfer_config
from kvxfer.bench.errors import BenchError
from kvxfer.bench.report.document import Table, Words, print_parts

_TEXT = (
    "When prefill ends, the cache of the request, thousands of small pages spread over every layer, "
    "must reach the decode worker at once: every millisecond is time to first token. "
)
# Lengths: within one block, one token more than a block, whole blocks, and many blocks. The first
# letters differ, so that no prompt finds the beginning of another in a cache.
_NUM_TOKENS = (20, 33, 64, 150, 400, 900)
# The kind of transfer that each way of asking leads to.
_HOW = ("pull", "push")  # of `DISPATCHES`
_MAX_TOKENS = 32
_EQUAL = "equal"
_COMPUTED_AGAIN = "computed again: no tokens were moved"
# SGLang's prefill may hear of the transfer's end after decode's last token.
_TOLD_S = 10.0


def run(options: DemoOptions) -> int:
    """Runs the demonstration; returns the status of the process."""
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-demo-"))
    try:
        with ExitStack() as stack:
            rows = (_of_vllm if options.engine == ENGINES[0] else _of_sglang)(stack, folder)
    except BenchError as error:
        _say(f"{error}\nlogs: {folder}")
        return 1
    print_parts([Table(("prompt", "moved", "tokens of both", ""), rows)])
    wrong = sum(verdict != _EQUAL for *_, verdict, _ in rows)
    if wrong:
        _say(f"{wrong} of {len(rows)} prompts failed; logs: {folder}")
        return 1
    _say(f"{len(rows)} prompts gave the same tokens as one engine; logs: {folder}")
    return 0


def _say(words: str) -> None:
    print_parts([Words(words)])


def _wait(servers: Sequence[ServerProcess], started_s: float) -> None:
    for server in servers:
        server.wait_ready()
    _say(f"up after {time.monotonic() - started_s:.0f} s")


def _prompts(how: str) -> list[str]:
    return [f"{how} {number}. {_TEXT * 6}"[:length] for number, length in enumerate(_NUM_TOKENS)]


def _of_vllm(stack: ExitStack, folder: Path) -> list[tuple[str, str, str, str]]:
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
    _wait([alone, prefill, decode, *routers], started_s)
    # A router learns the addresses of prefill's agents from the first answer.
    complete(routers[-1], "Where?", 1)
    return [
        _answer(how, alone, router, decode, prompt)
        for router, how in zip(routers, _HOW, strict=True)
        for prompt in _prompts(how)
    ]


def _answer(
    how: str, alone: VllmServer, router: RouterServer, decode: VllmServer, prompt: str
) -> tuple[str, str, str, str]:
    """Returns a prompt's row: the question, what was moved, whether both gave equal tokens, the text."""
    moved_before = decode.prompt_tokens("external_kv_transfer")
    together = complete(router, prompt, _MAX_TOKENS)
    num_moved = decode.prompt_tokens("external_kv_transfer") - moved_before
    expected, num_tokens = complete(alone, prompt, _MAX_TOKENS).token_ids, len(together.prompt_token_ids)
    verdict = _EQUAL
    if together.token_ids != expected:
        verdict = "differs"
    elif num_moved == 0 and num_tokens > TOKENS_PER_BLOCK:
        verdict = _COMPUTED_AGAIN
    return f"{how}, {num_tokens} tokens", f"{num_moved} tokens", verdict, ascii(together.text)


def _of_sglang(stack: ExitStack, folder: Path) -> list[tuple[str, str, str, str]]:
    weights = tiny_models.save("llama", folder / "model")
    _say("starting three servers and SGLang's router, a minute or two ...")
    started_s = time.monotonic()
    alone, prefill, decode = (
        stack.enter_context(SglangServer(name, weights, folder / f"{role or 'alone'}.log", role=role))
        for name, role in (("the server alone", ""), ("prefill", "prefill"), ("decode", "decode"))
    )
    _wait([alone, prefill, decode], started_s)
    router = stack.enter_context(SglangRouter([prefill], [decode], folder / "router.log"))
    router.wait_ready()
    return [_generated(alone, router, prefill, prompt) for prompt in _prompts("push")]


def _generated(
    alone: SglangServer, router: SglangRouter, prefill: SglangServer, prompt: str
) -> tuple[str, str, str, str]:
    """Returns a prompt's row, as `_answer` does."""
    moved_before = prefill.megabytes_moved()
    together = generate(router, prompt, _MAX_TOKENS)
    give_up_s = time.monotonic() + _TOLD_S
    while (moved := prefill.megabytes_moved() - moved_before) <= 0 and time.monotonic() < give_up_s:
        time.sleep(0.05)
    verdict = _EQUAL
    if together.token_ids != generate(alone, prompt, _MAX_TOKENS).token_ids:
        verdict = "differs"
    elif moved <= 0:
        verdict = _COMPUTED_AGAIN
    return f"push, {together.num_prompt_tokens} tokens", f"{moved:.2f} MiB", verdict, ascii(together.text)
