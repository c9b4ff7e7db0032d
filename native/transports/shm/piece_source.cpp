#include "transports/shm/piece_source.h"

namespace kvxfer::shm {
namespace {

// A region in a process's own memory.
class ForeignSource final : public CopySource {
 public:
  ForeignSource(const ForeignMemory& memory, ForeignReader& reader, std::uint64_t base) noexcept
      : memory_(memory), reader_(reader), base_(base) {}
  Status copy(const Move& move, const Piece& pairs) override {
    return reader_.fetch_pairs(memory_, move, pairs, base_);
  }
  Result<const std::byte*> read(std::uint64_t offset, std::size_t nbytes) override {
    return reader_.read(memory_, base_ + offset, nbytes);
  }

 private:
  const ForeignMemory& memory_;
  ForeignReader& reader_;
  const std::uint64_t base_;
};

}  // namespace

Result<std::uint64_t> PieceSource::advance(SlicedCopy& slices, std::unique_ptr<ForeignReader>& reader) const {
  if (!is_mapped()) {
    if (reader == nullptr) reader = std::make_unique<ForeignReader>();
    ForeignSource source(*process_, *reader, base_);
    return slices.advance(source);
  }
  MappedSource source(pool_->mapping.data() + base_);
  Result<std::uint64_t> cost = slices.advance(source);
  if (Status whole = pool_->mapping.check_holes(); !whole.ok()) return whole;
  return cost;
}

}  // namespace kvxfer::shm
