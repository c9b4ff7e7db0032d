// What a workload's judge keeps: which copy may write which blocks, and the expected bytes by token and head.
// After every step it checks the promises against that.
#pragma once

#include <set>

#include "simulated_copy.h"
#include "simulated_pair.h"

namespace simulation {

class Judge {
 public:
  explicit Judge(std::uint64_t seed) : world_(seed), random_(world_.random()) {}

  std::size_t num_done() const { return num_done_; }
  std::size_t num_copies() const { return copies_.size(); }
  std::size_t num_done_together() const { return num_done_together_; }  // with several writers
  // Copies that were done under a lease that another copy had used, too.
  std::size_t num_shared() const { return num_shared_; }

 protected:
  using Kind = Copy::Kind;
  struct Agent {
    Node* node;
    Layout layout;
    RegionId region;
    std::set<std::uint32_t> free;
    std::map<std::uint32_t, Copy*> landing;  // block -> the copy that may write it
  };

  // When a right is reported to be over, and not before, its blocks are the owner's again. The next copy may
  // name them at once: an offer that is parked, or an offer or a request that is still on its way, must not
  // be served under that copy's right.
  void end_source(Part& part) {
    if (std::exchange(part.src_over, true)) return;
    for (const std::uint32_t block : part.blocks) part.from->fill(block, random_.next());
    give_back(part.src, part.src_life, part.from, part.blocks);
  }
  void end_destination(Copy& copy) {
    if (std::exchange(copy.dst_over, true)) return;
    auto& landing = agents_[copy.dst].landing;
    for (const std::uint32_t block : copy.blocks)
      if (auto found = landing.find(block); found != landing.end() && found->second == &copy)
        landing.erase(found);
    give_back(copy.dst, copy.dst_life, copy.to, copy.blocks);
  }
  void give_back(std::size_t index, std::uint64_t life, const std::shared_ptr<Memory>& memory,
                 const Blocks& blocks) {
    Agent& agent = agents_[index];
    if (agent.node->life() == life && is_current(index, memory))
      agent.free.insert(blocks.begin(), blocks.end());
  }
  // Whether the memory belongs to the region that the agent has now.
  bool is_current(std::size_t index, const std::shared_ptr<Memory>& memory) const {
    const Agent& agent = agents_[index];
    const auto found = agent.node->memories()->find(agent.region);
    return found != agent.node->memories()->end() && found->second == memory;
  }
  std::size_t index_of(const Node& node) const { return static_cast<std::size_t>(node.place()); }
  // Checks the heads that `part` brings, or all heads.
  void check_layer(Copy& copy, const Part* part, std::uint32_t layer, const char* when) {
    for (std::uint32_t token = copy.first_token; token < copy.end_token; ++token)
      for (std::uint32_t head = 0; head < kHeads; ++head) {
        const auto found = copy.cells.find({layer, token, head});
        if (found == copy.cells.end() || (part != nullptr && !part->brings(head))) continue;
        if (copy.to->read(layer, copy.blocks, token, head) != found->second)
          return FAIL(std::string(when) + ", but the bytes of layer " + std::to_string(layer) + ", token " +
                      std::to_string(token) + ", head " + std::to_string(head) +
                      " are not the source's: " + copy.words());
      }
  }
  void check_bytes(Copy& copy, const Part* part, const char* when) {
    if (copy.dst_over) FAIL(std::string(when) + ", but its right had ended: " + copy.words());
    for (std::uint32_t layer = copy.first_layer; layer < copy.first_layer + copy.num_layers; ++layer)
      check_layer(copy, part, layer, when);
  }
  void check_all(Copy& copy, const char* when) {
    check_bytes(copy, nullptr, when);
    copy.dst_done = true;
    ++num_done_;
    num_done_together_ += copy.parts.size() > 1;
    num_shared_ += std::any_of(copies_.begin(), copies_.end(), [&](const auto& other) {
      return copy.of_bearer() && other.get() != &copy && other->lease == copy.lease && other->dst_done;
    });
  }
  // Checks that each failed block is named once, and belongs to the table.
  void check_failed(const Handle& handle, const Blocks& table, const Copy& copy) {
    const Blocks failed = handle.failed_blocks();
    const std::set<std::uint32_t> distinct(failed.begin(), failed.end());
    if (distinct.size() != failed.size()) FAIL("a block has failed twice: " + copy.words());
    for (const std::uint32_t block : failed)
      if (std::find(table.begin(), table.end(), block) == table.end())
        FAIL("block " + std::to_string(block) + " has failed, which is none of " + copy.words());
  }

