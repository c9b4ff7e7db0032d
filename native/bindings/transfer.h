// A transfer's handle, and the route that posts one.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "bindings/requests.h"
#include "core/installed.h"
#include "core/runtime.h"

namespace kvxfer::python {

// Waits without the GIL, in slices, so that Python's signal handlers run during a long wait. `wait` waits for
// one slice and returns whether the wait is over. False: the timeout has passed.
bool wait_in_slices(Runtime& runtime, const std::function<bool(Time)>& wait, double timeout_s);
bool wait_for(Runtime& runtime, const std::function<bool()>& done, double timeout_s);

// One end of a transfer, and the agent that drives it.
struct PyHandle {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Handle> handle;

  std::string_view state() const;
  bool wait(double timeout_s) const;
  void check_layer(std::uint32_t layer) const;
  bool wait_layer(std::uint32_t layer, double timeout_s) const;
  bool layer_arrived(std::uint32_t layer) const;
  bool watch_layer(std::uint32_t layer) const;
  void layers_ready(std::uint32_t layers) const;
  void cancel() const;
  std::shared_ptr<StreamWait> wait_in(std::uint64_t stream, std::optional<std::uint32_t> layer) const;
};

// A program, for as long as this or a route keeps it. The last of them gives it back without the GIL, as that
// waits for the progress gate.
struct PyInstalled {
  static PyInstalled of(const std::shared_ptr<Runtime>& runtime, SessionKey peer, std::uint32_t id);
  std::shared_ptr<const Installed> program;
};

// A peer's program, some of its layers, and defaults for arguments that a caller leaves out. It takes
// arguments as the caller passes them, so that a post like the one before it costs one call.
struct PyRoute {
  std::shared_ptr<Runtime> runtime;
  SessionKey peer;
  std::shared_ptr<const Installed> program;
  std::uint32_t first_layer, num_layers;
  double timeout_s;
  bool integrity;
  nb::object as_ids;  // kvxfer/memory/block_table.py: converts ids that are no uint32 yet

  PyHandle post(nb::handle src_blocks, nb::handle dst_blocks, std::uint32_t num_fine, nb::handle notify,
                nb::handle timeout, nb::handle context, nb::handle terms) const;
  // The request that post() would post. All of its layers are released.
  TransferRequest request(nb::handle src_blocks, nb::handle dst_blocks, std::uint32_t num_fine,
                          nb::handle notify, nb::handle timeout, nb::handle context,
                          const Terms& terms) const;

 private:
  std::vector<std::uint32_t> to_ids(nb::handle blocks) const;
};

void define_transfer(nb::module_& module);

}  // namespace kvxfer::python
