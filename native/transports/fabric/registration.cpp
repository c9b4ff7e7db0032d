#include "transports/fabric/registration.h"

#include <array>
#include <cstring>
#include <string>
#include <utility>

namespace kvxfer::fabric {
namespace {

struct KeysHead {
  std::array<char, 4> magic{'k', 'v', 'k', '1'};
  std::uint32_t num = 0;
};
// Of a peer: little-endian, no padding. Its key follows.
struct WireSpan {
  std::uint64_t offset = 0, nbytes = 0, address = 0;
  std::uint32_t key_nbytes = 0, reserved = 0;
};
static_assert(sizeof(WireSpan) == 32);

}  // namespace

Result<std::shared_ptr<const Registration>> Registration::create(std::shared_ptr<Fabric> fabric,
                                                                 const LocalRegion& region,
                                                                 bool takes_writes) {
  const std::shared_ptr<Registration> made(new Registration(std::move(fabric)));
  KeysHead head;
  made->keys_.resize(sizeof head);
  const auto append = [&](std::span<const std::byte> bytes) {
    made->keys_.insert(made->keys_.end(), bytes.begin(), bytes.end());
  };
  for (std::size_t i = 0; i < region.spans.size();) {
    MemorySpan span = region.spans[i];
    for (++i; i < region.spans.size() && region.spans[i].offset == span.offset + span.nbytes; ++i)
      span.nbytes += region.spans[i].nbytes;
    std::byte* const first = region.base + span.offset;
    Result<std::unique_ptr<Memory>> mapped =
        made->fabric_->map(first, span.nbytes, region.kind, takes_writes);
    if (!mapped.ok()) return mapped.status();
    const Memory& memory = *made->memory_.emplace_back(std::move(mapped).value());
    made->local_.push_back(
        {span.offset, span.offset + span.nbytes, reinterpret_cast<std::uintptr_t>(first), memory.local_key});
    const WireSpan told{span.offset, span.nbytes, memory.address,
                        static_cast<std::uint32_t>(memory.key.size()), 0};
    append(std::as_bytes(std::span(&told, 1)));
    append(memory.key);
    ++head.num;
  }
  std::memcpy(made->keys_.data(), &head, sizeof head);
  if (made->keys_.size() > kMaxKeyBytes)
    return Status(Code::kExhausted,
                  std::string(made->fabric_->transport()) + ": the region lies in " +
                      std::to_string(head.num) + " spans, whose keys are longer than the " +
                      std::to_string(kMaxKeyBytes) +
                      " bytes that can be sent to peers: register fewer, larger tensors in one region");
  return std::shared_ptr<const Registration>(made);
}

Result<std::shared_ptr<const RemoteMemory>> RemoteMemory::unpack(const RegionKeys& keys, Endpoint& endpoint) {
  const auto unlike = [](const char* what) {
    return Status(Code::kUnsupported, std::string("its keys are not in this version's format: ") + what);
  };
  std::span<const std::byte> left = keys;
  KeysHead head;
  if (left.size() < sizeof head) return unlike("they are too short");
  std::memcpy(&head, left.data(), sizeof head);
  left = left.subspan(sizeof head);
  if (head.magic != KeysHead().magic) return unlike("they are of another version");
  auto made = std::make_shared<RemoteMemory>();
  std::uint64_t last_end = 0;
  for (std::uint32_t i = 0; i < head.num; ++i) {
    WireSpan told;
    if (left.size() < sizeof told) return unlike("they are too short");
    std::memcpy(&told, left.data(), sizeof told);
    left = left.subspan(sizeof told);
    std::uint64_t end, address_end;
    if (told.key_nbytes > left.size() || told.nbytes == 0 ||
        __builtin_add_overflow(told.offset, told.nbytes, &end) ||
        __builtin_add_overflow(told.address, told.nbytes, &address_end) || told.offset < last_end)
      return unlike("their spans do not ascend, or exceed 64 bits");
    std::shared_ptr<const void>& holder = made->holders.emplace_back();
    const Result<std::uint64_t> key = endpoint.unpack(left.first(told.key_nbytes), holder);
    if (!key.ok()) return key.status();
    left = left.subspan(told.key_nbytes);
    made->spans.push_back({told.offset, end, told.address, key.value()});
    last_end = end;
  }
  if (!left.empty()) return unlike("their length does not match their spans");
  return std::shared_ptr<const RemoteMemory>(std::move(made));
}

}  // namespace kvxfer::fabric
