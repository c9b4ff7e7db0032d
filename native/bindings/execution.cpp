// Checks and runs a copy program by itself, without agents: for tests, and to show what a program does.
#include <nanobind/stl/tuple.h>

#include <array>

#include "bindings/convert.h"
#include "bindings/requests.h"
#include "core/control/wire.h"
#include "core/copy/convert.h"
#include "core/copy/executor.h"
#include "core/copy/pack.h"
#include "core/copy/run_cursor.h"
#include "core/region.h"

namespace kvxfer::python {
namespace {

using namespace nb::literals;

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Units = std::array<std::uint32_t, 4>;

const std::byte* at(const Bytes& bytes) { return reinterpret_cast<const std::byte*>(bytes.data()); }
std::byte* at(const MutableBytes& bytes) { return reinterpret_cast<std::byte*>(bytes.data()); }

// One layer of a transfer, as a move of one piece. Only its memory is checked.
std::shared_ptr<Move> one_piece(CopyProgram program, std::uint32_t layer, const BlockIds& src_ids,
                                const BlockIds& dst_ids, std::uint32_t num_fine) {
  if (src_ids.size() != dst_ids.size()) raise({Code::kLengthMismatch, "the tables differ in length"});
  program.num_layers = layer + 1;
  for (const CopyLoop& loop : program.loops)
    program.num_layers = std::max(program.num_layers, loop.first_layer + loop.num_layers);
  check(check_program(program));
  const auto num_pairs = static_cast<std::uint32_t>(src_ids.size());
  if (num_fine > num_pairs || (num_fine != 0 && program.units[kFine].src == 0))
    raise({Code::kInvalidArgument,
           "num_fine is larger than the number of pairs, or the program has no loops of single tokens"});
  auto move = std::make_shared<Move>();
  move->program = std::make_shared<CopyProgram>(std::move(program));
  move->grid = {layer, 1, num_pairs, std::max(1u, num_pairs), num_fine};
  move->src_ids = to_vector(src_ids);
  move->dst_ids = to_vector(dst_ids);
  return move;
}

void require_within(const Move& move, Side side, std::size_t nbytes) {
  if (move.grid.num_pairs != 0 && piece_end(move, 0, side) > nbytes)
    raise({Code::kOutOfRange, std::string("the program ends beyond the ") +
                                  (side == Side::kSrc ? "source" : "destination") + "'s memory"});
}

// One end of a program: its region's loops over a block, its blocks and its bytes.
using End = std::tuple<nb::object, std::uint32_t, std::uint64_t>;

// What two agents check of a program before it moves a byte: its structure, its frame, and both regions.
void check_ends(nb::handle asked, const End& src, const End& dst) {
  const Program program{asked};
  check(check_program(program.program));
  const wire::Bytes frame = wire::encode(wire::Program{1, 1, 1, program.program}, 1);
  const wire::Header header = take(wire::decode_header(frame, wire::kMaxBody));
  (void)take(wire::decode(header, wire::ByteSpan(frame).subspan(wire::kHeaderNbytes, header.body_nbytes)));
  for (const auto& [side, end] : {std::pair(Side::kSrc, &src), std::pair(Side::kDst, &dst)}) {
    const auto& [records, num_blocks, nbytes] = *end;
    CopyProgram own;
    own.loops = to_loops(records);
    for (const CopyLoop& loop : own.loops)
      own.num_layers = std::max(own.num_layers, loop.first_layer + loop.num_layers);
    check(check_program(own));
    const MemorySpan span{0, nbytes};
    const Footprint footprint = take(Footprint::create(own, Side::kDst, num_blocks, {&span, 1}));
    check(footprint.contains(program.program, side));
    check(check_inside(program.program, side, num_blocks, {&span, 1}));
  }
}

nb::object expand(nb::handle records, std::uint32_t layer, const BlockIds& src_ids, const BlockIds& dst_ids,
                  std::uint32_t num_fine, const Units& units) {
  CopyProgram program;
  program.loops = to_loops(records);
  for (CopyLoop& loop : program.loops) loop.conversion = 0;  // runs at the source
  program.units[kCoarse] = {units[0], units[1]};
  program.units[kFine] = {units[2], units[3]};
  const auto move = one_piece(std::move(program), layer, src_ids, dst_ids, num_fine);
  auto* runs = new std::vector<std::array<std::uint64_t, 3>>;
  nb::capsule owner(
      runs, [](void* p) noexcept { delete static_cast<std::vector<std::array<std::uint64_t, 3>>*>(p); });
  if (move->grid.num_pairs != 0)
    for_each_run(move->program->view(), move->grid.piece(0), move->src_ids.data(), move->dst_ids.data(),
                 [&](std::uint64_t src, std::uint64_t dst, std::uint64_t nbytes) {
                   runs->push_back({src, dst, nbytes});
                 });
  return nb::cast(nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<2>>(runs->data(), {runs->size(), 3}, owner));
}

void execute_layer(nb::handle loops, nb::handle conversions, nb::handle scales, const Units& units,
                   std::uint32_t layer, const BlockIds& src_ids, const BlockIds& dst_ids,
                   std::uint32_t num_fine, const Bytes& src, const MutableBytes& dst) {
  const auto move =
      one_piece(to_program(1, loops, conversions, scales, units), layer, src_ids, dst_ids, num_fine);
  require_within(*move, Side::kSrc, src.shape(0));
  require_within(*move, Side::kDst, dst.shape(0));
  if (move->grid.num_pairs != 0) copy_piece(*move, 0, at(src), at(dst));
}

nb::bytes pack(nb::handle loops, nb::handle conversions, nb::handle scales, const Units& units,
               std::uint32_t layer, const BlockIds& src_ids, const BlockIds& dst_ids, std::uint32_t num_fine,
               const Bytes& src) {
  const auto move =
      one_piece(to_program(1, loops, conversions, scales, units), layer, src_ids, dst_ids, num_fine);
  require_within(*move, Side::kSrc, src.shape(0));
  if (move->grid.num_pairs == 0) return nb::bytes("", 0);
  move->local = unregistered(const_cast<std::byte*>(at(src)));  // a packer only reads
  std::vector<std::byte> packed(piece_nbytes(*move->program, move->grid.piece(0)));
  Packer packer(*move, 0);
  std::size_t used = 0;
  while (const std::size_t more = packer.pack(packed.data() + used, packed.size() - used)) used += more;
  if (used != packed.size()) raise({Code::kInternal, "the packer stopped before the piece's end"});
  return from_bytes(packed);
}

void unpack(nb::handle loops, nb::handle conversions, nb::handle scales, const Units& units,
            std::uint32_t layer, const BlockIds& src_ids, const BlockIds& dst_ids, std::uint32_t num_fine,
            const nb::bytes& packed, const MutableBytes& dst) {
  const auto move =
      one_piece(to_program(1, loops, conversions, scales, units), layer, src_ids, dst_ids, num_fine);
  require_within(*move, Side::kDst, dst.shape(0));
  const bool empty = move->grid.num_pairs == 0;
  if (packed.size() != (empty ? 0 : piece_nbytes(*move->program, move->grid.piece(0))))
    raise({Code::kLengthMismatch, "packed does not have the length of the piece"});
  if (empty) return;
  move->local = unregistered(at(dst));
  // Received in unequal parts, as from a socket.
  RunCursor cursor(*move, 0, Side::kDst);
  const auto* from = reinterpret_cast<const std::byte*>(packed.c_str());
  for (std::size_t done = 0, part = 1; done < packed.size(); part = part * 2 + 1) {
    const std::size_t nbytes = std::min(part, packed.size() - done);
    cursor.scatter(from + done, nbytes);
    done += nbytes;
  }
}

Dtype to_dtype(const std::string& name) {
  static constexpr std::pair<std::string_view, Dtype> kNames[] = {
      {"bfloat16", Dtype::kBf16},      {"float16", Dtype::kF16},      {"float32", Dtype::kF32},
      {"float8_e4m3fn", Dtype::kE4m3}, {"float8_e5m2", Dtype::kE5m2}, {"int8", Dtype::kInt8},
  };
  for (const auto& [known, dtype] : kNames)
    if (known == name) return dtype;
  raise({Code::kInvalidArgument, "dtype '" + name + "' cannot be converted"});
}

nb::bytes convert(const std::string& src_dtype, const std::string& dst_dtype, const Bytes& src,
                  std::size_t count, std::optional<float> src_scale, std::optional<float> dst_scale,
                  bool saturate, const std::string& kernel) {
  const Dtype from = to_dtype(src_dtype), to = to_dtype(dst_dtype);
  if (src.shape(0) < count * itemsize(from))
    raise({Code::kOutOfRange, "src holds fewer than count elements"});
  if (!use_convert_kernel(kernel))
    raise({Code::kUnsupported, "this machine has no conversion kernel '" + kernel + "'"});
  Scaling scaling{src_scale.value_or(1), dst_scale.value_or(1), src_scale.has_value(), dst_scale.has_value(),
                  saturate};
  std::vector<std::byte> out(count * itemsize(to));
  convert_run(from, at(src), to, out.data(), count, scaling);
  use_convert_kernel("");
  return from_bytes(out);
}

}  // namespace

void define_execution(nb::module_& m) {
  m.attr("CONVERT_KERNEL") = std::string(convert_kernel_name());
  m.attr("CONVERSION_NBYTES") = sizeof(Conversion);
  m.def("check_ends", &check_ends, "program"_a, "src"_a, "dst"_a);
  m.def("expand", &expand, "loops"_a, "layer"_a, "src_ids"_a, "dst_ids"_a, "num_fine"_a = 0,
        "units"_a = Units{1, 1, 0, 0});
  m.def("execute", &execute_layer, "loops"_a, "conversions"_a, "scales"_a, "units"_a, "layer"_a, "src_ids"_a,
        "dst_ids"_a, "num_fine"_a, "src"_a.noconvert(), "dst"_a.noconvert());
  m.def("pack", &pack, "loops"_a, "conversions"_a, "scales"_a, "units"_a, "layer"_a, "src_ids"_a, "dst_ids"_a,
        "num_fine"_a, "src"_a.noconvert());
  m.def("unpack", &unpack, "loops"_a, "conversions"_a, "scales"_a, "units"_a, "layer"_a, "src_ids"_a,
        "dst_ids"_a, "num_fine"_a, "packed"_a, "dst"_a.noconvert());
  m.def("convert", &convert, "src_dtype"_a, "dst_dtype"_a, "src"_a.noconvert(), "count"_a,
        "src_scale"_a.none(), "dst_scale"_a.none(), "saturate"_a, "kernel"_a = "");
}

}  // namespace kvxfer::python
