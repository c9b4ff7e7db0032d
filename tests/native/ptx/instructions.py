"""The known instructions: their operands, and the function of machine.h for each.

An opcode that is not literally in `FORMS` is refused. To add one, read it in the PTX ISA, add a form here
and, if necessary, a function in C++; then add a line to instructions.ptx or a kernel to planted.ptx that
would notice a wrong result.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final


@dataclass(frozen=True, slots=True)
class Form:
    """The meaning of an opcode.

    Attributes
    ----------
    operands
        One word for each operand. ``d:T`` is set and ``s:T`` is read: a register of T's width or, if read, a
        number. ``D:T`` and ``S:T`` may be wider registers. ``d:T|pred`` sets two. ``dv:T*4`` and ``sv:T*4``
        are vectors whose registers may be wider. ``a:shared`` and the like are addresses. ``n`` is a number
        in the instruction. ``_`` is a discarded result. If an opcode has forms with different numbers of
        operands, one of them is `FORMS["bar.sync/2"]`.
    call
        A function of machine.h.
    has_place
        The function gets its place in the PTX, since it waits or can end the program.
    has_frame
        The function gets the thread's private memory.
    """

    operands: tuple[str, ...]
    call: str
    has_place: bool = False
    has_frame: bool = False


FORMS: Final[dict[str, Form]] = {}


def _add(opcode: str, operands: str, call: str, *, place: bool = False, frame: bool = False) -> None:
    assert opcode not in FORMS, opcode
    FORMS[opcode] = Form(tuple(operands.split()), call, place, frame)


_WIDTHS: Final = (16, 32, 64)
_INTEGERS: Final = tuple(f"{kind}{width}" for kind in "us" for width in _WIDTHS)

# ---- integers ----

for _t in _INTEGERS:
    for _name in ("add", "sub", "min", "max"):
        _add(f"{_name}.{_t}", f"d:{_t} s:{_t} s:{_t}", f"{_name}<{_t}>")
    _add(f"mul.lo.{_t}", f"d:{_t} s:{_t} s:{_t}", f"mul_lo<{_t}>")
    _add(f"mul.hi.{_t}", f"d:{_t} s:{_t} s:{_t}", f"mul_hi<{_t}>")
    _add(f"mad.lo.{_t}", f"d:{_t} s:{_t} s:{_t} s:{_t}", f"mad_lo<{_t}>")
    for _name in ("div", "rem"):
        _add(f"{_name}.{_t}", f"d:{_t} s:{_t} s:{_t}", f"{_name}<{_t}>", place=True)
for _t in ("s16", "s32", "s64"):
    _add(f"neg.{_t}", f"d:{_t} s:{_t}", f"neg<{_t}>")
    _add(f"abs.{_t}", f"d:{_t} s:{_t}", f"abs<{_t}>")
for _t, _wide in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
    _add(f"mul.wide.{_t}", f"d:{_wide} s:{_t} s:{_t}", f"mul_wide<{_t}>")
    _add(f"mad.wide.{_t}", f"d:{_wide} s:{_t} s:{_t} s:{_wide}", f"mad_wide<{_t}>")

# ---- bits ----

for _t in ("pred", "b16", "b32", "b64"):
    _cpp = "bool" if _t == "pred" else f"u{_t[1:]}"
    for _name in ("and", "or", "xor"):
        _add(f"{_name}.{_t}", f"d:{_t} s:{_t} s:{_t}", f"l{_name}<{_cpp}>")
    _add(f"not.{_t}", f"d:{_t} s:{_t}", f"lnot<{_cpp}>")
for _width in _WIDTHS:
    _b, _u, _s = f"b{_width}", f"u{_width}", f"s{_width}"
    _add(f"shl.{_b}", f"d:{_b} s:{_b} s:u32", f"shl<{_u}>")
    _add(f"shr.{_b}", f"d:{_b} s:{_b} s:u32", f"shr<{_u}>")
    _add(f"shr.{_u}", f"d:{_b} s:{_b} s:u32", f"shr<{_u}>")
    _add(f"shr.{_s}", f"d:{_b} s:{_b} s:u32", f"shr<{_s}>")
for _width in (32, 64):
    _b, _u, _s = f"b{_width}", f"u{_width}", f"s{_width}"
    _add(f"bfe.{_u}", f"d:{_b} s:{_b} s:u32 s:u32", f"bfe<{_u}>")
    _add(f"bfe.{_s}", f"d:{_b} s:{_b} s:u32 s:u32", f"bfe<{_s}>")
    _add(f"bfi.{_b}", f"d:{_b} s:{_b} s:{_b} s:u32 s:u32", f"bfi<{_u}>")
    _add(f"popc.{_b}", f"d:u32 s:{_b}", f"popc<{_u}>")
    _add(f"clz.{_b}", f"d:u32 s:{_b}", f"clz<{_u}>")
for _side, _mode in product("lr", ("wrap", "clamp")):
    _add(
        f"shf.{_side}.{_mode}.b32",
        "d:b32 s:b32 s:b32 s:u32",
        f"shf_{_side}<{'true' if _mode == 'wrap' else 'false'}>",
    )
_add("prmt.b32", "d:b32 s:b32 s:b32 s:b32", "prmt")
_add("lop3.b32", "d:b32 s:b32 s:b32 s:b32 n", "lop3")

# ---- comparisons and choices ----

_ORDERS: Final = ("eq", "ne", "lt", "le", "gt", "ge")
for _t, _order in product(_INTEGERS, _ORDERS):
    _add(f"setp.{_order}.{_t}", f"d:pred s:{_t} s:{_t}", f"{_order}<{_t}>")
for _width, _order in product(_WIDTHS, ("eq", "ne")):
    _add(f"setp.{_order}.b{_width}", f"d:pred s:b{_width} s:b{_width}", f"{_order}<u{_width}>")
for _order in (*_ORDERS, *(f"{order}u" for order in _ORDERS), "num", "nan"):
    _add(f"setp.{_order}.f32", "d:pred s:f32 s:f32", f"{_order}_f32")
for _kind, _width in product("bus", _WIDTHS):
    _t = f"{_kind}{_width}"
    _add(f"selp.{_t}", f"d:{_t} s:{_t} s:{_t} s:pred", f"selp<u{_width}>")
_add("selp.f32", "d:f32 s:f32 s:f32 s:pred", "selp<u32>")

# ---- float32 ----

# Without a rounding mode it also rounds to nearest, but may be fused with an addition (emitter.py checks
# that).
for _name, _rounding in product(("add", "sub", "mul"), ("", ".rn")):
    _add(f"{_name}{_rounding}.f32", "d:f32 s:f32 s:f32", f"{_name}_f32")
_add("fma.rn.f32", "d:f32 s:f32 s:f32 s:f32", "fma_f32")
_add("div.rn.f32", "d:f32 s:f32 s:f32", "div_f32")
_add("rcp.rn.f32", "d:f32 s:f32", "rcp_rn_f32")
_add("rcp.rz.f32", "d:f32 s:f32", "rcp_rz_f32")
for _name in ("abs", "neg"):
    _add(f"{_name}.f32", "d:f32 s:f32", f"{_name}_f32")
for _name in ("copysign", "min", "max"):
    _add(f"{_name}.f32", "d:f32 s:f32 s:f32", f"{_name}_f32")

# ---- conversions ----

_ALL_INTEGERS: Final = ("u8", "s8", *_INTEGERS)
for _to, _from in product(_ALL_INTEGERS, repeat=2):
    if _to != _from:
        _add(f"cvt.{_to}.{_from}", f"D:{_to} S:{_from}", f"cvt<{_from}, {_to}>")
for _t in _ALL_INTEGERS:
    _add(f"cvt.rn.f32.{_t}", f"d:f32 S:{_t}", f"cvt_rn_f32<{_t}>")
for _t, _mode in product(("u32", "s32"), ("rni", "rzi")):
    _add(f"cvt.{_mode}.{_t}.f32", f"d:{_t} s:f32", f"cvt_{_mode}<{_t}>")
_add("cvt.f32.f16", "d:f32 s:b16", "cvt_f32_f16")
_add("cvt.rn.f16x2.f32", "d:b32 s:f32 s:f32", "cvt_f16x2")
_add("cvt.rn.bf16x2.f32", "d:b32 s:f32 s:f32", "cvt_bf16x2")
for _name in ("e4m3", "e5m2"):
    _dtype = f"Dtype::k{_name.capitalize()}"
    _add(f"cvt.rn.satfinite.{_name}x2.f32", "d:b16 s:f32 s:f32", f"cvt_x2<{_dtype}>")
    _add(f"cvt.rn.f16x2.{_name}x2", "d:b32 s:b16", f"cvt_f16x2_from<{_dtype}>")
_add("cvt.pack.sat.s8.s32.b32", "d:b32 s:s32 s:s32 s:b32", "cvt_pack_sat_s8")

# ---- memory ----

_SPACES: Final = {
    ".param": "Param",
    ".global": "Global",
    ".shared": "Shared",
    ".local": "Local",
    "": "Generic",
}
_MEMORY_TYPES: Final = (*(f"{kind}{width}" for kind in "bus" for width in (8, *_WIDTHS)), "f32")
_POLICIES: Final = {
    "ld": ("", ".ca", ".cg", ".cs", ".lu"),
    "st": ("", ".wb", ".cg", ".cs", ".wt"),
}


def _unsigned(type_: str) -> str:
    return "u" + type_[1:]


for (_space, _in), _t, _count in product(_SPACES.items(), _MEMORY_TYPES, (1, 2, 4)):
    if int(_t[1:]) * _count > 128:
        continue
    _v = f".v{_count}" if _count > 1 else ""
    _template = f"<{_in}, {_unsigned(_t)}, {_count}>"
    _where = f"a:{_in.lower()}"
    for _policy in _POLICIES["ld"]:
        if _policy and _in not in ("Global", "Generic"):
            continue
        _add(
            f"ld{_space}{_policy}{_v}.{_t}",
            f"dv:{_t}*{_count} {_where}",
            f"load{_template}",
            place=True,
            frame=True,
        )
    for _policy in _POLICIES["st"]:
        if _in == "Param" or (_policy and _in not in ("Global", "Generic")):
            continue
        _add(
            f"st{_space}{_policy}{_v}.{_t}",
            f"{_where} sv:{_t}*{_count}",
            f"store{_template}",
            place=True,
            frame=True,
        )

# Strong operations. Scopes below the device's are not known: no kernel here needs them, and C++ has none.
for (_space, _in), _t in product(_SPACES.items(), ("u32", "b32", "s32", "u64", "b64", "s64")):
    if _in in ("Param", "Local"):
        continue
    _template, _where = f"<{_in}, {_unsigned(_t)}>", f"a:{_in.lower()}"
    for _order, _scope in product(("relaxed", "acquire"), ("gpu", "sys")):
        _add(
            f"ld.{_order}.{_scope}{_space}.{_t}",
            f"d:{_t} {_where}",
            f"load_{_order}{_template}",
            place=True,
            frame=True,
        )
    for _order, _scope in product(("relaxed", "release"), ("gpu", "sys")):
        _add(
            f"st.{_order}.{_scope}{_space}.{_t}",
            f"{_where} s:{_t}",
            f"store_{_order}{_template}",
            place=True,
            frame=True,
        )
    _add(f"ld.volatile{_space}.{_t}", f"d:{_t} {_where}", f"load_relaxed{_template}", place=True, frame=True)
    _add(f"st.volatile{_space}.{_t}", f"{_where} s:{_t}", f"store_relaxed{_template}", place=True, frame=True)
for (_space, _in), (_name, _types) in product(
    _SPACES.items(),
    {"add": ("u32", "s32"), "inc": ("u32",), "min": ("u32",), "max": ("u32",), "exch": ("b32",)}.items(),
):
    if _in in ("Param", "Local"):
        continue
    for _t, _order in product(_types, ("", ".relaxed.gpu", ".relaxed.sys", ".release.gpu", ".release.sys")):
        _call = f"change_{'release' if 'release' in _order else 'relaxed'}<{_in}>/{_name.capitalize()}"
        _add(
            f"atom{_order}{_space}.{_name}.{_t}",
            f"d:{_t} a:{_in.lower()} s:{_t}",
            _call,
            place=True,
            frame=True,
        )
        if _name != "exch":
            _add(
                f"red{_order}{_space}.{_name}.{_t}", f"a:{_in.lower()} s:{_t}", _call, place=True, frame=True
            )
for (_space, _in), _order in product(_SPACES.items(), ("", ".relaxed.gpu", ".relaxed.sys")):
    if _in not in ("Param", "Local"):
        _add(
            f"atom{_order}{_space}.cas.b32",
            f"d:b32 a:{_in.lower()} s:b32 s:b32",
            f"change_relaxed<{_in}>/Cas",
            place=True,
            frame=True,
        )
for _scope in (
    "membar.gl",
    "membar.sys",
    "fence.acq_rel.gpu",
    "fence.acq_rel.sys",
    "fence.sc.gpu",
    "fence.sc.sys",
):
    _add(_scope, "", "fence")

_add("cvta.to.global.u64", "d:u64 s:u64", "cvta_to_global", place=True)
_add("cvta.to.shared.u64", "d:u64 s:u64", "cvta_to_shared", place=True)
_add("cvta.shared.u64", "d:u64 s:u64", "cvta_shared", place=True)
_add("cvta.global.u64", "d:u64 s:u64", "cvta_global", place=True)

# ---- threads that wait for each other ----

# Without a count all threads of the CTA take part.
for _name in ("bar.sync", "barrier.sync"):
    _add(_name, "s:u32", "bar_sync_all", place=True)
    _add(f"{_name}/2", "s:u32 s:u32", "bar_sync", place=True)
_add("bar.warp.sync", "s:b32", "bar_warp_sync", place=True)
for _how in ("up", "down", "bfly", "idx"):
    _add(
        f"shfl.sync.{_how}.b32",
        "d:b32|pred s:b32 s:b32 s:b32 s:b32",
        f"shfl<Shuffle::k{_how.capitalize()}>",
        place=True,
    )
for _name, _t, _fold in (
    *(("add", t, "add<u32>") for t in ("u32", "s32")),
    *((name, t, f"{name}<{t}>") for name in ("min", "max") for t in ("u32", "s32")),
    *((name, "b32", f"l{name}<u32>") for name in ("and", "or", "xor")),
):
    _add(f"redux.sync.{_name}.{_t}", f"d:{_t} s:{_t} s:b32", f"redux/{_fold}", place=True)
_add("vote.sync.ballot.b32", "d:b32 s:pred s:b32", "ballot", place=True)
_add("vote.sync.any.pred", "d:pred s:pred s:b32", "vote_any", place=True)
_add("vote.sync.all.pred", "d:pred s:pred s:b32", "vote_all", place=True)
_add("activemask.b32", "d:b32", "activemask")

# ---- the async proxy ----

for _scope in ("", ".shared::cta"):
    _add(f"fence.proxy.async{_scope}", "", "cta().fence_proxies")
# Writers of global memory are not recorded, since it is the process's memory.
_add("fence.proxy.async.global", "", "fence_of_global_memory")
for _scope in (".shared", ".shared::cta"):
    _add(f"mbarrier.init{_scope}.b64", "a:shared s:u32", "mbarrier_init", place=True)
    _add(f"mbarrier.inval{_scope}.b64", "a:shared", "mbarrier_inval", place=True)
    _add(f"mbarrier.arrive{_scope}.b64", "_ a:shared", "mbarrier_arrive", place=True)
    _add(
        f"mbarrier.arrive.expect_tx{_scope}.b64", "_ a:shared s:u32", "mbarrier_arrive_expect_tx", place=True
    )
    _add(f"mbarrier.expect_tx.relaxed.cta{_scope}.b64", "a:shared s:u32", "mbarrier_expect_tx", place=True)
    for _name in ("try_wait", "test_wait"):
        _add(
            f"mbarrier.{_name}.parity{_scope}.b64",
            "d:pred a:shared s:u32",
            f"mbarrier_{_name}_parity",
            place=True,
        )
_add("createpolicy.fractional.L2::evict_first.b64", "d:b64 s:f32", "createpolicy", place=True)
for _to in ("shared::cluster", "shared::cta"):
    _copy = f"cp.async.bulk.{_to}.global.mbarrier::complete_tx::bytes"
    _add(_copy, "a:shared a:global s:u32 a:shared", "bulk_load", place=True)
    _add(f"{_copy}.L2::cache_hint", "a:shared a:global s:u32 a:shared s:b64", "bulk_load_hinted", place=True)
_copy = "cp.async.bulk.global.shared::cta.bulk_group"
_add(_copy, "a:global a:shared s:u32", "bulk_store", place=True)
_add(f"{_copy}.L2::cache_hint", "a:global a:shared s:u32 s:b64", "bulk_store_hinted", place=True)
_add("cp.async.bulk.commit_group", "", "bulk_commit_group")
_add("cp.async.bulk.wait_group", "n", "bulk_wait_group", place=True)
_add("cp.async.bulk.wait_group.read", "n", "bulk_wait_group_read", place=True)
