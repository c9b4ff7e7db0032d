// What a transport's abi.h declares beside a library's own header, compared by the compiler. `abi` is the namespace of
// ours; each pair is one of ours and the library's:
//
//   SAME_SIZE(MemoryRegion, ibv_mr);
//   SAME_PLACES(MemoryRegion, ibv_mr, (address, addr), (length, length));
//   SAME_VALUES((kSignaled, IBV_SEND_SIGNALED), (kRdmaRead, IBV_WR_RDMA_READ));
#pragma once

#include <cstddef>
#include <cstdint>

#define SAME_SIZE(ours, theirs) static_assert(sizeof(abi::ours) == sizeof(theirs))
#define SAME_PLACES(ours, theirs, ...) ABI_EACH(ABI_PLACE, (ours, theirs), __VA_ARGS__) static_assert(true)
#define SAME_VALUES(...) ABI_EACH(ABI_VALUE, (), __VA_ARGS__) static_assert(true)

#define ABI_PLACE(structs, members) ABI_PLACE_OF(ABI_BARE structs, ABI_BARE members)
#define ABI_PLACE_OF(...) ABI_PLACE_IN(__VA_ARGS__)
#define ABI_PLACE_IN(ours, theirs, member, their_member)                         \
  static_assert(offsetof(abi::ours, member) == offsetof(theirs, their_member) && \
                    sizeof(abi::ours::member) == sizeof(theirs::their_member),   \
                #ours "." #member " is not " #theirs "." #their_member);
#define ABI_VALUE(nothing, values) ABI_VALUE_OF values
#define ABI_VALUE_OF(ours, theirs)                                                         \
  static_assert(static_cast<std::int64_t>(abi::ours) == static_cast<std::int64_t>(theirs), \
                #ours " is not " #theirs);

// ABI_EACH(macro, about, a, b, ...) is macro(about, a) macro(about, b) ..., of 256 at the most.
#define ABI_EACH(macro, about, ...) ABI_AGAIN4(ABI_STEP(macro, about, __VA_ARGS__))
#define ABI_STEP(macro, about, first, ...) \
  macro(about, first) __VA_OPT__(ABI_NEXT ABI_PARENTHESES(macro, about, __VA_ARGS__))
#define ABI_NEXT() ABI_STEP
#define ABI_PARENTHESES ()
#define ABI_BARE(...) __VA_ARGS__
#define ABI_AGAIN4(...) ABI_AGAIN3(ABI_AGAIN3(ABI_AGAIN3(ABI_AGAIN3(__VA_ARGS__))))
#define ABI_AGAIN3(...) ABI_AGAIN2(ABI_AGAIN2(ABI_AGAIN2(ABI_AGAIN2(__VA_ARGS__))))
#define ABI_AGAIN2(...) ABI_AGAIN1(ABI_AGAIN1(ABI_AGAIN1(ABI_AGAIN1(__VA_ARGS__))))
#define ABI_AGAIN1(...) ABI_AGAIN0(ABI_AGAIN0(ABI_AGAIN0(ABI_AGAIN0(__VA_ARGS__))))
#define ABI_AGAIN0(...) __VA_ARGS__
