"""Tokens of leases: as text and back, and what they do not show."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import LeaseToken
from kvxfer.errors import UsageError

TOKENS = st.builds(
    LeaseToken,
    st.integers(1, 2**63 - 1),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=32),
    st.binary(min_size=16, max_size=16),
) | st.builds(LeaseToken, st.integers(2**62, 2**63 - 1))


@given(TOKENS)
def test_its_text_is_read_back_and_passes_everywhere(token: LeaseToken) -> None:
    text = str(token)
    assert text.isascii()
    assert text.isprintable()
    assert " " not in text
    assert LeaseToken.parse(text) == token
    assert pickle.loads(pickle.dumps(token)) == token  # noqa: S301


def test_its_repr_shows_no_number() -> None:
    drawn = LeaseToken.draw()
    assert repr(drawn) == "<LeaseToken>"
    assert repr(LeaseToken(drawn._number, "prefill-0", b"i" * 16)) == "<LeaseToken of 'prefill-0'>"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kvxfer-lease-1.",
        "kvxfer-lease-1.0000000000000000",
        "kvxfer-lease-1.4000000000000001 ",
        "kvxfer-lease-1.4000000000000001\n",
        "kvxfer-lease-2.4000000000000001",
        "kvxfer-lease-1.4000000000000001." + "0" * 32,
        "kvxfer-lease-1.4000000000000001." + "0" * 32 + ".",
        "kvxfer-lease-1.4000000000000001." + "0" * 32 + ".a b",
        "kvxfer-lease-1.4000000000000001." + "0" * 32 + "." + "a" * 1000,
        "kvxfer-lease-1.٤٠٠٠٠٠٠٠٠٠٠٠٠٠٠١",
    ],
)
def test_other_text_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="text is not a lease token") as caught:
        LeaseToken.parse(text)
    assert caught.value.code == "invalid-argument"
    assert "4000000000000001" not in str(caught.value)


def test_drawn_tokens_do_not_repeat_and_are_derived_alike_by_all_who_have_them() -> None:
    drawn = [LeaseToken.draw() for _ in range(100)]
    derived = [token.derive(index) for token in drawn for index in range(4)]
    assert len({*drawn, *derived}) == 500
    assert derived[:4] == [LeaseToken.parse(str(drawn[0])).derive(index) for index in range(4)]
    granted = LeaseToken(drawn[0]._number, "prefill-0", b"i" * 16)
    for other in (granted, LeaseToken(7, "prefill-0", b"i" * 16)):
        with pytest.raises(UsageError, match=r"LeaseToken\.draw"):
            other.derive(0)
