"""What two agents check of a program: its structure, its frame, and the bytes of both regions' blocks."""

from __future__ import annotations

import numpy as np

from kvxfer import _native
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.plan.compile import footprint
from kvxfer.plan.program import CopyProgram
from kvxfer.session.requests import Program


def require_accepted(program: CopyProgram, src: KVLayout, dst: KVLayout) -> None:
    """Raises NativeError where an agent would refuse what both ends' layouts compiled to."""
    ends = [(np.array(footprint(end)), end.num_blocks, end.nbytes) for end in (src, dst)]
    _native.check_ends(Program.of(program), *ends)
