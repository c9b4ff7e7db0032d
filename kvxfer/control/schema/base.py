"""What all requests and answers share: bounded types, and the two kinds of models."""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

# Native code takes names and contexts of the same length (native/core: 128 bytes each).
Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
Context = Annotated[str, StringConstraints(max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]
Address = Annotated[str, StringConstraints(min_length=1, max_length=300, pattern=r"^[\x21-\x7e]+$")]
LeaseText = Annotated[
    str,
    StringConstraints(
        max_length=512, pattern=r"^kvxfer-lease-1\.[0-9a-f]{16}(\.[0-9a-f]{32}\.[A-Za-z0-9._~%-]+)?$"
    ),
]
Key = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
Tenant = Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9._:/@-]*$")]
Block = Annotated[int, Field(ge=0, le=2**40)]


def _whole(value: Any) -> Any:
    """Returns 5 for 5.0, because JSON does not tell them apart; the next check refuses other values."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and any(type(each) is float for each in value):
        return [_whole(each) for each in value]
    return value


#: Goes before the check of a whole number, or of a list of them.
WHOLE: Final = BeforeValidator(_whole)
# 65,536 ids of up to 13 digits for each end fit into a body (app/guard.py).
Blocks = Annotated[list[Block], Field(min_length=1, max_length=65536), WHOLE]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Role = Literal["read", "transfer", "admin"]
LogLevel = Literal["debug", "info", "warning", "error"]
TransferState = Literal["pending", "done", "failed", "cancelled"]


class RequestModel(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ResponseModel(BaseModel):
    """What the daemon answers."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


Item = TypeVar("Item")


class Listed(ResponseModel, Generic[Item]):
    """One page of a list; `next` is the cursor of the following page, and None on the last page."""

    items: list[Item]
    next: str | None = None


class Problem(ResponseModel):
    """An error in the form of RFC 9457; programs test `code` (docs/errors.md, docs/daemon.md)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str
