#include "bindings/requests.h"

#include <array>

namespace kvxfer::python {
namespace {

template <std::size_t N>
std::array<nb::handle, N> fields_of(nb::handle tuple) {
  if (!PyTuple_Check(tuple.ptr()) || PyTuple_GET_SIZE(tuple.ptr()) != static_cast<Py_ssize_t>(N))
    throw nb::type_error("the argument is not the request tuple of kvxfer/session/requests.py");
  std::array<nb::handle, N> fields;
  for (std::size_t i = 0; i < N; ++i) fields[i] = PyTuple_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i));
  return fields;
}

template <class T>
std::optional<T> to_optional(nb::handle value) {
  return value.is_none() ? std::nullopt : std::optional(nb::cast<T>(value));
}

std::vector<std::uint32_t> to_ids(nb::handle blocks) {
  BlockIds ids;
  if (!ids.open(blocks.ptr())) throw nb::type_error("block ids must be uint32");
  return to_vector(ids);  // a copy: other threads may write to the array
}

}  // namespace

Terms::Terms(nb::handle tuple) {
  const auto fields = fields_of<4>(tuple);
  priority = fields[0];
  integrity = fields[1];
  lease = fields[2];
  hold = fields[3];
}

Expected::Expected(nb::handle tuple) {
  const auto fields = fields_of<12>(tuple);
  tag = to_tag(fields[0]);
  region = nb::cast<RegionId>(fields[1]);
  blocks = to_ids(fields[2]);
  first_layer = nb::cast<std::uint32_t>(fields[3]);
  num_layers = nb::cast<std::uint32_t>(fields[4]);
  needed.block_tokens = nb::cast<std::uint32_t>(fields[5]);
  needed.first_token = nb::cast<std::uint64_t>(fields[6]);
  needed.end_token = nb::cast<std::uint64_t>(fields[7]);
  needed.num_heads = nb::cast<std::uint32_t>(fields[8]);
  peer = to_optional<SessionKey>(fields[9]);
  timeout_ns = to_ns(nb::cast<double>(fields[10]));
  context = to_context(fields[11]);
}

Grant::Grant(nb::handle tuple) {
  const auto fields = fields_of<9>(tuple);
  terms.holder = to_optional<SessionKey>(fields[0]);
  terms.bearer_name = nb::cast<std::string>(fields[1]);
  terms.bearer_id = to_optional<LeaseId>(fields[2]).value_or(0);
  terms.region = nb::cast<RegionId>(fields[3]);
  terms.mode = nb::cast<bool>(fields[4]) ? wire::LeaseMode::kWrite : wire::LeaseMode::kRead;
  terms.all_blocks = fields[5].is_none();
  if (!terms.all_blocks) blocks = to_ids(fields[5]);
  terms.blocks = blocks;
  terms.ttl_ns = to_ns(nb::cast<double>(fields[6]));
  terms.renewable = nb::cast<bool>(fields[7]);
  terms.allow = nb::cast<std::string>(fields[8]);
}

Program::Program(nb::handle tuple) {
  const auto fields = fields_of<10>(tuple);
  peer = nb::cast<SessionKey>(fields[0]);
  write = nb::cast<bool>(fields[1]);
  src_region = nb::cast<RegionId>(fields[2]);
  dst_region = nb::cast<RegionId>(fields[3]);
  program = to_program(nb::cast<std::uint32_t>(fields[4]), fields[5], fields[6], fields[7],
                       nb::cast<std::array<std::uint32_t, 4>>(fields[8]));
  const auto dst_heads = nb::cast<std::array<std::uint32_t, 3>>(fields[9]);
  program.dst_heads = {dst_heads[0], dst_heads[1], dst_heads[2]};
}

}  // namespace kvxfer::python
