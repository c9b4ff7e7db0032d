"""Reads PTX: accepts what NVRTC writes for our kernels, and refuses everything else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tests.native.ptx.module import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    Variable,
    Vector,
)

#: The size of registers and variables of a type, in bytes.
NBYTES: Final = {
    "pred": 1,
    **{f"{kind}{width}": width // 8 for kind in "bus" for width in (8, 16, 32, 64)},
    "f32": 4,
    "f64": 8,
}

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<string>"[^"\n]*")
      | (?P<number>0[fFdD][0-9A-Fa-f]+|0[xX][0-9A-Fa-f]+U?|\d+\.\d+|\d+U?)
      | (?P<name>[%$_A-Za-z.](?:[\w$.]|::)*)
      | (?P<mark>[][{}()<>,;:@!|+=-])""",
    re.VERBOSE | re.DOTALL,
)
# Pragmas that do not affect what a kernel does.
_PRAGMAS = re.compile(r'"(nounroll|used_bytes_mask (?:0x)?[0-9a-f]+)"')
_SPECIAL_REGISTERS = frozenset(
    f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"
) | {"%laneid"}


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    line: int


def parse(file: str, text: str) -> Module:
    """Reads a PTX file.

    Raises
    ------
    PtxError
        Something in the file is not known; the message has its line.
    """
    return _Parser(file, text).module()


