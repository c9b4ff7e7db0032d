"""Python in documents: each block is Python, its agent options exist, and complete programs run."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

import kvxfer

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "kvxfer").glob("*.md")),
]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}")
    for path in DOCUMENTS
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    )
]
OPTIONS = {field.name for field in fields(kvxfer.AgentOptions)}


def parsed(block: str) -> ast.Module:
    found = compile(block, "document", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(found, ast.Module)
    return found


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_is_python_and_names_options_that_exist(block: str) -> None:
    for node in ast.walk(parsed(block)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AgentOptions"):
            assert {word.arg for word in node.keywords if word.arg} <= OPTIONS


def test_the_pool_of_the_page_on_programming_is_made() -> None:
    document = (ROOT / "docs/programming.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", document, re.DOTALL | re.MULTILINE)
    made: dict[str, Any] = {}
    exec(block, made)
    pool, kv, blocks = made["pool"], made["kv"], made["blocks"]
    layout = kvxfer.KVLayout.from_tensor(kv, axes="l2bthd")
    assert pool.nbytes >= layout.num_blocks * layout.block_nbytes == kv.nbytes
    assert len(blocks) == 2
    pool.free(blocks)
    assert pool.close() == {}
