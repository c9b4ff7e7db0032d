// How long posting over verbs holds an agent's gate, on devices that do nothing, so that only the agent is
// measured. docs/verbs.md has the printed figures.
#include <sys/mman.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "counting_device.h"

namespace kvxfer::verbs_gate_test {
namespace {

using namespace agent_pair;
using counting_device::Fabric;
using counting_device::Limits;

// Address space only: its pages are never allocated.
class Untouched {
 public:
  explicit Untouched(std::size_t nbytes)
      : nbytes_(nbytes),
        data_(static_cast<std::byte*>(::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    REQUIRE(data_ != MAP_FAILED);
  }
  ~Untouched() { ::munmap(data_, nbytes_); }
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return nbytes_; }

 private:
  const std::size_t nbytes_;
  std::byte* const data_;
};

struct End : Agent<Untouched> {
  End(const std::string& name, const Options& wished) : Agent(metered(name, wished), wished.layout) {}
  static RuntimeOptions metered(const std::string& name, const Options& wished) {
    RuntimeOptions options = options_of(name, wished);
    options.meter_gate = true;
    return options;
  }
};

struct Case {
  const char* name;
  Layout layout;
  bool gathers;  // pages that are adjacent at the source and apart at the destination
};

TEST(posting_many_pages_keeps_the_gate_for_a_fraction_of_a_millisecond) {
  const Case cases[] = {
      {"100,000 pages in a layer", {100'000, 4096, 1}, false},
      {"100,000 pages in 16 layers", {6'250, 4096, 16}, false},
      {"100,000 pages in 16 layers, by scatter lists", {6'250, 4096, 16}, true},
      {"100,000 pages in a layer, by scatter lists", {100'000, 4096, 1}, true},
  };
  for (const int num_devices : {1, 2, 8})
    for (const Case& each : cases) {
      Limits limits;
      limits.num_devices = num_devices;
      limits.does_nothing = true;
      Fabric fabric(limits);
      Pair<End> both(Options{.transports = {"verbs"},
                             .layout = each.layout,
                             .num_rails = static_cast<std::size_t>(num_devices) + 1,
                             .transport_options = {{"tcp.rails", std::int64_t{1}}}});
      check::Random random(check::seed());
      std::vector<std::uint32_t> src(each.layout.num_blocks), dst;
      std::iota(src.begin(), src.end(), 0u);
      dst = src;
      random.shuffle(dst);
      if (!each.gathers) random.shuffle(src);
      for (const bool write : {true, false}) {
        Time longest[2] = {};
        for (int round = 0; round < 3; ++round) {
          TransferRequest request = both.request(write, src);
          request.dst_ids = dst;
          for (End* end : {&both.src, &both.dst}) end->runtime->forget_holds();
          const auto posted = both.end(write).try_post(std::move(request));
          REQUIRE_OK(posted);
          REQUIRE(is_done(posted.value()));
          for (const int i : {0, 1})
            longest[i] = std::max(longest[i], (i == 0 ? both.src : both.dst).runtime->longest_hold_ns());
        }
        std::printf("  %d NICs, %s, %s: longest hold %.0f us at the source, %.0f at the destination\n",
                    num_devices, each.name, write ? "write" : "read", static_cast<double>(longest[0]) / 1e3,
                    static_cast<double>(longest[1]) / 1e3);
      }
    }
}

}  // namespace
}  // namespace kvxfer::verbs_gate_test
