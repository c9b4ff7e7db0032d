// The rails of simulated nodes: works that read, copy and write real bytes in steps, at moments
// that the seed chooses. Between two steps anything may happen, as between two pages of a memcpy.
#pragma once

#include "simulated_node.h"

namespace simulation {

inline Pipe::End Node::pipe_end() {
  return {place_,
          [this, life = life_](SessionKey key, wire::Bytes frame) {
            on_thread(life,
                      [this, key, frame = std::move(frame)] { in_engine()->on_frame(now(), key, frame); });
          },
          [this, life = life_](SessionKey key, std::string why) {
            on_thread(life, [this, key, why = std::move(why)] {
              in_engine()->on_disconnected(now(), key, why);
              connections_.erase(key);
            });
          }};
}

// ---- rails come and go ------------------------------------------------------------------------

inline std::uint32_t Node::session_open(SessionKey session) {
  const Running host(nullptr);
  Connection& connection = connections_.at(session);
  if (connection.other == nullptr) return 0;  // this end was called, so the caller dials the rails
  for (std::uint16_t index = 0; index < connection.rails.size(); ++index) dial_rail(session, index);
  return static_cast<std::uint32_t>(connection.rails.size());
}

inline void Node::dial_rail(SessionKey session, const wire::RailName& rail) {
  const Running host(nullptr);
  dials.emplace_back(now(), rail);
  Connection& connection = connections_.at(session);
  const RailPlan& plan = connection.rails[rail.index];
  auto link = std::make_shared<Link>();
  link->capabilities = plan.capabilities;
  link->name = rail;
  link->ends[0] = {.node = this, .life = life_, .session = session, .memories = memories_, .fences = fences_};
  Node* other = connection.other;
  const auto fails = [this, session, rail, name = plan.capabilities.name](std::string why) {
    run_soon(moment(),
             [this, session, rail, why, name] { engine_->rail_failed(now(), session, rail, why, name); });
  };
  if (engine_->is_off(plan.capabilities.name)) return fails("switched off here");
  if (!plan.comes_up || network_.random().below(100) < lost_rail_percent)
    return fails("a rail could not be connected");
  const SessionKey theirs = connection.pipe->key(1);
  network_.carry(place_, other->place_, network_.latency(),
                 [this, link, other, theirs, fails, life = life_, pipe = connection.pipe] {
                   other->on_thread(other->life_, [this, link, other, theirs, fails, life, pipe] {
                     if (life != life_) return;
                     if (!other->takes_rails) return fails("it was refused");
                     // Found by the pipe, not by the session's number: an agent that was restarted counts its
                     // sessions anew.
                     const auto found = other->connections_.find(theirs);
                     if (found == other->connections_.end() || found->second.pipe != pipe ||
                         other->engine_->session(theirs) == nullptr)
                       return fails("no such session");
                     if (const auto name = link->capabilities.name; other->engine_->is_off(name)) {
                       other->engine_->refused_rail(other->now(), theirs, link->name, name);
                       return fails("it was refused");
                     }
                     link->ends[1] = {.node = other,
                                      .life = other->life_,
                                      .session = theirs,
                                      .rail = other->next_rail_++,
                                      .memories = other->memories_,
                                      .fences = other->fences_};
                     other->rails_[link->ends[1].rail] = {link, 1};
                     other->in_engine()->rail_up(other->now(), theirs,
                                                 {link->ends[1].rail, link->name, link->capabilities});
                     network_.carry(other->place_, place_, network_.latency(), [this, link, life] {
                       on_thread(life, [this, link] {
                         Link::End& end = link->ends[0];
                         end.rail = next_rail_++;
                         if (link->ends[1].dead) {
                           engine_->rail_failed(now(), end.session, link->name, "the peer ended a rail");
                           end.dead = true;
                           return;
                         }
                         rails_[end.rail] = {link, 0};
                         in_engine()->rail_up(now(), end.session, {end.rail, link->name, link->capabilities});
                       });
                     });
                   });
                 });
}

inline Status Node::attach(RailId rail, const RemoteRegion& region) {
  const Running host = enter_host();
  const RailEnd& end = rails_.at(rail);
  if (unattachable.contains(end.link->capabilities.name))
    return {Code::kUnsupported, "cannot be mapped here"};
  end.link->ends[end.side].attached.insert(region.id);
  return {};
}

inline void Node::detach(RailId rail, RegionId region) {
  const Running host(nullptr);
  if (auto found = rails_.find(rail); found != rails_.end())
    found->second.link->ends[found->second.side].attached.erase(region);
}

inline void Node::end_jobs(RailId rail, Code code) {
  for (auto& [id, job] : jobs_)
    if (job->link->ends[job->side].rail == rail && !job->finished) end_job(job, code);
}

// Stops at once, or as a rail whose device has begun: for a while its bytes still move, maybe all of them.
inline void Node::end_job(const std::shared_ptr<Job>& job, Code code) {
  const auto stop = [this, job, code] {
    if (job->finished) return;
    job->stopped = true;
    finish(job, code);
  };
  if (fence_ns == 0 || network_.random().chance(30)) return stop();
  run_soon(static_cast<Time>(network_.random().between(1, static_cast<std::uint64_t>(fence_ns))), stop);
}

inline void Node::drop_rail(RailId rail) {
  const Running host(nullptr);
  auto found = rails_.find(rail);
  if (found == rails_.end()) return;
  const RailEnd end = found->second;
  rails_.erase(found);
  end.link->ends[end.side].dead = true;
  end_jobs(rail, Code::kCancelled);
  Node* other = end.link->ends[1 - end.side].node;
  if (other == nullptr || end.link->muted) return;
  network_.carry(place_, other->place_, network_.latency(), [other, link = end.link, side = 1 - end.side] {
    other->kill_end(link, side, "the peer ended it");
  });
}

// One end finds the rail dead: its works fail, and the engine hears of works and rail in any order.
inline void Node::kill_end(const std::shared_ptr<Link>& link, int side, const std::string& why) {
  Node* node = link->ends[side].node;
  if (node == nullptr) return;
  node->network_.clock().after(node->network_.latency(), [node, link, side, why] {
    node->on_thread(link->ends[side].life, [node, link, side, why] {
      Link::End& end = link->ends[side];
      if (std::exchange(end.dead, true)) return;
      node->note("loses rail " + std::to_string(end.rail) + ": " + why);
      node->end_jobs(end.rail, Code::kRailFailed);
      const auto tell = [node, rail = end.rail, why] {
        node->rails_.erase(rail);
        node->in_engine()->rail_down(node->now(), rail, why);
      };
      node->network_.random().chance(50) ? tell() : node->run_soon(node->moment(), tell);
    });
  });
}

// ---- works ------------------------------------------------------------------------------------

inline Code Node::post(RailId rail, const Work& work) {
  const Running host = enter_host();
  auto found = rails_.find(rail);
  if (found == rails_.end() || found->second.link->ends[found->second.side].dead) return Code::kRailFailed;
  if (network_.random().below(100) < again_percent) return Code::kAgain;
  auto job = std::make_shared<Job>();
  job->work = work;
  job->link = found->second.link;
  job->side = found->second.side;
  const Link::End& own = job->link->ends[job->side];
  job->session = own.session;
  CHECK(!jobs_.contains(work.id));
  CHECK(work.kind == WorkKind::kFetch ? job->link->capabilities.one_sided
                                      : job->link->capabilities.two_sided);
  ++posted[work.kind];
  CHECK(work.kind == WorkKind::kSend || own.attached.contains(work.move->remote_region));
  for_each_run(work.move->program->view(), work.move->grid.piece(work.piece), work.move->src_ids.data(),
               work.move->dst_ids.data(), [&](std::uint64_t src, std::uint64_t dst, std::uint64_t nbytes) {
                 job->runs.push_back({src, dst, nbytes});
                 job->nbytes += nbytes;
               });
  jobs_[work.id] = job;
  switch (work.kind) {
    case WorkKind::kFetch: fetch(job); break;
    case WorkKind::kSend: send_piece(job); break;
    case WorkKind::kReceive: break;
  }
  return Code::kOk;
}

inline void Node::cancel(RailId rail, std::span<const WorkId> works) {
  const Running host(nullptr);
  cancels.emplace_back(rail, works.size());
  for (const WorkId work : works)
    if (auto found = jobs_.find(work); found != jobs_.end()) end_job(found->second, Code::kCancelled);
}

inline void Node::finish(const std::shared_ptr<Job>& job, Code code) {
  if (std::exchange(job->finished, true)) return;
  run_soon(moment(), [this, id = job->work.id, code] {
    CHECK_EQ(jobs_.erase(id), 1);
    in_engine()->on_completion(now(),
                               {.work = id, .code = code, .detail = code == Code::kOk ? "" : "simulated"});
  });
}

inline Memory& Node::memory_at(const std::byte* base) {
  for (auto& [id, memory] : *memories_)
    if (memory->bytes.data() == base) return *memory;
  FAIL("a work on memory that is no region's");
  throw check::RequirementFailed{};
}

inline std::vector<std::byte> Node::gather(const Job& job, const std::byte* base, std::uint64_t first,
                                           std::uint64_t last) const {
  std::vector<std::byte> out;
  std::uint64_t at = 0;
  for (const Run& run : job.runs) {
    const std::uint64_t from = std::max(first, at), to = std::min(last, at + run.nbytes);
    if (from < to) out.insert(out.end(), base + run.src + (from - at), base + run.src + (to - at));
    at += run.nbytes;
  }
  return out;
}

inline void Node::land(Job& job, std::uint64_t first, std::span<const std::byte> bytes) {
  Memory& memory = memory_at(job.work.move->local->base);
  std::uint64_t at = 0;
  for (const Run& run : job.runs) {
    const std::uint64_t from = std::max(first, at), to = std::min(first + bytes.size(), at + run.nbytes);
    if (from < to) {
      const std::uint64_t offset = run.dst + (from - at);
      REQUIRE(offset + (to - from) <= memory.bytes.size());
      CHECK(memory.registered);
      if (on_write) on_write(*this, job.session, memory, offset, to - from);
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(from - first), to - from,
                  memory.bytes.begin() + static_cast<std::ptrdiff_t>(offset));
      if (network_.random().below(100) < flip_percent) memory.bytes[offset] ^= std::byte{1};
    }
    at += run.nbytes;
  }
}

