"""Hands prompts from a prefill to a decode engine, and compares what arrives with what was sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvxfer.bench.engines.vllm_server import VllmServer, complete
from tests.vllm.engine import FLIP, TO_PREFILL, push, ranks_of
from tests.waiting import until

Heads = dict[tuple[int, int], tuple[str, ...]]


def handed_over(
    prefill: VllmServer,
    decode: VllmServer,
    prompt: str | Sequence[int],
    how: str = "pull",
    prefill_waits_s: float = 0.0,
) -> tuple[list[int], int]:
    """Returns the tokens of a pair, and how many of the prompt's came from the prefill engine.

    In a push both are asked at once, or prefill later by the given time.
    """
    before = decode.prompt_tokens("external_kv_transfer")
    if how == "push":
        ranks = ranks_of(prefill)
        tokens = push(prefill, decode, prompt, ranks, prefill_waits_s=prefill_waits_s).token_ids
    else:
        params = complete(prefill, prompt, 1, kv_transfer_params=TO_PREFILL).kv_transfer_params
        tokens = complete(decode, prompt, kv_transfer_params=params).token_ids
    return tokens, decode.prompt_tokens("external_kv_transfer") - before


def assert_handed_over(
    prefill: VllmServer, decode: VllmServer, prompt: str, how: str, expected: list[int] | None = None
) -> None:
    """Asserts that decode has a prompt's pages as they were sent, and answers as one engine does.

    Decode lacks only the last token. The expected answer is given, or comes from prefill without a handover.
    """
    before = set(observed(decode).glob("*.received"))
    tokens, brought = handed_over(prefill, decode, prompt, how)
    assert brought >= len(prompt) - 1
    assert tokens == (complete(prefill, prompt).token_ids if expected is None else expected)
    assert len(set(tokens)) > 4
    (received,) = set(observed(decode).glob("*.received")) - before
    arrived, left = heads_of(received), heads_of(observed(prefill) / received.with_suffix(".sent").name)
    # Decode takes no block for tokens before the window, and has one for later tokens.
    both_have = arrived.keys() & left.keys()
    assert both_have
    for block in both_have:
        # Every worker has the whole latent; one of them sends it.
        assert arrived[block] == left[block] or (
            len(arrived[block]) == 1 and arrived[block][0] in left[block]
        )


def assert_flipped_bits_change_the_tokens(prefill: VllmServer, decode: VllmServer, prompt: str) -> None:
    """Asserts that decode continues from what arrives; the prompt must be new to it, and used only here."""
    expected = complete(prefill, prompt).token_ids
    flip = observed(decode) / FLIP
    flip.write_text("tokens")
    try:
        assert handed_over(prefill, decode, prompt)[0] != expected
    finally:
        flip.unlink()


def observed(server: VllmServer) -> Path:
    """Returns the folder where an engine's connectors write what they saw (tests/vllm/observed.py)."""
    return server.log.parent / "observed"


def told_in(path: Path) -> dict[str, Any]:
    """Returns what a worker has written; a prefill's worker may write it after decode's answer."""
    until(path.exists, path.name)
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def heads_of(path: Path) -> Heads:
    """Returns, by group and place in its table, the hashes of a block's heads: one worker after the other."""
    first = told_in(path)
    ranks = [first["hashes"]]
    ranks += [told_in(path.with_name(f"{path.name}.{rank}"))["hashes"] for rank in range(1, first["workers"])]
    return {
        (group, at): tuple(dict.fromkeys(head for rank in ranks for head in rank[group][at]))
        for group, blocks in enumerate(ranks[0])
        for at, heads in enumerate(blocks)
        if heads
    }