class _Parser:
    def __init__(self, file: str, text: str) -> None:
        self._file = file
        self._lines = text.splitlines()
        self._tokens = list(_tokens(file, text))
        self._at = 0
        self._module = Module(file)
        # Scopes of the kernel and of its blocks: names in PTX -> registers and labels in C++.
        self._scopes: list[dict[str, Register | str]] = []
        self._num_blocks = 0

    # ---- tokens ----

    def _error(self, what: str, line: int | None = None) -> PtxError:
        if line is None:
            line = self._tokens[min(self._at, len(self._tokens) - 1)].line
        return PtxError(self._file, line, what)

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at].text if at < len(self._tokens) else ""

    def _next(self) -> str:
        text = self._peek()
        if not text:
            raise self._error("the file ends where more is expected")
        self._at += 1
        return text

    def _expect(self, text: str) -> None:
        found = self._peek()
        if found != text:
            raise self._error(f"{found!r} where {text!r} is expected")
        self._at += 1

    def _accept(self, text: str) -> bool:
        if self._peek() != text:
            return False
        self._at += 1
        return True

    def _integer(self) -> int:
        sign = -1 if self._accept("-") else 1
        text = self._next()
        try:
            return sign * int(text.removesuffix("U"), 0)
        except ValueError:
            raise self._error(f"{text!r} where a whole number is expected") from None

    # ---- files ----

    def module(self) -> Module:
        while self._peek():
            match self._next():
                case ".version":
                    self._next()
                case ".target":
                    self._module.target = self._next()
                case ".address_size":
                    if self._next() != "64":
                        raise self._error("addresses of other than 64 bits")
                case ".extern":
                    self._expect(".shared")
                    self._module.shared.append(self._variable())
                    self._expect(";")
                case ".global":
                    self._module.globals.add(self._variable().name)
                    while self._next() != ";":  # a constant that no instruction may use
                        pass
                case ".visible":
                    self._expect(".entry")
                    self._module.kernels.append(self._kernel())
                case other:
                    raise self._error(f"{other!r} is not known at the top of a file")
        return self._module

    def _variable(self) -> Variable:
        """``.align 8 .b8 name[12]`` and the like; an array without a length gets it at the launch."""
        alignment, nbytes = 0, -1
        while self._peek().startswith("."):
            match self._next():
                case ".align":
                    alignment = self._integer()
                case ".ptr" | ".const" | ".global" | ".shared":
                    pass  # the address space that a parameter points to
                case word if word[1:] in NBYTES:
                    nbytes = NBYTES[word[1:]]
                    type_alignment = nbytes
                case other:
                    raise self._error(f"{other!r} is not known in a declaration")
        if nbytes < 0:
            raise self._error("a declaration without a type")
        name = self._next()
        if self._accept("["):
            nbytes *= 0 if self._peek() == "]" else self._integer()
            self._expect("]")
        return Variable(name, nbytes, alignment or type_alignment)

    # ---- kernels ----

    def _kernel(self) -> Kernel:
        line = self._tokens[self._at].line
        kernel = Kernel(self._next(), line)
        self._scopes = [{}]
        if self._accept("("):
            while not self._accept(")"):
                self._expect(".param")
                kernel.params.append(self._param())
                if self._peek() != ")":
                    self._expect(",")
        while not self._accept("{"):
            match self._next():
                case ".maxntid":
                    kernel.most_threads = self._product()
                case ".minnctapersm":
                    self._integer()
                case other:
                    raise self._error(f"{other!r} is not known of a kernel")
        self._block(kernel)
        return kernel

    def _param(self) -> Variable:
        # ".param .u64 .ptr .global .align 1 name": the alignment is that of the pointed-to memory.
        points = self._peek(1) == ".ptr"
        found = self._variable()
        return Variable(found.name, found.nbytes, 8) if points else found

    def _product(self) -> int:
        product = self._integer()
        while self._accept(","):
            product *= self._integer()
        return product

    def _block(self, kernel: Kernel) -> None:
        self._find_labels()
        while not self._accept("}"):
            match self._peek():
                case "{":
                    self._next()
                    self._num_blocks += 1
                    self._scopes.append({})
                    self._block(kernel)
                    self._scopes.pop()
                case ".reg":
                    self._next()
                    self._registers(kernel)
                case ".local":
                    self._next()
                    kernel.locals.append(self._variable())
                    self._expect(";")
                case ".pragma":
                    self._next()
                    if not _PRAGMAS.fullmatch(self._peek()):
                        raise self._error(f"a pragma that is not known: {self._peek()}")
                    self._next()
                    self._expect(";")
                case name if self._peek(1) == ":":
                    self._next()
                    self._next()
                    kernel.body.append(Label(self._label(name)))
                case _:
                    kernel.body.append(self._instruction())

    def _suffix(self) -> str:
        return f"_{self._num_blocks}" if len(self._scopes) > 1 else ""

    def _registers(self, kernel: Kernel) -> None:
        type_ = self._next().removeprefix(".")
        if type_ not in NBYTES or type_ == "f64":
            raise self._error(f"registers of type {type_!r} are not known")
        while True:
            name = self._next()
            names = [name]
            if self._accept("<"):
                names = [f"{name}{number}" for number in range(self._integer())]
                self._expect(">")
            for each in names:
                register = Register("r_" + re.sub(r"\W", "", each) + self._suffix(), type_)
                self._scopes[-1][each] = register
                kernel.registers[register.name] = register
            if not self._accept(","):
                break
        self._expect(";")

    def _find_labels(self) -> None:
        """Finds the labels of a block, which are known in all of it, also before their definition."""
        depth = 0
        for at in range(self._at, len(self._tokens)):
            text = self._tokens[at].text
            if text == "{":
                depth += 1
            elif text == "}":
                if depth == 0:
                    return
                depth -= 1
            elif text == ":" and depth == 0:
                name = self._tokens[at - 1].text
                self._scopes[-1][name] = re.sub(r"\W", "_", name) + self._suffix()

    def _label(self, name: str, line: int | None = None) -> str:
        for scope in reversed(self._scopes):
            found = scope.get(name)
            if isinstance(found, str):
                return found
        raise self._error(f"there is no label {name!r}", line)

    # ---- instructions ----

    def _instruction(self) -> Instruction:
        line = self._tokens[self._at].line
        guard: Register | Negated | None = None
        if self._accept("@"):
            operand = self._operand()
            if not isinstance(operand, Register | Negated):
                raise self._error("a guard that is no predicate")
            guard = operand
        opcode = self._next()
        operands: list[Operand] = []
        if self._peek() != ";":
            operands.append(self._operand())
            while self._accept(","):
                operands.append(self._operand())
        self._expect(";")
        if opcode in ("bra", "bra.uni"):
            operands = [
                Symbol(self._label(each.name, line)) if isinstance(each, Symbol) else each
                for each in operands
            ]
        text = " ".join(self._lines[line - 1].split())
        return Instruction(line, opcode, tuple(operands), guard, text)

    def _operand(self) -> Operand:
        first = self._simple_operand()
        if self._accept("|"):
            return Pair(first, self._simple_operand())
        return first

    def _simple_operand(self) -> Operand:
        text = self._peek()
        if text == "!":
            self._next()
            negated = self._simple_operand()
            if not isinstance(negated, Register):
                raise self._error("a negation of what is no predicate")
            return Negated(negated)
        if text == "{":
            self._next()
            items = [self._simple_operand()]
            while self._accept(","):
                items.append(self._simple_operand())
            self._expect("}")
            return Vector(tuple(items))
        if text == "[":
            self._next()
            base = self._simple_operand()
            if not isinstance(base, Register | Symbol | Immediate):
                raise self._error("an address that is not known")
            offset = self._integer() if self._accept("+") else 0
            self._expect("]")
            return Address(base, offset)
        if text == "-":
            self._next()
            return Immediate("-" + self._next())
        self._next()
        if text[0].isdigit():
            return Immediate(text)
        for scope in reversed(self._scopes):
            found = scope.get(text)
            if isinstance(found, Register):
                return found
        if text.startswith("%") and text not in _SPECIAL_REGISTERS:
            raise self._error(f"{text} is no register that is declared or known")
        return Symbol(text)


def _tokens(file: str, text: str) -> list[_Token]:
    tokens = []
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise PtxError(file, line, f"{text[at]!r} is not known")
        if found.lastgroup != "space":
            tokens.append(_Token(found.group(), line))
        line += found.group().count("\n")
        at = found.end()
    return tokens
