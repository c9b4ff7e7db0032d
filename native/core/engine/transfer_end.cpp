#include "core/engine/transfer_end.h"

#include <algorithm>
#include <unordered_set>

namespace kvxfer {

void TransferEnd::forget_work(WorkId work) {
  const auto found =
      std::find_if(posted.begin(), posted.end(), [work](const auto& entry) { return entry.work == work; });
  if (found != posted.end()) posted.erase(found);
}

std::string TransferEnd::name() const { return "transfer " + std::to_string(key.second) + in_words(context); }

std::string TransferEnd::unreleased(const char* where) const {
  return std::to_string(move->grid.num_layers - layers_ready) + " of its " +
         std::to_string(move->grid.num_layers) + " layers had not been released " + where +
         " when the transfer's time was over";
}

void TransferEnd::take(wire::TransferSpec& spec, std::shared_ptr<const CopyProgram> copies,
                       const Region& local, RegionId remote) {
  region = local.memory.id;
  memory = local.memory.kind;
  program = spec.program;
  notify = std::move(spec.notify);
  context = std::move(spec.context);
  priority = spec.priority;
  integrity = (spec.flags & wire::kFlagIntegrity) != 0;
  lease_named = (spec.flags & wire::kFlagLease) != 0;
  owes_word = (spec.flags & wire::kFlagLastWord) != 0;
  lease = spec.lease;
  timeout_ns = static_cast<Time>(spec.timeout_ns);
  auto moves = std::make_shared<Move>();
  moves->transfer = spec.transfer;
  moves->priority = spec.priority;
  moves->program = std::move(copies);
  moves->grid = spec.grid;
  moves->src_ids = std::move(spec.src_ids);
  moves->dst_ids = std::move(spec.dst_ids);
  moves->local = local.shared;
  moves->remote_region = remote;
  move = std::move(moves);
}

TransferEnd::LentTables::LentTables(TransferEnd& transfer, wire::TransferSpec& spec)
    : transfer_(transfer), spec_(spec) {
  spec.transfer = transfer.key.second;
  spec.program = transfer.program;
  spec.grid = transfer.move->grid;
  spec.priority = transfer.priority;
  spec.flags = static_cast<std::uint8_t>((transfer.integrity ? wire::kFlagIntegrity : 0) |
                                         (transfer.lease_named ? wire::kFlagLease : 0) |
                                         (transfer.owes_word ? wire::kFlagLastWord : 0));
  spec.lease = transfer.lease;
  spec.timeout_ns = static_cast<std::uint64_t>(transfer.timeout_ns);
  exchange();
}

void TransferEnd::LentTables::exchange() noexcept {
  spec_.src_ids.swap(transfer_.move->src_ids);
  spec_.dst_ids.swap(transfer_.move->dst_ids);
  spec_.notify.swap(transfer_.notify);
  spec_.context.swap(transfer_.context);
}

Status as_loss(Status why) {
  if (is_of_transfer(why.code()) || is_of_peer(why.code()) || why.code() == Code::kClosed) return why;
  return {Code::kNoPath, why.message()};
}

std::vector<std::uint32_t> blocks_of(const Move& move, Side side, const std::vector<bool>& pairs) {
  std::vector<std::uint32_t> blocks;
  std::unordered_set<std::uint32_t> seen;
  const bool src = side == Side::kSrc;
  for (std::uint32_t pair = 0; pair < move.grid.num_pairs; ++pair) {
    if (!pairs[pair]) continue;
    const std::uint32_t block = src ? move.src_block(pair) : move.dst_block(pair);
    if (seen.insert(block).second) blocks.push_back(block);
  }
  return blocks;
}

}  // namespace kvxfer
