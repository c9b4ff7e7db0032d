"""The translator of PTX (tests/native/ptx): what it does not know it refuses, by line and instruction.

What its instructions do is held by tests/native/ptx/test_*.cpp.
"""

from __future__ import annotations

import re

import pytest

from kvxfer.gpu import sources
from tests.native.ptx import __main__ as translator
from tests.native.ptx.emitter import emit
from tests.native.ptx.module import PtxError
from tests.native.ptx.parser import parse

FILE = """.version 9.0
.target sm_90a
.address_size 64
.global .align 4 .u32 constant = 12;
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(
	.param .u64 at,
	.param .align 8 .b8 job[40]
)
{
	.reg .pred %p<2>;
	.reg .b16 %h<2>;
	.reg .b32 %r<4>;
	.reg .b64 %rd<2>;
BODY
	ret;
}
"""
#: Where BODY begins.
LINE = 15


def translated(body: str) -> str:
    return emit(parse("kernel.ptx", FILE.replace("BODY", body)))


def refusal(body: str) -> str:
    with pytest.raises(PtxError) as caught:
        translated(body)
    message = str(caught.value)
    assert re.match(rf"kernel\.ptx:{LINE}: ", message), message
    return message.split(": ", 1)[1]


@pytest.mark.parametrize(
    "instruction",
    [
        "add.sat.s32 %r0, %r1, %r2;",
        "cvt.rn.satfinite.e2m3x2.f32 %h0, %r1, %r2;",
        "ld.global.nc.u32 %r0, [%rd0];",
        "atom.global.add.f32 %r0, [%rd0], %r1;",
        "cp.async.ca.shared.global [memory], [%rd0], 16;",
        "fence.proxy.alias;",
        "call.uni helper;",
    ],
)
def test_an_instruction_that_is_not_known_word_by_word_is_refused(instruction: str) -> None:
    opcode = instruction.split()[0]
    message = refusal(instruction)
    assert message.startswith(f"the instruction '{opcode.rstrip(';')}' is not known: "), message
    assert message.endswith(instruction)


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        ("add.s32 %r0, %r1;", "2 operands where add.s32 has 3"),
        ("add.s32 %r0, %r1, %rd0;", "a register of type b64 where s32 is expected"),
        ("add.s32 %r0, %r1, [%rd0];", "an operand that is neither a register nor a number"),
        ("add.s32 7, %r1, %r0;", "a result that goes to no register"),
        ("add.s32 %r0, %r1, 4294967296;", "4294967296 does not fit into s32"),
        ("ld.global.u32 %r0, [%r1];", "an address of type b32 in global memory"),
        ("ld.global.v4.u32 {%r0, %r1}, [%rd0];", "a vector of 2 where 4 are expected"),
        ("ld.global.u32 %r0, [constant];", "a global variable (constant) is not known here"),
        ("mov.u32 %r0, nothing;", "what is not declared (nothing) is not known here"),
        ("bar.sync 1, 32, 0;", "3 operands where bar.sync has 1"),
        ("cp.async.bulk.wait_group %r0;", "a number must stand here"),
        (
            "mbarrier.arrive.expect_tx.shared::cta.b64 %rd0, [memory], 16;",
            "a result that is not known here",
        ),
        ("add.s32 %r0, %r1, %r9;", "%r9 is no register that is declared or known"),
        ("bra nowhere;", "there is no label 'nowhere'"),
        ("add.s32 %r0, %r1, ~%r2;", "'~' is not known"),
    ],
)
def test_operands_are_what_an_instruction_takes(instruction: str, why: str) -> None:
    # A word that cannot be read at all is told without the line.
    assert refusal(instruction) in (f"{why}: {instruction}", why)


def test_a_product_and_a_sum_that_ptxas_may_make_one_instruction_of_are_refused() -> None:
    body = "mul.f32 %r0, %r1, %r2; add.f32 %r3, %r0, %r1;"
    assert refusal(body).startswith("a product and a sum that may be rounded once or twice: ")
    assert translated("mul.rn.f32 %r0, %r1, %r2; add.f32 %r3, %r0, %r1;")
    assert translated("mul.f32 %r0, %r1, %r2; add.rn.f32 %r3, %r0, %r1;")
    assert emit(parse("kernel.ptx", FILE.replace("BODY", body)), may_contract=True)


def test_parameters_are_those_of_the_abi() -> None:
    code = translated("ld.param.u32 %r0, [job+36];")
    assert 'extern "C" void kernel(ptx::u64 given_0, ptx::Bytes<40, 8> given_1) {' in code
    assert "(kParamBase + 8)} + 36" in code
    # A struct of 16 bytes comes in registers, which is not how it is taken here.
    with pytest.raises(PtxError, match=r"kernel\.ptx:6: a parameter of 16 bytes is passed in registers"):
        emit(parse("kernel.ptx", FILE.replace("job[40]", "job[16]").replace("BODY", "")))


def test_a_kernel_does_not_run_on_behind_its_end() -> None:
    with pytest.raises(PtxError, match="kernel runs on behind its last instruction"):
        emit(parse("kernel.ptx", FILE.replace("BODY", "").replace("ret;", "@%p0 ret;")))


def test_sources_are_compiled_as_kvxfer_compiles_them() -> None:
    assert (
        tuple("native" if folder == "." else f"native/{folder}" for folder in sources.INCLUDE_FOLDERS)
        == translator.INCLUDE_FOLDERS
    )
