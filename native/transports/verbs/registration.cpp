#include "transports/verbs/registration.h"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "gpu/region_device.h"

namespace kvxfer::verbs {
namespace {

struct KeysHead {
  std::array<char, 4> magic{'k', 'v', 'v', '1'};
  std::uint32_t num = 0;
};
// In a peer's bytes: little-endian, no padding.
struct WireSpan {
  std::uint64_t offset = 0, nbytes = 0, address = 0;
  std::uint32_t key = 0, reserved = 0;
};
static_assert(sizeof(WireSpan) == 32);
constexpr std::size_t kMostSpans = (kMaxKeyBytes - sizeof(KeysHead)) / sizeof(WireSpan);

std::string in_words(std::uint64_t nbytes) {
  if (nbytes < 1024 * 1024) return std::to_string(nbytes) + " bytes";
  return std::to_string(nbytes >> 20) + " MiB";
}

// Why memory could not be registered, and what to do.
Status refused(const Device& device, std::uint64_t nbytes, int error) {
  const std::string what = "verbs: " + device.name() + " could not register " + in_words(nbytes);
  if (error != ENOMEM && error != EAGAIN && error != EPERM)
    return Status::from_errno(what + ": ibv_reg_mr", error);
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return {Code::kExhausted,
            what + ": this process may lock " + in_words(limit.rlim_cur) +
                " of memory (RLIMIT_MEMLOCK): raise that by `ulimit -l unlimited`, in a unit of "
                "systemd by LimitMEMLOCK=infinity, in a container by `--ulimit memlock=-1`"};
  return {Code::kExhausted,
          what +
              ": the system has no memory for it, or the device has no registrations left: register "
              "fewer, larger regions"};
}

}  // namespace

Result<std::shared_ptr<const Registration>> Registration::create(std::shared_ptr<const Device> device,
                                                                 const LocalRegion& region,
                                                                 const GpuMemory* gpu) {
  const std::shared_ptr<Registration> made(new Registration(std::move(device)));
  if (region.kind == MemoryKind::kHost) {
    gpu = nullptr;
  } else {
    if (gpu == nullptr) return Status(Code::kUnsupported, "verbs: the agent has no GPU");
    if (Status here = gpu::check_device(region, gpu->device()); !here.ok()) return here;
    made->why_not_written_ = gpu->why_not_written();
  }
  for (std::size_t i = 0; i < region.spans.size();) {
    MemorySpan span = region.spans[i];
    for (++i; i < region.spans.size() && region.spans[i].offset == span.offset + span.nbytes; ++i)
      span.nbytes += region.spans[i].nbytes;
    if (Status added = made->add(region.base, span.offset, span.nbytes, gpu); !added.ok()) return added;
  }
  if (made->regions_.size() > kMostSpans)
    return Status(Code::kExhausted, "verbs: the region lies in " + std::to_string(made->regions_.size()) +
                                        " spans, but its keys can describe only " +
                                        std::to_string(kMostSpans) +
                                        ": register fewer, larger tensors in one region");
  return std::shared_ptr<const Registration>(made);
}

Registration::~Registration() {
  for (abi::MemoryRegion* const region : regions_) device_->library().dereg_mr(region);
}

Status Registration::add(std::byte* base, std::uint64_t offset, std::uint64_t nbytes, const GpuMemory* gpu) {
  const std::uint64_t most = std::max<std::uint64_t>(device_->most_registered_nbytes(), 4096) / 4096 * 4096;
  for (const std::uint64_t end = offset + nbytes; offset < end; offset += nbytes) {
    nbytes = std::min(end - offset, most);
    regions_.reserve(regions_.size() + 1);
    Result<abi::MemoryRegion*> added =
        gpu == nullptr ? add_to_device(base + offset, nbytes) : add_of_gpu(*gpu, base + offset, nbytes);
    if (!added.ok()) return added.status();
    regions_.push_back(added.value());
    const auto address = reinterpret_cast<std::uintptr_t>(base + offset);
    local_.push_back({offset, offset + nbytes, address, added.value()->lkey});
    remote_.push_back({offset, offset + nbytes, address, added.value()->rkey});
  }
  return {};
}

unsigned Registration::access() const noexcept {
  const unsigned write = device_->options().writes ? abi::kRemoteWrite : 0u;
  return abi::kRemoteRead | (why_not_written_.empty() ? abi::kLocalWrite | write : 0u);
}

abi::MemoryRegion* Registration::try_memory(std::byte* memory, std::uint64_t nbytes) const {
  const Library& library = device_->library();
  if (device_->options().relaxed_ordering && library.reg_mr_iova2 != nullptr)
    return library.reg_mr_iova2(device_->domain(), memory, nbytes, reinterpret_cast<std::uintptr_t>(memory),
                                access() | abi::kRelaxedOrdering);
  return library.reg_mr(device_->domain(), memory, nbytes, static_cast<int>(access()));
}

Result<abi::MemoryRegion*> Registration::add_to_device(std::byte* memory, std::uint64_t nbytes) {
  abi::MemoryRegion* region = try_memory(memory, nbytes);
  if (region == nullptr && why_not_written_.empty() && (errno == EFAULT || errno == EACCES)) {
    // This process may only read these pages; peers may read them, too.
    why_not_written_ = "its pages are read-only";
    region = try_memory(memory, nbytes);
    if (region == nullptr) why_not_written_.clear();
  }
  if (region == nullptr) return refused(*device_, nbytes, errno);
  return region;
}

abi::MemoryRegion* Registration::try_dmabuf(const GpuMemory& gpu, std::byte* memory, std::uint64_t nbytes,
                                            std::string& why_not) const {
  const Library& library = device_->library();
  if (library.reg_dmabuf_mr == nullptr) {
    why_not = "this libibverbs cannot register one: install rdma-core 34 or newer";
    return nullptr;
  }
  const Result<GpuMemory::Dmabuf> dmabuf = gpu.dmabuf_of(memory, nbytes);
  if (!dmabuf.ok()) {
    why_not = dmabuf.status().message();
    return nullptr;
  }
  const auto reg = [&](unsigned wished) {
    return library.reg_dmabuf_mr(device_->domain(), dmabuf.value().offset, nbytes,
                                 reinterpret_cast<std::uintptr_t>(memory), dmabuf.value().fd.get(),
                                 static_cast<int>(wished));
  };
  abi::MemoryRegion* region = nullptr;
  if (device_->options().relaxed_ordering) region = reg(access() | abi::kRelaxedOrdering);
  // This driver may not know the flag for dmabufs.
  if (region == nullptr) region = reg(access());
  if (region == nullptr) why_not = Status::from_errno("ibv_reg_dmabuf_mr", errno).message();
  return region;
}

Result<abi::MemoryRegion*> Registration::add_of_gpu(const GpuMemory& gpu, std::byte* memory,
                                                    std::uint64_t& nbytes) {
  std::string why_no_dmabuf;
  if (abi::MemoryRegion* const region = try_dmabuf(gpu, memory, nbytes, why_no_dmabuf)) return region;
  // Allocations that lie side by side are registered one by one.
  if (const std::uint64_t own = gpu.left_of_allocation(memory); own != 0 && own < nbytes) {
    nbytes = own;
    if (abi::MemoryRegion* const region = try_dmabuf(gpu, memory, nbytes, why_no_dmabuf)) return region;
  }
  // With nvidia-peermem, a device registers a GPU's addresses like others.
  if (abi::MemoryRegion* const region = try_memory(memory, nbytes)) return region;
  return Status(Code::kUnsupported, "verbs: " + device_->name() + " could not register " + in_words(nbytes) +
                                        " of GPU memory, as a dmabuf (" + why_no_dmabuf +
                                        ") or by its address (" +
                                        Status::from_errno("ibv_reg_mr", errno).message() +
                                        "): modprobe nvidia-peermem, or install what dmabufs need");
}

RegionKeys Registration::keys() const {
  KeysHead head;
  head.num = static_cast<std::uint32_t>(regions_.size());
  RegionKeys out(sizeof head + regions_.size() * sizeof(WireSpan));
  std::memcpy(out.data(), &head, sizeof head);
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const KeyedSpan& span = remote_.all()[i];
    const WireSpan told{span.offset, span.end - span.offset, span.address, span.key, 0};
    std::memcpy(out.data() + sizeof head + i * sizeof told, &told, sizeof told);
  }
  return out;
}

