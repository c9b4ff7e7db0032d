"""Plans copies: programs for pairs of layouts, and pairs of ranks. Pure: no I/O, no clock; only numpy."""

from kvxfer.plan.compile import compile_program, differences, footprint
from kvxfer.plan.program import CopyProgram
from kvxfer.plan.sharding import Share, route

__all__ = ["CopyProgram", "Share", "compile_program", "differences", "footprint", "route"]
