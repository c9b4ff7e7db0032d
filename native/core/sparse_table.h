// Tables over things that are numbered from 0 on (a region's blocks), most of which have no entry. Pages of
// entries are made where an entry is set. So a table costs its set entries, and a pointer for each possible
// page.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvxfer {

template <class T, std::size_t kPerPage>
class SparseTable {
 public:
  using Page = std::array<T, kPerPage>;

  SparseTable() = default;
  explicit SparseTable(std::size_t num) : pages_((num + kPerPage - 1) / kPerPage) {}

  // An entry that was never set reads as T{}, as does one beyond the end.
  T get(std::size_t id) const noexcept {
    const std::size_t page = id / kPerPage;
    return page < pages_.size() && pages_[page] != nullptr ? (*pages_[page])[id % kPerPage] : T{};
  }
  // Makes the entry's page; later calls for that page take no memory.
  T& at(std::size_t id) {
    std::unique_ptr<Page>& page = pages_[id / kPerPage];
    if (page == nullptr) page = std::make_unique<Page>();
    return (*page)[id % kPerPage];
  }
  // The same, of a page that at() has made.
  T& made(std::size_t id) noexcept { return (*pages_[id / kPerPage])[id % kPerPage]; }
  const std::vector<std::unique_ptr<Page>>& pages() const noexcept { return pages_; }
  std::size_t size() const noexcept { return pages_.size() * kPerPage; }

 private:
  std::vector<std::unique_ptr<Page>> pages_;
};

class SparseBitSet {
 public:
  SparseBitSet() = default;
  explicit SparseBitSet(std::size_t num) : words_((num + 63) / 64) {}
  // A set that holds every number.
  static SparseBitSet all() {
    SparseBitSet set;
    set.all_ = true;
    return set;
  }

  bool contains(std::uint32_t id) const noexcept { return all_ || (words_.get(id / 64) >> id % 64 & 1) != 0; }
  void insert(std::uint32_t id) { words_.at(id / 64) |= std::uint64_t{1} << id % 64; }
  // Inserts another set over the same range of numbers.
  void insert(const SparseBitSet& other) {
    all_ = all_ || other.all_;
    if (all_ || other.words_.size() == 0) return;
    if (words_.size() == 0) words_ = Words(other.words_.size());
    for (std::size_t page = 0; page < other.words_.pages().size(); ++page)
      if (const auto& from = other.words_.pages()[page]; from != nullptr)
        for (std::size_t i = 0; i < from->size(); ++i) words_.at(page * from->size() + i) |= (*from)[i];
  }

 private:
  using Words = SparseTable<std::uint64_t, 64>;  // a page of 512 bytes has 4096 bits
  Words words_;
  bool all_ = false;
};

}  // namespace kvxfer