Result<KeyedSpans> spans_of(const RemoteRegion& region) {
  const auto unlike = [](const char* what) {
    return Status(Code::kUnsupported, std::string("its keys are not in this version's format: ") + what);
  };
  KeysHead head;
  if (region.keys.size() < sizeof head) return unlike("they are too short");
  std::memcpy(&head, region.keys.data(), sizeof head);
  if (head.magic != KeysHead().magic) return unlike("they are of another version");
  if (head.num > kMostSpans || region.keys.size() != sizeof head + head.num * sizeof(WireSpan))
    return unlike("their length does not match their spans");
  KeyedSpans spans;
  std::uint64_t last_end = 0;
  for (std::uint32_t i = 0; i < head.num; ++i) {
    WireSpan told;
    std::memcpy(&told, region.keys.data() + sizeof head + i * sizeof told, sizeof told);
    std::uint64_t end, address_end;
    if (told.nbytes == 0 || __builtin_add_overflow(told.offset, told.nbytes, &end) ||
        __builtin_add_overflow(told.address, told.nbytes, &address_end) || told.offset < last_end)
      return unlike("their spans do not ascend, or exceed 64 bits");
    spans.push_back({told.offset, end, told.address, told.key});
    last_end = end;
  }
  return spans;
}

}  // namespace kvxfer::verbs
