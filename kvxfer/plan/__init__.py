"""A pair of layouts -> a copy program, and which ranks meet. Pure: no I/O, no clock, numpy only."""

from kvxfer.plan.compile import compile_program, differences, footprint
from kvxfer.plan.program import CopyProgram
from kvxfer.plan.sharding import Share, route

__all__ = ["CopyProgram", "Share", "compile_program", "differences", "footprint", "route"]
