"""Writes a PTX file's kernels as C++ functions of the same names.

A register becomes a local variable, an instruction a statement, and a branch a goto.

A kernel's parameters are the function's parameters: numbers as they are, structs as arrays of bytes. So the
ABIs of x86-64 and aarch64 pass what the tests declare with their own types, including structs of more than 16
bytes.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from typing import Final

from tests.native.ptx.instructions import FORMS, Form
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
    Vector,
)
from tests.native.ptx.parser import NBYTES

_HEX_FLOAT = re.compile(r"0[fF]([0-9A-Fa-f]{8})")
_SPECIAL: Final = {"tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}
_MOVES: Final = frozenset(f"{kind}{width}" for kind in "bus" for width in (16, 32, 64)) | {"f32", "pred"}
_SCALARS: Final = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def emit(module: Module, *, may_contract: bool = False) -> str:
    """Returns a file's kernels as C++ that includes machine.h.

    ``may_contract``: if ptxas may round a product and a sum once or twice, they are rounded twice, since the
    kernels are right either way. Without it such kernels are refused.

    Raises
    ------
    PtxError
        An instruction is not known, or its operands do not fit; the message has its line.
    """
    file = _File(module, may_contract)
    kernels = [file.kernel(kernel) for kernel in module.kernels]
    return "\n".join(
        [
            f"// {module.file}, of PTX for {module.target}.",
            '#include "ptx/machine.h"',
            "",
            "namespace {",
            "using namespace ptx;",
            *file.places(),
            "}  // namespace",
            "",
            *kernels,
        ]
    )


def declare(module: Module) -> str:
    """Returns a header that declares a file's kernels, whose parameters are numbers."""
    lines = ["#pragma once", "", "#include <cstdint>", ""]
    for kernel in module.kernels:
        types = [f"std::uint{8 * each.nbytes}_t" for each in kernel.params]
        lines.append(f'extern "C" void {kernel.name}({", ".join(types)});')
    return "\n".join([*lines, ""])


def _nbits(type_: str) -> int:
    return 1 if type_ == "pred" else 8 * NBYTES[type_]


def _cpp(type_: str) -> str:
    return "bool" if type_ == "pred" else f"u{_nbits(type_)}"


