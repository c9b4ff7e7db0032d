// Compares the results of instructions (instructions.ptx) with the PTX ISA, by numbers.
#include <array>
#include <cstdint>
#include <iterator>
#include <string>

#include "check.h"
#include "cuda_threads.h"
#include "instructions.h"

namespace {

struct Result {
  const char* instruction;
  std::uint64_t expected;
};

constexpr Result kResults[] = {
    {"add.u32 %r0, -1, 2;", 1},
    {"sub.s64 %d, 1, 2;", 0xffffffffffffffff},
    {"add.u16 %h, 0xffff, 2;", 1},
    {"mul.lo.s32 %r0, 65537, 65537;", 0x00020001},
    {"mul.hi.u32 %r0, -1, -1;", 0xfffffffe},
    {"mul.hi.s32 %r0, -1, -1;", 0},
    {"mul.hi.s64 %d, -1, 2;", 0xffffffffffffffff},
    {"mul.wide.u32 %d, -1, 2;", 0x1fffffffe},
    {"mul.wide.s32 %d, -1, 2;", 0xfffffffffffffffe},
    {"mul.wide.u16 %r0, 0xffff, 256;", 0xffff00},
    {"mad.lo.s32 %r0, 3, -5, 7;", 0xfffffff8},
    {"mad.wide.s32 %d, -3, 5, 7;", 0xfffffffffffffff8},
    {"div.s32 %r0, -7, 2;", 0xfffffffd},
    {"rem.s32 %r0, -7, 2;", 0xffffffff},
    {"div.s32 %r0, 0x80000000, -1;", 0x80000000},
    {"div.u32 %r0, -7, 2;", 0x7ffffffc},
    {"min.s32 %r0, -1, 1;", 0xffffffff},
    {"min.u32 %r0, -1, 1;", 1},
    {"max.u64 %d, -1, 1;", 0xffffffffffffffff},
    {"abs.s32 %r0, 0x80000000;", 0x80000000},
    {"neg.s32 %r0, 5;", 0xfffffffb},
    {"shl.b32 %r0, 1, 31;", 0x80000000},
    {"shl.b32 %r0, 1, 32;", 0},
    {"shl.b32 %r0, 1, 33;", 0},
    {"shr.u32 %r0, 0x80000000, 33;", 0},
    {"shr.s32 %r0, 0x80000000, 33;", 0xffffffff},
    {"shr.s16 %h, -4, 1;", 0xfffe},
    {"shr.b64 %d, -1, 63;", 1},
    {"shr.u64 %d, -1, 64;", 0},
    {"shf.l.wrap.b32 %r0, 0x80000001, 0x80000001, 31;", 0xc0000000},
    {"shf.l.wrap.b32 %r0, 1, 2, 33;", 4},
    {"shf.l.clamp.b32 %r0, 1, 2, 33;", 1},
    {"shf.r.wrap.b32 %r0, 0x10, 0x3, 4;", 0x30000001},
    {"shf.r.clamp.b32 %r0, 1, 2, 64;", 2},
    {"bfe.u32 %r0, 0x12345678, 8, 8;", 0x56},
    {"bfe.s32 %r0, 0x1234f678, 8, 8;", 0xfffffff6},
    {"bfe.s32 %r0, 0x80000000, 28, 8;", 0xfffffff8},
    {"bfe.u32 %r0, -1, 4, 0;", 0},
    {"bfe.s64 %d, 0x8000000000, 32, 8;", 0xffffffffffffff80},
    {"bfi.b32 %r0, 0xab, 0x11111111, 8, 8;", 0x1111ab11},
    {"bfi.b32 %r0, -1, 0, 28, 8;", 0xf0000000},
    {"prmt.b32 %r0, 0x33221100, 0x77665544, 0x7531;", 0x77553311},
    {"prmt.b32 %r0, 0x80, 0, 0x7778;", 0xff},
    {"prmt.b32 %r0, 0x80, 0, 0x7779;", 0},
    {"lop3.b32 %r0, 0xf0, 0xcc, 0xaa, 0x80;", 0x80},
    {"lop3.b32 %r0, 0xf0, 0xcc, 0xaa, 0x2a;", 0x2a},
    {"popc.b64 %r0, 0xf0f;", 8},
    {"clz.b32 %r0, 0;", 32},
    {"not.b32 %r0, 0xf0;", 0xffffff0f},
    {"cvt.u32.u64 %r0, 0x123456789;", 0x23456789},
    {"cvt.u64.u32 %d, -1;", 0xffffffff},
    {"cvt.s64.s32 %d, -1;", 0xffffffffffffffff},
    {"cvt.s16.s8 %h, 0xff;", 0xffff},
    {"cvt.s8.s32 %h, 0x1ff;", 0xffff},
    {"cvt.u8.u32 %h, 0x1ff;", 0xff},
    {"cvt.rn.f32.s16 %r0, -3;", 0xc0400000},
    {"cvt.rn.f32.u32 %r0, 16777217;", 0x4b800000},
    {"cvt.rni.s32.f32 %r0, 0f40200000;", 2},
    {"cvt.rni.s32.f32 %r0, 0f40600000;", 4},
    {"cvt.rni.s32.f32 %r0, 0fCF32D05E;", 0x80000000},
    {"cvt.rni.s32.f32 %r0, 0f7FC00001;", 0},
    {"cvt.rzi.u32.f32 %r0, 0fBFC00000;", 0},
    {"cvt.rzi.s32.f32 %r0, 0fBFC00000;", 0xffffffff},
    {"cvt.f32.f16 %r0, 0x0001;", 0x33800000},
    {"cvt.f32.f16 %r0, 0xfe00;", 0x7fffffff},
    {"cvt.rn.f16x2.f32 %r0, 0f3F800000, 0fC0000000;", 0x3c00c000},
    {"cvt.rn.f16x2.f32 %r0, 0f477FF000, 0f477FEF00;", 0x7c007bff},
    {"cvt.rn.bf16x2.f32 %r0, 0f3F800000, 0f7FC00001;", 0x3f807fff},
    {"cvt.rn.bf16x2.f32 %r0, 0f3F808000, 0f3F818000;", 0x3f803f82},
    {"cvt.rn.satfinite.e4m3x2.f32 %h, 0f3F800000, 0f447A0000;", 0x387e},
    {"cvt.rn.satfinite.e4m3x2.f32 %h, 0f7FC00001, 0f80000000;", 0x7f80},
    {"cvt.rn.satfinite.e5m2x2.f32 %h, 0fCE6E6B28, 0f3F800000;", 0xfb3c},
    {"cvt.rn.f16x2.e4m3x2 %r0, 0x387e;", 0x3c005f00},
    {"cvt.rn.f16x2.e5m2x2 %r0, 0x3c7c;", 0x3c007c00},
    {"cvt.pack.sat.s8.s32.b32 %r0, 1, -200, 0x1234abcd;", 0xabcd0180},
    {"add.rn.f32 %r0, 0f4B800000, 0f3F800000;", 0x4b800000},
    {"mul.rn.f32 %r0, 0f7FC00001, 0f3F800000;", 0x7fffffff},
    {"mul.rn.f32 %r0, 0f00800000, 0f3F000000;", 0x00400000},
    {"fma.rn.f32 %r0, 0f3F800001, 0f3F800001, 0fBF800002;", 0x28800000},
    {"div.rn.f32 %r0, 0f3F800000, 0f40400000;", 0x3eaaaaab},
    {"div.rn.f32 %r0, 0f3F800000, 0f80000000;", 0xff800000},
    {"rcp.rn.f32 %r0, 0f40400000;", 0x3eaaaaab},
    {"rcp.rz.f32 %r0, 0f40400000;", 0x3eaaaaaa},
    {"rcp.rz.f32 %r0, 0fC0400000;", 0xbeaaaaaa},
    {"rcp.rz.f32 %r0, 0f00000001;", 0x7f7fffff},
    {"rcp.rz.f32 %r0, 0f00000000;", 0x7f800000},
    {"copysign.f32 %r0, 0fBF800000, 0f40000000;", 0xc0000000},
    {"neg.f32 %r0, 0f00000000;", 0x80000000},
    {"abs.f32 %r0, 0fC0000000;", 0x40000000},
    {"min.f32 %r0, 0f00000000, 0f80000000;", 0x80000000},
    {"max.f32 %r0, 0f80000000, 0f00000000;", 0},
    {"max.f32 %r0, 0f7FC00001, 0f3F800000;", 0x3f800000},
    {"min.f32 %r0, 0f7FC00001, 0f7FC00001;", 0x7fffffff},
    {"mov.b32 %r0, {lo, hi};", 0x00020001},
    {"setp.lt.s32 %p0, -1, 1;", 1},
    {"setp.lt.u32 %p0, -1, 1;", 0},
    {"setp.ge.u64 %p0, -1, 1;", 1},
    {"setp.gt.s16 %p0, 0xffff, 0;", 0},
    {"setp.eq.b16 %p0, 0xffff, -1;", 1},
    {"setp.le.f32 %p0, 0f7FC00001, 0f3F800000;", 0},
    {"setp.leu.f32 %p0, 0f7FC00001, 0f3F800000;", 1},
    {"setp.ne.f32 %p0, 0f7FC00001, 0f7FC00001;", 0},
    {"setp.neu.f32 %p0, 0f7FC00001, 0f7FC00001;", 1},
    {"setp.eq.f32 %p0, 0f00000000, 0f80000000;", 1},
    {"setp.nan.f32 %p0, 0f7FC00001, 0f3F800000;", 1},
    {"setp.num.f32 %p0, 0f7FC00001, 0f3F800000;", 0},
    {"{lo, hi} of 0x00050003", 0x5},
    {"@p and @!p", 0x2},
    {"predicates", 0x7},
    {"st.u8 of a wider register", 0xff},
    {"ld.s8 into a wider register", 0xffffffff},
    {"ld.u8 into a wider register", 0xff},
    {"atom.inc at its limit", 0x0},
    {"atom.cas", 0x9},
    {"red.add", 0x8},
    {"atom.max", 0x6},
};

std::uint64_t address_of(void* memory) { return reinterpret_cast<std::uint64_t>(memory); }

TEST(instructions_give_what_the_isa_says) {
  std::array<std::uint64_t, std::size(kResults) + 1> results{};
  results.back() = 0xa5;
  cuda_threads::launch(1, 1, 0, instructions, address_of(results.data()));
  for (std::size_t k = 0; k < std::size(kResults); ++k)
    if (results[k] != kResults[k].expected)
      FAIL(std::string(kResults[k].instruction) + ": " + std::to_string(results[k]) + " in place of " +
           std::to_string(kResults[k].expected));
  CHECK_EQ(results.back(), 0xa5u);  // the word after the last result is untouched
}

TEST(names_are_those_of_their_block) {
  std::array<std::uint32_t, 3> results{};
  cuda_threads::launch(1, 1, 0, blocks, address_of(results.data()));
  CHECK_EQ(results[0], 128u);
  CHECK_EQ(results[1], 192u);
  CHECK_EQ(results[2], 5u);
}

TEST(lanes_get_what_others_give) {
  struct Row { std::uint32_t butterfly, down, up, of_segment, sum, ballot, of_part, any; };
  std::array<Row, 32> rows{};
  cuda_threads::launch(1, 32, 0, lanes, address_of(rows.data()));
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    CHECK_EQ(rows[lane].butterfly, lane ^ 1);
    CHECK_EQ(rows[lane].down, lane < 2 ? lane + 30 : 99);
    CHECK_EQ(rows[lane].up, lane == 0 ? 0 : lane - 1);
    CHECK_EQ(rows[lane].of_segment, lane / 8 * 8 + 3);
    CHECK_EQ(rows[lane].sum, 31u * 32 / 2);
    CHECK_EQ(rows[lane].ballot, 1u << 7);
    CHECK_EQ(rows[lane].of_part, lane < 4 ? 3u : 4u);
    CHECK_EQ(rows[lane].any, 1u);
  }
}

}  // namespace