  struct Booked {
    Copy* copy = nullptr;
    std::size_t part = 0;
  };
  void on_event(Node& node, const Event& event) {
    const std::size_t index = index_of(node);
    const auto of = [&](auto& books) -> Booked {
      auto found = books.find({index, node.life(), event.handle});
      return found == books.end() ? Booked{} : found->second;
    };
    if (event.kind == EventKind::kLayer) {
      if (const auto [copy, part] = of(posted_); copy != nullptr)
        check_layer(*copy, &copy->parts[part], event.layer, "a layer was reported");
      if (Copy* copy = of(expected_).copy) {
        if (!copy->is_whole) FAIL("a layer was reported of which a part never came: " + copy->words());
        check_layer(*copy, nullptr, event.layer, "a layer was reported");
      }
    } else if (event.kind == EventKind::kEnded) {
      if (const auto [copy, part] = of(posted_); copy != nullptr) part_ended(*copy, copy->parts[part]);
      if (Copy* copy = of(expected_).copy) {
        CHECK_EQ(++copy->num_expected_ended, 1);
        if (copy->expected->outcome() == Outcome::kDone) {
          if (!copy->is_whole) FAIL("done, though a part never came: " + copy->words());
          check_all(*copy, "what was expected is done");
        } else {
          check_failed(*copy->expected, copy->blocks, *copy);
        }
        end_destination(*copy);
      }
    } else if (event.kind == EventKind::kNotification) {
      for (auto& copy : copies_) {
        if (copy->tag != event.payload) continue;
        if (copy->read())
          CHECK(copy->dst_done);
        else if (copy->kind == Kind::kUnderWriteLease)
          check_all(*copy, "a notification came");
        else
          FAIL("a notification came for what is expected");
      }
    } else if (event.kind == EventKind::kLeaseEnded) {
      for (auto& copy : copies_) {
        if (copy->lease != event.lease || copy->lease == 0) continue;
        Part& part = copy->parts[0];
        if (copy->read() && part.src == index && part.src_life == node.life()) end_source(part);
        if (copy->kind == Kind::kUnderWriteLease && copy->dst == index && copy->dst_life == node.life())
          end_destination(*copy);
      }
    }
  }
  void part_ended(Copy& copy, Part& part) {
    CHECK_EQ(++part.num_ended, 1);
    const bool done = part.handle->outcome() == Outcome::kDone;
    CHECK(part.handle->outcome() != Outcome::kPending);
    if (!done) check_failed(*part.handle, copy.read() ? copy.blocks : part.blocks, copy);
    if (copy.read()) {
      if (done) check_all(copy, "a read is done");
      return end_destination(copy);
    }
    if (done && copy.kind == Kind::kUnderWriteLease) CHECK(copy.dst_done);
    // Other writers of an expectation may have failed meanwhile; the blocks may then serve another copy.
    if (done && copy.kind == Kind::kExpected && !copy.dst_over && !copy.dst_done)
      check_bytes(copy, &part, "a writer is done");
    if (done && copy.kind == Kind::kExpected && copy.parts.size() == 1 && copy.is_whole) CHECK(copy.dst_done);
    end_source(part);
  }
  void on_write(Node& node, SessionKey from, Memory& memory, std::uint64_t offset, std::uint64_t nbytes) {
    Agent& agent = agents_[index_of(node)];
    if (&memory != &node.memory(agent.region)) {
      // After deregister, transfers under way may go on until it is reported to be complete.
      if (!memory.registered) FAIL("bytes land in a region that is gone");
      return;
    }
    const auto peer = node.engine().peer(from);
    for (std::uint64_t at = offset; at < offset + nbytes; ++at) {
      const auto place = memory.layout.place_of(at);
      auto found = place ? agent.landing.find(place->block) : agent.landing.end();
      if (found == agent.landing.end()) return FAIL("bytes land where no live right is");
      const Copy& copy = *found->second;
      const std::uint32_t token = copy.token_at(*place);
      if (copy.dst_over || place->layer - copy.first_layer >= copy.num_layers || token < copy.first_token ||
          token >= copy.end_token)
        return FAIL("bytes land in block " + std::to_string(place->block) + ", layer " +
                    std::to_string(place->layer) + ", token " + std::to_string(token) + ", which is for " +
                    copy.words());
      if (!peer || std::none_of(copy.parts.begin(), copy.parts.end(), [&](const Part& part) {
            return part.src_name == peer->name && part.brings(place->head);
          }))
        return FAIL("bytes of head " + std::to_string(place->head) +
                    " come from another than who brings it: " + copy.words());
    }
  }
  void check_bounded() {
    if (++num_steps_ % 64 != 0) return;
    for (auto& copy : copies_)
      if (world_.now() > copy->ends_by) check_ended(*copy);
  }
  void check_ended(Copy& copy) {
    for (const Part& part : copy.parts)
      if (part.handle && agents_[copy.read() ? copy.dst : part.src].node->life() ==
                             (copy.read() ? copy.dst_life : part.src_life))
        CHECK_EQ(part.num_ended, 1);
    if (copy.expected && agents_[copy.dst].node->life() == copy.dst_life)
      CHECK_EQ(copy.num_expected_ended, 1);
  }

  static constexpr std::uint32_t kHeads = 4;
  static constexpr Time kMaxStop = 4 * kSecond;
  using BookKey = std::tuple<std::size_t, std::uint64_t, std::uint64_t>;  // agent, life, handle
  World world_;
  check::Random& random_;
  std::vector<Agent> agents_;
  std::vector<std::unique_ptr<Copy>> copies_;
  std::map<BookKey, Booked> posted_, expected_;

 private:
  std::size_t num_done_ = 0, num_done_together_ = 0, num_shared_ = 0;
  std::uint64_t num_steps_ = 0;
};

}  // namespace simulation
