"""A pair of layouts -> a copy program. Pure: no I/O, no clock, numpy only."""

from kvxfer.plan.compile import compile_program, differences, footprint
from kvxfer.plan.program import CopyProgram

__all__ = ["CopyProgram", "compile_program", "differences", "footprint"]