class _File:
    def __init__(self, module: Module, may_contract: bool) -> None:
        self._module = module
        self._may_contract = may_contract
        self._places: dict[int, str] = {}
        self._kernel = Kernel("", 0)
        # Offsets of parameters and local variables in the thread's memory, and of shared variables.
        self._addresses: dict[str, str] = {}

    def _error(self, at: Instruction, what: str) -> PtxError:
        return PtxError(self._module.file, at.line, f"{what}: {at.text}")

    # ---- places ----

    def _place(self, line: int, text: str) -> str:
        self._places[line] = text
        return f"kPlace{line}"

    def places(self) -> Iterator[str]:
        file = json.dumps(self._module.file)
        for line, text in sorted(self._places.items()):
            yield f"constexpr Place kPlace{line}{{{file}, {line}, {json.dumps(text)}}};"

    # ---- kernels ----

    def kernel(self, kernel: Kernel) -> str:
        self._kernel = kernel
        self._addresses = {each.name: "kSharedBase" for each in self._module.shared}
        if len(self._module.shared) > 1:
            raise PtxError(self._module.file, kernel.line, "more than one variable in shared memory")
        lines, params, params_nbytes = self._params(kernel)
        local_nbytes = self._locals(kernel)
        body = [*self._body(kernel)]
        used = {name for line in body for name in re.findall(r"\br_\w+", line)}
        registers = [
            f"  {_cpp(each.type)} {each.name} = kUnset<{_cpp(each.type)}>;"
            for each in kernel.registers.values()
            if each.name in used
        ]
        place = self._place(kernel.line, kernel.name)
        return "\n".join(
            [
                f'extern "C" void {kernel.name}({", ".join(params)}) {{',
                f"  check_launch({place}, {kernel.most_threads});",
                f"  alignas(16) std::byte params[{max(params_nbytes, 1)}];",
                *lines,
                f"  alignas(16) std::byte local[{max(local_nbytes, 1)}];",
                f"  const Frame frame{{params, {params_nbytes}, local, {local_nbytes}}};",
                "  static_cast<void>(frame);",
                *registers,
                *body,
                "}",
                "",
            ]
        )

    def _params(self, kernel: Kernel) -> tuple[list[str], list[str], int]:
        """Returns where parameters lie: one after the other, each on its own alignment, as in a launch."""
        lines, params, end = [], [], 0
        for index, each in enumerate(kernel.params):
            end = -(-end // each.alignment) * each.alignment
            self._addresses[each.name] = f"(kParamBase + {end})"
            if each.nbytes in _SCALARS and each.alignment == each.nbytes:
                params.append(f"ptx::{_SCALARS[each.nbytes]} given_{index}")
            elif each.nbytes > 16:
                params.append(f"ptx::Bytes<{each.nbytes}, {each.alignment}> given_{index}")
            else:
                raise PtxError(
                    self._module.file,
                    kernel.line,
                    f"a parameter of {each.nbytes} bytes is passed in registers",
                )
            lines.append(f"  __builtin_memcpy(params + {end}, &given_{index}, {each.nbytes});")
            end += each.nbytes
        return lines, params, end

    def _locals(self, kernel: Kernel) -> int:
        end = 0
        for each in kernel.locals:
            end = -(-end // each.alignment) * each.alignment
            self._addresses[each.name] = f"(kLocalBase + {end})"
            end += each.nbytes
        return end

    def _body(self, kernel: Kernel) -> Iterator[str]:
        if not self._may_contract:
            self._check_contractions(kernel)
        last: Instruction | None = None
        for each in kernel.body:
            if isinstance(each, Label):
                yield f"{each.name}:;"
                last = None
                continue
            last = each
            statement = self._statement(each)
            if each.guard is not None:
                statement = f"if ({self._predicate(each, each.guard)}) {{ {statement} }}"
            yield f"  {statement}"
        if last is None or last.opcode not in ("ret", "exit", "bra", "bra.uni") or last.guard is not None:
            raise PtxError(
                self._module.file, kernel.line, f"{kernel.name} runs on behind its last instruction"
            )

    def _check_contractions(self, kernel: Kernel) -> None:
        """Without rounding modes ptxas may round a product and a sum once or twice."""
        products: set[str] = set()
        for each in kernel.body:
            if isinstance(each, Instruction) and each.opcode == "mul.f32":
                products |= {operand.name for operand in each.operands[:1] if isinstance(operand, Register)}
        for each in kernel.body:
            if isinstance(each, Instruction) and each.opcode in ("add.f32", "sub.f32"):
                for operand in each.operands[1:]:
                    if isinstance(operand, Register) and operand.name in products:
                        raise self._error(each, "a product and a sum that may be rounded once or twice")

    # ---- instructions ----

    def _statement(self, at: Instruction) -> str:
        match at.opcode:
            case "bra" | "bra.uni":
                (label,) = at.operands
                assert isinstance(label, Symbol)
                return f"goto {label.name};"
            case "ret" | "exit":
                return "return;"
            case "trap":
                return f'trap({self._place(at.line, at.text)}, "the kernel ends itself");'
        if at.opcode.startswith("mov."):
            return self._move(at, at.opcode.removeprefix("mov."))
        form = FORMS.get(f"{at.opcode}/{len(at.operands)}", FORMS.get(at.opcode))
        if form is None:
            raise self._error(at, f"the instruction {at.opcode!r} is not known")
        if len(form.operands) != len(at.operands):
            raise self._error(at, f"{len(at.operands)} operands where {at.opcode} has {len(form.operands)}")
        return self._call(at, form)

    def _call(self, at: Instruction, form: Form) -> str:
        arguments: list[str] = []
        if form.has_place:
            arguments.append(self._place(at.line, at.text))
        if form.has_frame:
            arguments.append("frame")
        set_by = "{call};"
        for what, operand in zip(form.operands, at.operands, strict=True):
            kind, _, type_ = what.partition(":")
            match kind:
                case "d" | "D" if type_.endswith("|pred"):
                    set_by = self._set_pair(at, operand, type_.removesuffix("|pred"))
                case "d" | "D":
                    set_by = self._set(at, operand, type_, may_be_wider=kind == "D")
                case "dv":
                    set_by = self._set_vector(at, operand, type_)
                case "_":
                    if operand != Symbol("_"):
                        raise self._error(at, "a result that is not known here")
                case "s" | "S":
                    arguments.append(self._value(at, operand, type_, may_be_wider=kind == "S"))
                case "sv":
                    arguments.append(self._vector(at, operand, type_))
                case "a":
                    arguments.append(self._address(at, operand, type_))
                case "n":
                    arguments.append(self._number(at, operand))
                case _:
                    raise AssertionError(what)
        call, _, function = form.call.partition("/")
        if call == "redux":
            arguments.append(f"ptx::{function}")
        elif function:  # the function by which an atomic operation changes a word
            num_words = 2 if function == "Cas" else 1
            arguments[-num_words:] = [f"ptx::{function}{{{', '.join(arguments[-num_words:])}}}"]
        return set_by.format(call=f"ptx::{call}({', '.join(arguments)})")

    def _move(self, at: Instruction, type_: str) -> str:
        if type_ not in _MOVES or len(at.operands) != 2:
            raise self._error(at, f"the instruction {at.opcode!r} is not known")
        to, source = at.operands
        if isinstance(to, Vector):  # unpacked, the first from the low bits
            width = _nbits(type_) // len(to.items)
            value = self._value(at, source, type_)
            parts = [
                self._set(at, item, f"b{width}").format(call=f"static_cast<u{width}>({value} >> {width * k})")
                for k, item in enumerate(to.items)
                if item != Symbol("_")
            ]
            return " ".join(parts)
        if isinstance(source, Vector):
            width = _nbits(type_) // len(source.items)
            whole = " | ".join(
                f"static_cast<{_cpp(type_)}>({self._value(at, item, f'b{width}')}) << {width * k}"
                for k, item in enumerate(source.items)
            )
            return self._set(at, to, type_).format(call=f"static_cast<{_cpp(type_)}>({whole})")
        if isinstance(source, Symbol):
            return self._set(at, to, type_).format(call=self._symbol(at, source))
        return self._set(at, to, type_).format(call=self._value(at, source, type_))

    # ---- operands ----

    def _check_width(
        self, at: Instruction, register: Register, type_: str, may_be_wider: bool = False
    ) -> None:
        has, wants = _nbits(register.type), _nbits(type_)
        is_predicate = register.type == "pred"
        if is_predicate != (type_ == "pred") or has < wants or (has > wants and not may_be_wider):
            raise self._error(at, f"a register of type {register.type} where {type_} is expected")

    def _set(self, at: Instruction, operand: Operand, type_: str, may_be_wider: bool = False) -> str:
        if not isinstance(operand, Register):
            raise self._error(at, "a result that goes to no register")
        self._check_width(at, operand, type_, may_be_wider)
        if _nbits(operand.type) == _nbits(type_):
            return f"{operand.name} = {{call}};"
        signed = f"{'s' if type_[0] == 's' else 'u'}{type_[1:]}"
        return f"{operand.name} = widened<{signed}, {_cpp(operand.type)}>({{call}});"

    def _set_pair(self, at: Instruction, operand: Operand, type_: str) -> str:
        first, second = (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)
        statement = f"const auto both = {{call}}; {self._set(at, first, type_).format(call='both.value')}"
        if second is not None:
            statement += " " + self._set(at, second, "pred").format(call="both.is_in_range")
        return "{{ " + statement + " }}"

    def _items(self, at: Instruction, operand: Operand, count: int) -> tuple[Operand, ...]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if len(items) != count:
            raise self._error(at, f"a vector of {len(items)} where {count} are expected")
        return items

    def _set_vector(self, at: Instruction, operand: Operand, type_: str) -> str:
        type_, _, count = type_.partition("*")
        sets = [
            self._set(at, item, type_, may_be_wider=True).format(call=f"loaded[{k}]")
            for k, item in enumerate(self._items(at, operand, int(count)))
            if item != Symbol("_")
        ]
        return "{{ const auto loaded = {call}; " + " ".join(sets) + " }}"

    def _vector(self, at: Instruction, operand: Operand, type_: str) -> str:
        type_, _, count = type_.partition("*")
        items = [
            self._value(at, item, type_, may_be_wider=True) for item in self._items(at, operand, int(count))
        ]
        return "{{" + ", ".join(items) + "}}"

    def _predicate(self, at: Instruction, operand: Register | Negated) -> str:
        register = operand.of if isinstance(operand, Negated) else operand
        self._check_width(at, register, "pred")
        return f"{'!' if isinstance(operand, Negated) else ''}{register.name}"

    def _value(self, at: Instruction, operand: Operand, type_: str, may_be_wider: bool = False) -> str:
        if isinstance(operand, Negated):
            return self._predicate(at, operand)
        if isinstance(operand, Register):
            self._check_width(at, operand, type_, may_be_wider)
            if _nbits(operand.type) == _nbits(type_):
                return operand.name
            return f"static_cast<{_cpp(type_)}>({operand.name})"
        if isinstance(operand, Immediate):
            return self._immediate(at, operand, type_)
        raise self._error(at, "an operand that is neither a register nor a number")

    def _immediate(self, at: Instruction, operand: Immediate, type_: str) -> str:
        if found := _HEX_FLOAT.fullmatch(operand.text):
            if type_ not in ("f32", "b32"):
                raise self._error(at, f"a float32 where {type_} is expected")
            return f"0x{found[1]}u"
        if type_ == "f32":
            try:
                bits = struct.unpack("<I", struct.pack("<f", float(operand.text)))[0]
            except (ValueError, OverflowError):
                raise self._error(at, f"{operand.text} is no float32") from None
            return f"{bits:#x}u"
        try:
            value = int(operand.text.removesuffix("U"), 0)
        except ValueError:
            raise self._error(at, f"{operand.text} is no whole number") from None
        nbits = _nbits(type_)
        if not -(1 << (nbits - 1)) <= value < 1 << nbits:
            raise self._error(at, f"{value} does not fit into {type_}")
        if type_ == "pred":
            return "true" if value else "false"
        return f"{_cpp(type_)}{{{value & ((1 << nbits) - 1):#x}{'ull' if nbits == 64 else ''}}}"

    def _number(self, at: Instruction, operand: Operand) -> str:
        if not isinstance(operand, Immediate):
            raise self._error(at, "a number must stand here")
        return self._immediate(at, operand, "u32")

    def _symbol(self, at: Instruction, operand: Symbol) -> str:
        name, _, axis = operand.name.removeprefix("%").partition(".")
        if operand.name == "%laneid":
            return "ptx::lane()"
        if operand.name.startswith("%"):
            return f"{_SPECIAL[name]}.{axis}"
        if operand.name in self._addresses:
            return self._addresses[operand.name]
        kind = "a global variable" if operand.name in self._module.globals else "what is not declared"
        raise self._error(at, f"{kind} ({operand.name}) is not known here")

    def _address(self, at: Instruction, operand: Operand, space: str) -> str:
        if not isinstance(operand, Address):
            raise self._error(at, "an operand that is no address")
        base = operand.base
        if isinstance(base, Symbol):
            if base.name.startswith("%"):
                raise self._error(at, "a special register is no address")
            where = f"u64{{{self._symbol(at, base)}}}"
        elif isinstance(base, Register):
            widths = (32, 64) if space in ("shared", "param", "local") else (64,)
            if base.type == "pred" or _nbits(base.type) not in widths:
                raise self._error(at, f"an address of type {base.type} in {space} memory")
            where = base.name
        else:
            where = self._immediate(at, base, "u64")
        # Within a register's width, like additions.
        offset = (
            f" + {operand.offset}"
            if operand.offset > 0
            else f" - {-operand.offset}"
            if operand.offset
            else ""
        )
        return f"{where}{offset}"