// One-sided: this node's thread copies in two steps, and then reads the fence word; the owner may reuse the
// memory between any two of them.
inline void Node::fetch(const std::shared_ptr<Job>& job) {
  const auto copy = [this, job](std::uint64_t first, std::uint64_t last) {
    const Memory& there = *job->link->ends[1 - job->side].memories->at(job->work.move->remote_region);
    for (const Run& run : job->runs) REQUIRE(run.src + run.nbytes <= there.bytes.size());
    land(*job, first, gather(*job, there.bytes.data(), first, last));
  };
  Link& link = *job->link;
  ++link.num_fetched;
  if (link.fetch_ns != 0) {
    link.free_at = std::max(now(), link.free_at) + link.fetch_ns;
    return run_soon(link.free_at - now(), [this, job, copy] {
      if (job->stopped) return;
      copy(0, job->nbytes);
      compare_fence(job);
    });
  }
  const std::uint64_t middle = network_.random().below(job->nbytes + 1);
  run_soon(moment(), [this, job, copy, middle] {
    if (job->stopped) return;
    copy(0, middle);
    run_soon(moment(), [this, job, copy, middle] {
      if (job->stopped) return;
      copy(middle, job->nbytes);
      run_soon(moment(), [this, job] {
        if (!job->stopped) compare_fence(job);
      });
    });
  });
}

