"""What prefill leaves to decode: the prompt's last token, where a cache holds states.

A decode engine computes the last token of a prompt itself, to sample from it. Keys and values do not
mind being written again, but a state would take the token in twice. So prefill ends one token before,
and what it samples there is nobody's answer: routers do not look at it.
"""

from __future__ import annotations

from vllm.v1.request import Request

from kvxfer.connectors.vllm.cache_groups import CacheGroup


def num_held_back(groups: tuple[CacheGroup, ...]) -> int:
    """Returns how many of a prompt's last tokens prefill does not compute, and decode does."""
    return int(any(group.is_state for group in groups))


def hold_back(request: Request, num_tokens: int) -> bool:
    """Takes the last tokens from a request that has just arrived; returns whether that can be done.

    It cannot where nothing would be left, and for prompts whose tokens decode computes in any case
    (their log probabilities are asked for), that are not tokens, or that go on later.
    """
    if (
        not request.prompt_token_ids
        or request.num_prompt_tokens <= num_tokens
        or request.skip_reading_prefix_cache
        or request.resumable
    ):
        return False
    # The list is the front end's as well.
    request.prompt_token_ids = request.prompt_token_ids[:-num_tokens]
    request.num_prompt_tokens -= num_tokens
    del request._all_token_ids[-num_tokens:]
    # A hash of the last block may have counted them in.
    del request.block_hashes[-1:]
    request.update_block_hashes()
    # Another token would move the state on.
    request.max_tokens = 1
    return True
