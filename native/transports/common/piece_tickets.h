// Pieces that the source writes into the destination's memory, and the numbers that announce them. No number
// is given twice, so a late number has no effect.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/in_room.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A piece of a transfer, and its number. Among all pieces that the destination awaits over this rail, the
// number is unique.
struct PieceTicket {
  TransferId transfer;
  std::uint32_t piece, number;
};

// At the destination: the pieces that it awaits from one peer.
class AwaitedPieces {
 public:
  struct Piece {
    std::uint32_t number = 0;
    Work work;
    std::size_t of_class = 0;  // of its transfer's priority
    // The result of the piece. kCancelled: the source was told to give it up.
    Code code = Code::kOk;
    std::string why;
    std::chrono::steady_clock::time_point due_at{};  // kCancelled
  };

  // Makes room for so many pieces of each class.
  void reserve(std::size_t most, std::size_t num_classes) {
    pieces_.reserve(most * num_classes);
    most_ = most;
  }
  bool has_room() const noexcept { return pieces_.size() < pieces_.capacity(); }  // of some class
  bool has_room(std::size_t of_class) const noexcept { return nums_[of_class] < most_; }
  bool empty() const noexcept { return pieces_.empty(); }
  auto begin() noexcept { return pieces_.begin(); }
  auto end() noexcept { return pieces_.end(); }
  auto begin() const noexcept { return pieces_.begin(); }
  auto end() const noexcept { return pieces_.end(); }

  Piece& add(Work work, std::size_t of_class) noexcept {
    ++nums_[of_class];
    if (++last_ == 0) ++last_;  // 0 is the number of a piece that was never awaited
    return add_in_room(pieces_, Piece{last_, std::move(work), of_class, Code::kOk, {}, {}});
  }
  Piece* find(std::uint32_t number) noexcept {
    return find_if([number](const Piece& piece) { return piece.number == number; });
  }
  Piece* find_work(WorkId work) noexcept {
    return find_if([work](const Piece& piece) { return piece.work.id == work; });
  }
  void erase(Piece* piece) noexcept {
    --nums_[piece->of_class];
    if (piece != &pieces_.back()) *piece = std::move(pieces_.back());
    pieces_.pop_back();
  }

 private:
  template <class Matches>
  Piece* find_if(Matches&& matches) noexcept {
    const auto found = std::find_if(pieces_.begin(), pieces_.end(), matches);
    return found == pieces_.end() ? nullptr : &*found;
  }
  std::vector<Piece> pieces_;
  std::array<std::size_t, PriorityClasses::kMost> nums_{};  // by class
  std::size_t most_ = 0;
  std::uint32_t last_ = 0;
};

// At the source: what its peer said about pieces that no work has begun to send. The peer sends one such
// message for each work that sends a piece, in the order of the works. So the first message about a piece
// belongs to the first work that is left.
class AskedPieces {
 public:
  enum class Added : std::uint8_t { kYes, kDropped, kTooMany };

  // The most pieces that may be awaited at a time.
  void reserve(std::size_t most) {
    most_ = most;
    said_.reserve(most + 2 * kMostKept + 2);
  }
  // kDropped: the work that should have sent it has ended.
  Added add(const PieceTicket& ticket) noexcept {
    if (take_dropped(ticket)) return Added::kDropped;
    if (count(State::kAwaited) == most_) return Added::kTooMany;
    add_in_room(said_, Said{ticket, State::kAwaited});
    return Added::kYes;
  }
  // Finds the piece by its number; a piece that was never awaited has none, and is found by transfer and
  // index. False: a work has begun it, or the work that should have sent it has ended.
  bool give_up(const PieceTicket& ticket) noexcept {
    if (ticket.number == 0) {
      if (take_dropped(ticket)) return false;
      keep({ticket, State::kGivenUp});
      return true;
    }
    for (Said& said : said_)
      if (said.ticket.number == ticket.number && said.state == State::kAwaited) {
        said.state = State::kGivenUp;
        drop_beyond(State::kGivenUp);
        return true;
      }
    return false;
  }
  bool has(TransferId transfer, std::uint32_t piece) const noexcept {
    return std::any_of(said_.begin(), said_.end(), [=](const Said& said) {
      return said.state != State::kDropped && is_of(said, transfer, piece);
    });
  }
  // The first message about a piece that has one; and whether the piece was given up.
  std::pair<PieceTicket, bool> take(TransferId transfer, std::uint32_t piece) noexcept {
    const auto first = find(transfer, piece);
    const Said said = *first;
    said_.erase(first);
    return {said.ticket, said.state == State::kGivenUp};
  }
  // The work that should have sent the piece ends. Returns the ticket if the peer awaited it.
  std::optional<PieceTicket> drop(const PieceTicket& ticket) noexcept {
    const auto first = find(ticket.transfer, ticket.piece);
    if (first == said_.end()) {
      keep({ticket, State::kDropped});
      return std::nullopt;
    }
    const Said said = *first;
    said_.erase(first);
    return said.state == State::kAwaited ? std::optional(said.ticket) : std::nullopt;
  }

 private:
  enum class State : std::uint8_t { kAwaited, kGivenUp, kDropped };
  struct Said {
    PieceTicket ticket;
    State state;
  };
  // Kept of each other state. Where there are more, the oldest belongs to a transfer that is over, whose
  // works hear of its end by other messages.
  static constexpr std::size_t kMostKept = 256;

  static bool is_of(const Said& said, TransferId transfer, std::uint32_t piece) noexcept {
    return said.ticket.transfer == transfer && said.ticket.piece == piece;
  }
  std::vector<Said>::iterator find(TransferId transfer, std::uint32_t piece) noexcept {
    return std::find_if(said_.begin(), said_.end(), [=](const Said& said) {
      return said.state != State::kDropped && is_of(said, transfer, piece);
    });
  }
  bool take_dropped(const PieceTicket& ticket) noexcept {
    const auto found = std::find_if(said_.begin(), said_.end(), [&](const Said& said) {
      return said.state == State::kDropped && is_of(said, ticket.transfer, ticket.piece);
    });
    if (found == said_.end()) return false;
    said_.erase(found);
    return true;
  }
  std::size_t count(State state) const noexcept {
    return static_cast<std::size_t>(
        std::count_if(said_.begin(), said_.end(), [=](const Said& said) { return said.state == state; }));
  }
  void keep(const Said& said) noexcept {
    add_in_room(said_, said);
    drop_beyond(said.state);
  }
  void drop_beyond(State state) noexcept {
    if (count(state) <= kMostKept) return;
    said_.erase(
        std::find_if(said_.begin(), said_.end(), [=](const Said& said) { return said.state == state; }));
  }

  std::size_t most_ = 0;
  std::vector<Said> said_;  // room for all of them, and one more
};

}  // namespace kvxfer
