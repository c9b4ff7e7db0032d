"""The parser's result for a PTX file: kernels, registers, instructions."""

from __future__ import annotations

from dataclasses import dataclass, field


class PtxError(Exception):
    """A PTX file contains something that is unknown here, or not allowed in that place."""

    def __init__(self, file: str, line: int, what: str) -> None:
        super().__init__(f"{file}:{line}: {what}")


@dataclass(frozen=True, slots=True)
class Register:
    """A register: its name in C++, and its declared type, e.g. ``"b32"``."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A number as written: ``12``, ``-1``, ``0x7770U``, ``0f3F800000``, ``1.0``."""

    text: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A parameter, a variable, a label or a special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """An address: the contents of brackets."""

    base: Register | Symbol | Immediate
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector: the contents of braces."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: a register and a predicate that one instruction sets."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """``!p``"""

    of: Register


Operand = Register | Immediate | Symbol | Address | Vector | Pair | Negated


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. ``text`` is its original line, for messages."""

    line: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | Negated | None
    text: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter, or declared memory; ``nbytes`` is 0 if the launch gives the size."""

    name: str
    nbytes: int
    alignment: int


@dataclass(slots=True)
class Kernel:
    """An entry of a PTX file."""

    name: str
    line: int
    params: list[Variable] = field(default_factory=list)
    most_threads: int = 0
    registers: dict[str, Register] = field(default_factory=dict)
    locals: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label] = field(default_factory=list)


@dataclass(slots=True)
class Module:
    """A PTX file."""

    file: str
    target: str = ""
    shared: list[Variable] = field(default_factory=list)
    globals: set[str] = field(default_factory=set)
    kernels: list[Kernel] = field(default_factory=list)
