// Command rings: transfers that kernels start.
#pragma once

#include "bindings/transfer.h"
#include "core/commands/command_reader.h"

namespace kvxfer::python {

struct PyCommandRing {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<CommandReader> reader;

  std::uint32_t prepare(const PyRoute& route, std::uint32_t first_layer, nb::handle src_blocks,
                        nb::handle dst_blocks, nb::handle notify, nb::handle timeout, nb::handle context,
                        nb::handle terms) const;
  nb::list take_failures() const;
  bool wait(std::uint64_t num_ended, double timeout_s) const;
  void close() const;
};

void define_command_ring(nb::module_& module);

}  // namespace kvxfer::python
