#include "bindings/lifetime.h"

#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/gil.h"

namespace kvxfer::python {
namespace {

// How long an agent that is open at the exit may spend on its goodbyes. Its fences take as long as they need.
constexpr Time kGoodbye = 1'000'000'000;

// How often, a millisecond apart, the exit looks for agents that other threads are just creating.
constexpr int kMostLooks = 1000;

// All of it under Python's lock.
struct Agents {
  std::vector<std::weak_ptr<Runtime>> alive;
  int num_in_making = 0;
  pid_t process = 0;  // a forked child has no agents of its parent
};

Agents& agents() {
  static auto* const kept = new Agents;  // for threads that outlive static objects
  if (const pid_t process = ::getpid(); kept->process != process) {
    kept->alive.clear();
    kept->num_in_making = 0;
    kept->process = process;
  }
  return *kept;
}

void close_all() {
  exiting = true;
  for (int look = 0;; ++look) {
    const bool is_last = agents().num_in_making == 0 || look == kMostLooks;
    std::vector<std::shared_ptr<Runtime>> open;
    for (const std::weak_ptr<Runtime>& agent : agents().alive)
      if (std::shared_ptr<Runtime> runtime = agent.lock()) open.push_back(std::move(runtime));
    const WithoutGil released;
    for (const std::shared_ptr<Runtime>& runtime : open) runtime->close(kGoodbye);
    open.clear();
    if (is_last) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Destroys an agent. That may need Python's lock for what the agent holds, and waits for threads that may
// need it.
struct Destroy {
  std::shared_ptr<Runtime> runtime;
  void operator()(Runtime*) {
    if (PyGILState_Check() == 0) return runtime.reset();
    const WithoutGil released;
    runtime.reset();
  }
};

}  // namespace

std::shared_ptr<Runtime> make_agent(RuntimeOptions options) {
  if (exiting) raise({Code::kClosed, "the interpreter is exiting: no new agent can be made"});
  ++agents().num_in_making;
  Result<std::shared_ptr<Runtime>> created = [&] {
    const WithoutGil released;
    return Runtime::create(std::move(options));
  }();
  --agents().num_in_making;
  std::shared_ptr<Runtime> native = take(std::move(created));
  Runtime* const made = native.get();
  std::shared_ptr<Runtime> runtime(made, Destroy{std::move(native)});
  std::erase_if(agents().alive, [](const std::weak_ptr<Runtime>& agent) { return agent.expired(); });
  agents().alive.push_back(runtime);
  return runtime;
}

void define_lifetime(nb::module_& module) {
  // Objects that daemon threads hold at the exit are not leaks.
  nb::set_leak_warnings(false);
  module.def("close_agents", &close_all);
  nb::module_::import_("atexit").attr("register")(module.attr("close_agents"));
}

}  // namespace kvxfer::python