inline void Node::compare_fence(const std::shared_ptr<Job>& job) {
  const Fence& fence = job->work.move->fence;
  const std::uint64_t word = job->link->ends[1 - job->side].fences->at(fence.slot);
  finish(job, word == fence.generation ? Code::kOk : Code::kLeaseEnded);
}

// Two-sided: the source reads in two steps. It ends the piece with a trailer that says whether the right
// lasted to the end.
inline void Node::send_piece(const std::shared_ptr<Job>& job) {
  const std::uint64_t middle = network_.random().below(job->nbytes + 1);
  run_soon(moment(), [this, job, middle] {
    if (job->stopped) return;  // not begun: the peer never hears of it
    pass(job, 0, middle, false, true);
    run_soon(moment(), [this, job, middle] {
      if (job->stopped) return pass(job, middle, middle, true, false);
      pass(job, middle, job->nbytes, true, true);
      finish(job, Code::kOk);
    });
  });
}

inline void Node::pass(const std::shared_ptr<Job>& job, std::uint64_t first, std::uint64_t last, bool end,
                       bool held) {
  Link::End& own = job->link->ends[job->side];
  if (own.dead || job->link->muted) return;
  Packet packet{job->work.move->transfer, job->work.piece, job->work.id, first, {}, end, held};
  if (first != last) {
    const Memory& memory = memory_at(job->work.move->local->base);
    CHECK(memory.registered);
    for (std::uint32_t pair = 0; pair < job->work.move->grid.num_pairs; ++pair)
      if (memory.reused.contains(job->work.move->src_block(pair))) {
        FAIL(name_ + " sends a page that it has given to something else");
        break;
      }
    packet.bytes = gather(*job, memory.bytes.data(), first, last);
  }
  Node* other = job->link->ends[1 - job->side].node;
  own.last_at = std::max(own.last_at, now() + network_.latency());
  network_.carry(place_, other->place_, own.last_at - now(),
                 [other, link = job->link, side = 1 - job->side, packet]() {
                   other->on_thread(link->ends[side].life,
                                    [other, link, packet]() mutable { other->arrive(link, packet); });
                 });
}

inline void Node::arrive(const std::shared_ptr<Link>& link, Packet& packet) {
  for (auto& [id, job] : jobs_) {
    if (job->link != link || job->work.kind != WorkKind::kReceive || job->stopped || job->finished ||
        job->work.move->transfer != packet.transfer || job->work.piece != packet.piece)
      continue;
    if (job->sender == 0 && packet.first == 0) job->sender = packet.sender;
    if (job->sender != packet.sender) continue;
    land(*job, packet.first, packet.bytes);
    if (packet.last) finish(job, packet.held ? Code::kOk : Code::kLeaseEnded);
    return;
  }
}

}  // namespace simulation
