// A cuda_ipc rail whose peer lies about the length of its memory, or passes more than it may, beside a peer
// that keeps the rules.
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu/shared_memory.h"
#include "gpu_memory.h"
#include "ipc_ends.h"

namespace kvxfer::gpu_ipc_hostile_test {
namespace {

using cuda_ipc::Message;
using cuda_ipc::MessageKind;
using gpu_memory::DeviceMemory;
using testing::connect_ends;
using testing::fetch_work;
using testing::socket_pair;
using namespace ipc_ends;

// A destination with a peer that keeps the rules, and a peer whose end of the socket the test writes.
struct Impostor {
  explicit Impostor(std::shared_ptr<Budget> budget = nullptr) {
    bystander_peer = connect_ends(end, bystander).first;
    REQUIRE_OK(
        end.transport->attach(bystander_peer, told(*bystander.transport, region_of(1, theirs.data()))));
    end.completions.clear();
    auto [ours, far] = socket_pair();
    const auto connected = end.transport->connect(std::move(ours), {false, 0, "impostor", std::move(budget)});
    REQUIRE_OK(connected);
    peer = connected.value();
    channel = std::make_unique<cuda_ipc::SideChannel>(std::move(far));
    Message hello;
    hello.nbytes = FenceTable::kNbytes;
    say(hello, share_copy_of(fences->fill().value()));
    end.await(CompletionKind::kRailUp);
  }
  // The peer that keeps the rules loses nothing.
  ~Impostor() {
    std::memset(theirs.data(), 0x3c, kNbytes);
    const Work works[] = {fetch_work(1000, move_of(1, arrived.data(), 1, 0), 0)};
    testing::post_all(*end.transport, bystander_peer, works);
    CHECK_EQ(end.await(1000).code, Code::kOk);
    CHECK(std::memcmp(arrived.data(), theirs.data(), kNbytes) == 0);
  }
  void say(const Message& message, SharedFd fd = nullptr) {
    channel->queue(message, std::move(fd));
    REQUIRE(channel->flush().ok());
  }
  // Announces memory of `nbytes`, and attaches a region that fills it.
  Status attach(const std::byte* data, std::uint64_t nbytes, std::uint64_t id = 1) {
    Result<gpu::ExportedMemory> exported =
        gpu::export_memory(emulated::driver(), reinterpret_cast<gpu::Address>(data));
    REQUIRE_OK(exported);
    Message message = Message::about(MessageKind::kMemory, id);
    message.base = exported.value().base;
    message.nbytes = nbytes;
    message.handle_kind = exported.value().kind;
    message.handle = exported.value().handle;
    say(message, exported.value().fd ? share(std::move(exported.value().fd)) : nullptr);
    end.step();
    const cuda_ipc::Keys keys{.last_memory = id};
    const auto bytes = std::as_bytes(std::span(&keys, 1));
    return end.transport->attach(peer,
                                 {id, message.base, {{0, nbytes}}, RegionKeys(bytes.begin(), bytes.end())});
  }

  DeviceMemory theirs{kNbytes}, arrived{kNbytes};
  Ends bystander{make};
  Ends end{make};
  PeerId bystander_peer = 0, peer = 0;
  std::unique_ptr<FenceTable> fences = Ends::make_fences();
  std::unique_ptr<cuda_ipc::SideChannel> channel;
};

TEST(memory_is_as_long_as_the_driver_says_and_not_as_its_owner_does) {
  DeviceMemory memory(kNbytes);
  const gpu::Address pages = emulated::allocate_pages(2 * emulated::kGranularity, gpu::kPosixFdHandle);
  REQUIRE(pages != 0);
  const struct {
    const std::byte* data;
    std::uint64_t nbytes;
  } kinds[] = {{memory.data(), kNbytes},
               {reinterpret_cast<const std::byte*>(pages), 2 * emulated::kGranularity}};
  for (const auto& kind : kinds) {
    {
      Impostor honest;
      CHECK_OK(honest.attach(kind.data, kind.nbytes));
      CHECK_EQ(honest.end.transport->num_mappings(), 2u);
    }
    for (const std::uint64_t more : {std::uint64_t{1}, std::uint64_t{1} << 40}) {
      Impostor liar;
      const Status refused = liar.attach(kind.data, kind.nbytes + more);
      CHECK_EQ(refused.code(), Code::kUnsupported);
      CHECK_EQ(liar.end.transport->num_mappings(), 1u);  // the bystander's
    }
  }
}

TEST(a_peer_has_as_much_mapped_and_passes_as_many_descriptors_as_its_budget_has) {
  Budget::Amounts limits;
  limits.fill(UINT64_MAX);
  limits[static_cast<std::size_t>(Resource::kMapped)] = kNbytes;
  limits[static_cast<std::size_t>(Resource::kDescriptors)] = 1;
  const auto budget = std::make_shared<Budget>(limits);
  DeviceMemory one(kNbytes), other(kNbytes);
  {
    Impostor impostor(budget);
    CHECK_OK(impostor.attach(one.data(), kNbytes, 1));
    const Status refused = impostor.attach(other.data(), kNbytes, 2);
    CHECK_HAS(refused.message(), "mapped bytes");
    impostor.end.transport->detach(impostor.peer, 1);
    CHECK_OK(impostor.attach(one.data(), kNbytes, 3));
    impostor.end.transport->disconnect(impostor.peer);
    CHECK_EQ(budget->used(Resource::kMapped), 0u);
  }
  const gpu::Address pages = emulated::allocate_pages(emulated::kGranularity, gpu::kPosixFdHandle);
  REQUIRE(pages != 0);
  Impostor impostor(budget);
  static_cast<void>(impostor.attach(reinterpret_cast<const std::byte*>(pages), emulated::kGranularity, 1));
  static_cast<void>(impostor.attach(reinterpret_cast<const std::byte*>(pages), emulated::kGranularity, 2));
  CHECK_HAS(impostor.end.await(CompletionKind::kRailDown).detail, "1 descriptors here");
  CHECK_EQ(budget->used(Resource::kDescriptors), 0u);
}

}  // namespace
}  // namespace kvxfer::gpu_ipc_hostile_test
