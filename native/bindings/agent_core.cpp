// An agent. Each call converts its arguments, takes the gate without Python's lock, and raises an error that
// comes back.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <memory>

#include "bindings/command_ring.h"
#include "bindings/lifetime.h"
#include "bindings/requests.h"
#include "bindings/runtime_options.h"
#include "bindings/transfer.h"
#include "bindings/transports.h"
#include "bindings/trigger.h"
#include "core/runtime.h"

namespace kvxfer::python {
namespace {

using nb::literals::operator""_a;

std::string_view name_of_event(EventKind kind) {
  switch (kind) {
    case EventKind::kEnded: return "ended";
    case EventKind::kLayer: return "layer";
    case EventKind::kNotification: return "notification";
    case EventKind::kMessage: return "message";
    case EventKind::kRoom: return "room";
    case EventKind::kPeerUp: return "peer-up";
    case EventKind::kPeerLost: return "peer-lost";
    case EventKind::kRegion: return "region";
    case EventKind::kRegionGone: return "region-gone";
    case EventKind::kLeaseEnded: return "lease-ended";
    case EventKind::kLeaseAcknowledged: return "lease-acknowledged";
    case EventKind::kCommands: return "commands";
    case EventKind::kLog: return "log";
  }
  return "";
}

// Counts of the gate's holds, by the milliseconds that they took at most; the last bound is infinite.
nb::dict from_histogram(const Gate::Histogram& holds) {
  nb::dict out;
  double most_ms = static_cast<double>(Gate::kFirstBucketNs) / 1e6;
  for (std::size_t i = 0; i < holds.size(); ++i, most_ms *= 2)
    out[nb::float_(i + 1 == holds.size() ? std::numeric_limits<double>::infinity() : most_ms)] = holds[i];
  return out;
}

// How many views one hold of the gate reads: some 20 microseconds.
constexpr std::size_t kViewsOfAHold = 64;

nb::bytes bytes_of(const Record* records, std::size_t num) {
  return nb::bytes(static_cast<const void*>(records), num * sizeof(Record));
}

// How much is held of each resource, and how much may be.
nb::dict from_budget(const Budget& budget) {
  nb::dict out;
  for (std::size_t i = 0; i < kNumResources; ++i) {
    const auto resource = static_cast<Resource>(i);
    out[nb::cast(std::string(name_of(resource)))] =
        nb::make_tuple(budget.used(resource), budget.limit(resource));
  }
  return out;
}

nb::dict from_sender(const Sender& sender) {
  nb::dict out;
  out["name"] = sender.name;
  out["incarnation"] = from_bytes(sender.incarnation);
  out["is_ours"] = sender.is_ours;
  out["identity"] = sender.identity;
  return out;
}

struct PySender { std::shared_ptr<const Sender> sender; };

class PyAgentCore {
 public:
  PyAgentCore(const std::string& name, const nb::dict& options)
      : runtime_(make_agent(to_runtime_options(name, options))) {}

  Runtime& runtime() const { return *runtime_; }

  // Calls f(engine, now) under the gate and without the GIL. Raises if the agent cannot work any more.
  template <class F>
  auto call(F&& f) const {
    check(runtime_->check_alive());
    auto result = [&] {
      const WithoutGil released;
      return runtime_->with_open_engine(f);
    }();
    if (!result) raise(runtime_->check_alive());
    return std::move(*result);
  }

  std::vector<Event> drain(std::size_t max_events, bool arm) const {
    std::vector<Event> events = runtime_->ring().drain(max_events, arm);
    if (events.empty() && runtime_->broken()) raise(runtime_->check_alive());
    return events;
  }

  // 0: nothing moved. 1: something moved or came in. 2: as 1, and there are events to drain.
  int poll() const {
    check(runtime_->check_alive());
    const bool moved = [&] {
      const WithoutGil released;
      return runtime_->poll();
    }();
    return runtime_->ring().has_events() ? 2 : moved;
  }

  nb::object take_mail(MailKind kind) const {
    std::optional<Mail> taken = runtime_->ring().take(kind);
    if (!taken) return nb::none();
    if (taken->tells) {
      const WithoutGil released;
      runtime_->message_taken(taken->peer);
    }
    const PySender sender{std::move(taken->sender)};
    if (kind == MailKind::kMessage) return nb::make_tuple(taken->peer, from_bytes(taken->payload), sender);
    return nb::make_tuple(taken->peer, from_bytes(taken->payload), wire::text_of(taken->context), sender);
  }

  void send(SessionKey peer, nb::handle payload) const {
    wire::Bytes bytes = to_message(payload);
    check(call([&](Engine& engine, Time now) { return engine.send_message(now, peer, std::move(bytes)); }));
  }
  bool has_room(SessionKey peer, std::uint64_t nbytes) const {
    return take(call([&](Engine& engine, Time now) { return engine.has_room(now, peer, nbytes); }));
  }

  int watch_records(std::size_t capacity) const {
    check(runtime_->check_alive());
    Result<int> fd = [&] {
      const WithoutGil released;
      return runtime_->watch_records(capacity);
    }();
    return take(std::move(fd));
  }
  nb::bytes take_records(std::size_t max_records) const {
    // Answers for a closed agent, too. In a forked child another thread may have held the lock for ever.
    if (const Status status = runtime_->check_alive(); status.code() == Code::kForked) raise(status);
    RecordRing& ring = runtime_->records();
    const std::size_t most = std::min(max_records, ring.size());
    const auto taken = std::make_unique_for_overwrite<Record[]>(most);
    return bytes_of(taken.get(), ring.take({taken.get(), most}));
  }
  void note_change() const {
    if (!runtime_->forked()) runtime_->records().note_change();
  }
  std::uint64_t num_changes() const { return runtime_->records().num_changes(); }
  nb::bytes open_transfers(std::size_t most) const {
    std::vector<Record> found;
    Engine::OpenPlace place;
    while (found.size() < most && place.of != Engine::OpenPlace::Of::kNothing) {
      std::array<Record, kViewsOfAHold> some{};  // zero, as they leave the process
      const std::span<Record> room(some.data(), std::min(some.size(), most - found.size()));
      const std::size_t num = call([&](Engine& engine, Time) { return engine.open_transfers(place, room); });
      found.insert(found.end(), room.begin(), room.begin() + static_cast<std::ptrdiff_t>(num));
    }
    return bytes_of(found.data(), found.size());
  }
  bool cancel_transfer(SessionKey peer, TransferId transfer, bool is_source) const {
    return call(
        [&](Engine& engine, Time now) { return engine.cancel_transfer(now, {peer, transfer}, is_source); });
  }
  nb::list leases(std::size_t most) const {
    std::vector<LeaseView> views;
    LeaseId last = 0;
    for (bool more = true; more && views.size() < most;) {
      std::vector<LeaseView> some;
      more = call([&](Engine& engine, Time now) {
        return engine.append_leases(now, last, std::min(kViewsOfAHold, most - views.size()), some);
      });
      std::move(some.begin(), some.end(), std::back_inserter(views));
    }
    nb::list out;
    for (const LeaseView& view : views) {
      nb::dict entry;
      entry["lease"] = view.id;
      entry["holder"] = view.name;
      entry["peer"] = view.holder ? nb::cast(*view.holder) : nb::none();
      entry["region"] = view.region;
      entry["mode"] = view.mode == wire::LeaseMode::kRead ? "read" : "write";
      entry["num_blocks"] = view.num_blocks ? nb::cast(*view.num_blocks) : nb::none();
      entry["state"] = std::string(name_of(view.state));
      entry["seconds_left"] = static_cast<double>(view.left_ns) * 1e-9;
      out.append(entry);
    }
    return out;
  }

  void close(double timeout_s) const {
    const WithoutGil released;
    runtime_->close(to_ns(timeout_s));
  }

  nb::dict stats() const {
    const EngineStats stats = call([](Engine& engine, Time) { return engine.stats(); });
    const auto transfers = call([](Engine& engine, Time) { return engine.num_transfers(); });
    nb::dict out;
    out["transfers_open"] = transfers;
    out["transfers_done"] = stats.transfers_done;
    out["transfers_failed"] = stats.transfers_failed;
    out["bytes_in"] = stats.bytes_in;
    out["pieces_in"] = stats.pieces_in;
    out["pieces_sent"] = stats.pieces_sent;
    out["pieces_redone"] = stats.pieces_redone;
    out["fences_stale"] = stats.fences_stale;
    out["frames_refused"] = stats.frames_refused;
    out["rails_lost"] = stats.rails_lost;
    out["rails_redialled"] = stats.rails_redialled;
    out["messages_in"] = stats.messages_in;
    out["messages_sent"] = stats.messages_sent;
    out["events_dropped"] = runtime_->ring().num_events_dropped();
    out["notifications_dropped"] = runtime_->ring().num_dropped(MailKind::kNotification);
    out["messages_dropped"] = runtime_->ring().num_dropped(MailKind::kMessage);
    out["records_dropped"] = runtime_->records().num_dropped();
    out["strangers"] = from_budget(runtime_->strangers());
    out["gate_longest_hold_ns"] = runtime_->longest_hold_ns();
    out["gate_holds"] = from_histogram(runtime_->holds());
    return out;
  }

  RegionId register_region(
      const std::string& name,
      nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu> spans,
      std::uint32_t num_blocks, nb::handle footprint, const nb::bytes& layout, int device,
      nb::object owner) const {
    check(runtime_->check_alive());
    CopyProgram loops;
    loops.loops = to_loops(footprint);
    for (const CopyLoop& loop : loops.loops)
      loops.num_layers = std::max(loops.num_layers, loop.first_layer + loop.num_layers);
    std::vector<std::pair<std::byte*, std::uint64_t>> ranges;
    for (std::size_t i = 0; i < spans.shape(0); ++i)
      ranges.emplace_back(reinterpret_cast<std::byte*>(spans.data()[2 * i]),
                          static_cast<std::uint64_t>(spans.data()[2 * i + 1]));
    wire::Bytes schema = to_bytes(layout);
    Result<RegionId> id = [&, kept = held(std::move(owner))]() mutable {
      const WithoutGil released;
      return runtime_->register_region(name, std::move(ranges), num_blocks, loops, std::move(schema),
                                       device < 0 ? MemoryKind::kHost : MemoryKind::kGpu, std::move(kept),
                                       device);
    }();
    return take(std::move(id));
  }
  template <class Read>
  auto of_region(RegionId id, Read&& read) const {
    const auto found = call([&](Engine& engine, Time) {
      const Region* region = engine.region(id);
      return region == nullptr ? std::nullopt : std::optional(read(*region));
    });
    if (!found)
      raise({Code::kUnknownRegion, "region " + std::to_string(id) + " is not registered (any more)"});
    return *found;
  }
  std::string region_kind(RegionId id) const {
    return of_region(id, [](const Region& region) -> std::string {
      if (region.memory.kind == MemoryKind::kGpu) return "gpu";
      return region.keepalive != nullptr ? "pool" : "foreign";
    });
  }
  std::vector<std::string> region_notes(RegionId id) const {
    return of_region(id, [](const Region& region) { return region.notes; });
  }
  int region_node(RegionId id) const {
    return of_region(id, [](const Region& region) { return region.memory.numa_node; });
  }
  bool deregister(RegionId id, double timeout_s) const {
    check(runtime_->check_alive());
    Status status;
    const bool is_over = wait_in_slices(
        *runtime_,
        [&](Time slice_ns) {
          status = runtime_->deregister_region(id, slice_ns);
          return status.code() != Code::kDeadline;
        },
        timeout_s);
    if (is_over) check(status);
    return is_over;
  }

  SessionKey begin_connect(nb::handle target, double timeout_s) const {
    const std::string address = to_text(target, "target");
    check(runtime_->check_alive());
    Result<SessionKey> key = [&] {
      const WithoutGil released;
      return runtime_->begin_connect(address, to_ns(timeout_s));
    }();
    return take(std::move(key));
  }
  void disconnect(SessionKey key, int code, const std::string& text) const {
    call([&](Engine& engine, Time now) {
      engine.end_session(now, key, static_cast<Code>(code), text);
      return 0;
    });
  }
  nb::dict peer(SessionKey key) const {
    const auto [view, paths] =
        call([&](Engine& engine, Time) { return std::pair(engine.peer(key), runtime_->paths(key)); });
    if (!view) raise({Code::kPeerLost, "there is no peer " + std::to_string(key) + " (any more)"});
    nb::dict out = from_sender(*view);
    out["state"] = view->state;
    out["rails"] = nb::cast(view->rails);
    out["paths"] = nb::cast(paths);
    out["notes"] = nb::cast(view->notes);
    out["code"] = static_cast<int>(view->reason.code());
    out["message"] = view->reason.message();
    if (view->budget != nullptr) out["budget"] = from_budget(*view->budget);
    return out;
  }
  void renew_certificates(const nb::dict& files) const {
    check(runtime_->check_alive());
    std::shared_ptr<const tls::Credentials> loaded = load_credentials(to_credential_files(files));
    const Status renewed = [&] {
      const WithoutGil released;
      return runtime_->renew(std::move(loaded));
    }();
    check(renewed);
  }
  void set_secrets(const nb::bytes& first, const nb::bytes& second) const {
    const Status set = [&, first = to_secret(first), second = to_secret(second)] {
      const WithoutGil released;
      return runtime_->set_secrets(first, second);
    }();
    check(set);
  }
  void reload_secrets() const {
    const Status read = [&] {
      const WithoutGil released;
      return runtime_->reload_secrets();
    }();
    check(read);
  }
  void limit_peer(const std::string& name, std::uint64_t max_bytes_per_s, std::uint8_t least_priority) const {
    check(call([&](Engine& engine, Time now) {
      return engine.limit_peer(now, name, {max_bytes_per_s, least_priority});
    }));
    runtime_->records().note_change();
  }
  nb::list peer_limits() const {
    nb::list out;
    for (const auto& [name, limit] : call([](Engine& engine, Time) { return engine.peer_limits(); }))
      out.append(nb::make_tuple(name, limit.max_bytes_per_s, limit.least_priority));
    return out;
  }
  void switch_rails(nb::handle its_name, bool on) const {
    const std::string transport = to_text(its_name, "transport");
    check(runtime_->check_alive());
    const Status status = [&] {
      const WithoutGil released;
      return runtime_->switch_rails(transport, on);
    }();
    check(status);
    runtime_->records().note_change();
  }
  std::vector<std::string> rails_off() const {
    return call([](Engine& engine, Time) { return engine.rails_off(); });
  }
  std::vector<SessionKey> peers() const {
    return call([](Engine& engine, Time) { return engine.open_peers(); });
  }
  nb::list peer_regions(SessionKey key) const {
    const auto views = take(call([&](Engine& engine, Time) { return engine.peer_regions(key); }));
    nb::list out;
    for (const RemoteRegionView& view : views) {
      std::uint64_t nbytes = 0;
      for (const MemorySpan& span : view.region.spans) nbytes += span.nbytes;
      nb::dict entry;
      entry["id"] = view.region.id;
      entry["name"] = view.region.name;
      entry["base"] = view.region.base;
      entry["nbytes"] = nbytes;
      entry["num_blocks"] = view.region.num_blocks;
      entry["layout"] = from_bytes(view.region.layout);
      entry["path"] = view.path;
      entry["notes"] = nb::cast(view.notes);
      out.append(entry);
    }
    return out;
  }

  nb::list ways(SessionKey key, RegionId ours, RegionId theirs, bool converts) const {
    const auto [ways, paths] = call([&](Engine& engine, Time) {
      Result<std::vector<RailWay>> found = engine.ways(key, ours, theirs, converts);
      std::vector<std::string> all;
      if (found.ok())
        for (const RailWay& way : found.value()) all.push_back(runtime_->path(way.rail));
      return std::pair(std::move(found), std::move(all));
    });
    check(ways.status());
    nb::list out;
    for (std::size_t i = 0; i < paths.size(); ++i) {
      const RailWay& way = ways.value()[i];
      nb::dict entry;
      entry["transport"] = way.transport;
      entry["path"] = paths[i];
      entry["rank"] = way.rank;
      entry["is_far"] = way.is_far;
      entry["is_staged"] = way.is_staged;
      entry["why_not"] = way.why_not;
      out.append(entry);
    }
    return out;
  }

  PyInstalled install_program(nb::handle asked) const {
    Program of{asked};
    const std::uint32_t id = take(call([&](Engine& engine, Time now) {
      return engine.install_program(now, of.peer, of.write, of.src_region, of.dst_region,
                                    std::move(of.program));
    }));
    return PyInstalled::of(runtime_, of.peer, id);
  }

  PyRoute route(SessionKey peer, const PyInstalled& program, std::uint32_t first_layer,
                std::uint32_t num_layers, double timeout_s, bool integrity, nb::object as_ids) const {
    return {runtime_,   peer,      program.program, first_layer,
            num_layers, timeout_s, integrity,       std::move(as_ids)};
  }

  PyCommandRing command_ring(std::uint32_t num_commands) const {
    check(runtime_->check_alive());
    Result<std::shared_ptr<CommandReader>> reader = [&] {
      const WithoutGil released;
      return runtime_->open_command_ring(num_commands);
    }();
    return {runtime_, take(std::move(reader))};
  }

  void record(const PyTrigger& trigger, std::uint64_t stream, Trigger::Word value) const {
    check(runtime_->check_alive());
    const Status status = [&] {
      const WithoutGil released;
      return runtime_->record(*trigger.trigger, reinterpret_cast<gpu::Stream>(stream), value);
    }();
    check(status);
  }
  After after_stream(std::uint64_t stream) const {
    check(runtime_->check_alive());
    Result<After> after = [&] {
      const WithoutGil released;
      return runtime_->after_stream(reinterpret_cast<gpu::Stream>(stream));
    }();
    return take(std::move(after));
  }
  After after_event(std::uint64_t event) const {
    check(runtime_->check_alive());
    Result<After> after = [&] {
      const WithoutGil released;
      return runtime_->after_event(reinterpret_cast<gpu::Event>(event));
    }();
    return take(std::move(after));
  }

  PyHandle expect(nb::handle asked) const {
    Expected of{asked};
    return {runtime_, take(call([&](Engine& engine, Time now) {
              return engine.expect(now, std::move(of.tag), of.region, std::move(of.blocks), of.first_layer,
                                   of.num_layers, of.needed, of.peer, of.timeout_ns, std::move(of.context));
            }))};
  }

  LeaseId grant(nb::handle asked) const {
    Grant of{asked};
    const LeaseId lease =
        take(call([&](Engine& engine, Time now) { return engine.grant(now, std::move(of.terms)); }));
    runtime_->records().note_change();
    return lease;
  }
  bool extend_lease(LeaseId lease, double ttl_s) const {
    const bool is_extended =
        call([&](Engine& engine, Time now) { return engine.extend(now, lease, to_ns(ttl_s)); });
    if (is_extended) runtime_->records().note_change();
    return is_extended;
  }
  bool revoke(LeaseId lease, double timeout_s) const {
    check(runtime_->check_alive());
    return wait_in_slices(
        *runtime_, [&](Time slice_ns) { return runtime_->revoke(lease, slice_ns); }, timeout_s);
  }
  bool await_acknowledged(LeaseId lease) const {
    return call([&](Engine& engine, Time now) { return engine.await_acknowledged(now, lease); });
  }
  std::string lease_state(LeaseId lease) const {
    // Answers for a closed agent, too; a forked child must not touch the gate.
    if (const Status status = runtime_->check_alive(); status.code() == Code::kForked) raise(status);
    const auto state = [&] {
      const WithoutGil released;
      return runtime_->with_engine([&](Engine& engine, Time) { return engine.lease_state(lease); });
    }();
    if (!state) raise({Code::kInvalidArgument, "there is no lease " + std::to_string(lease) + " (any more)"});
    return std::string(name_of(*state));
  }

 private:
  std::shared_ptr<Runtime> runtime_;
};

}  // namespace

void define_agent_core(nb::module_& m) {
  nb::class_<PySender>(m, "Sender").def("info", [](const PySender& s) { return from_sender(*s.sender); });
  nb::class_<Event>(m, "Event")
      .def_prop_ro("kind", [](const Event& e) { return name_of_event(e.kind); })
      .def_ro("handle", &Event::handle)
      .def_ro("peer", &Event::peer)
      .def_ro("region", &Event::region)
      .def_ro("lease", &Event::lease)
      .def_ro("layer", &Event::layer)
      .def_prop_ro("code", [](const Event& e) { return static_cast<int>(e.code); })
      .def_ro("message", &Event::message);

  nb::class_<PyAgentCore>(m, "AgentCore")
      .def(nb::init<const std::string&, const nb::dict&>(), "name"_a, "options"_a)
      .def_prop_ro("address", [](const PyAgentCore& c) { return c.runtime().address(); })
      .def_prop_ro("incarnation",
                   [](const PyAgentCore& c) { return from_bytes(c.runtime().identity().incarnation); })
      .def_prop_ro("event_fd", [](const PyAgentCore& c) { return c.runtime().ring().fd(); })
      .def_prop_ro("sockets_fd", [](const PyAgentCore& c) { return c.runtime().sockets_fd(); })
      .def_prop_ro("serves", [](const PyAgentCore& c) { return c.runtime().serves(); })
      .def("serve",
           [](const PyAgentCore& c) {
             const WithoutGil released;
             return c.runtime().serve();
           })
      .def("leave",
           [](const PyAgentCore& c) {
             const WithoutGil released;
             c.runtime().leave();
           })
      .def("drain", &PyAgentCore::drain, "max_events"_a = 256, "arm"_a = true)
      .def("take_notification", [](const PyAgentCore& c) { return c.take_mail(MailKind::kNotification); })
      .def("take_message", [](const PyAgentCore& c) { return c.take_mail(MailKind::kMessage); })
      .def("send", &PyAgentCore::send, "peer"_a, "payload"_a.none())
      .def("has_room", &PyAgentCore::has_room, "peer"_a, "nbytes"_a)
      .def(
          "add_waiters", [](const PyAgentCore& c, int change) { c.runtime().ring().add_waiters(change); },
          "change"_a)
      .def("poll", &PyAgentCore::poll)
      .def("close", &PyAgentCore::close, "timeout_s"_a)
      .def_prop_ro("ended", [](const PyAgentCore& c) { return c.runtime().ended(); })
      .def("stats", &PyAgentCore::stats)
      .def("watch_records", &PyAgentCore::watch_records, "capacity"_a)
      .def("take_records", &PyAgentCore::take_records, "max_records"_a = 256)
      .def("note_change", &PyAgentCore::note_change)
      .def_prop_ro("num_changes", &PyAgentCore::num_changes)
      .def("open_transfers", &PyAgentCore::open_transfers, "most"_a)
      .def("cancel_transfer", &PyAgentCore::cancel_transfer, "peer"_a, "transfer"_a, "is_source"_a)
      .def("leases", &PyAgentCore::leases, "most"_a)
      .def("register", &PyAgentCore::register_region, "name"_a, "spans"_a.noconvert(), "num_blocks"_a,
           "footprint"_a, "layout"_a, "device"_a, "owner"_a)
      .def("region_kind", &PyAgentCore::region_kind, "region"_a)
      .def("region_notes", &PyAgentCore::region_notes, "region"_a)
      .def("region_node", &PyAgentCore::region_node, "region"_a)
      .def("deregister", &PyAgentCore::deregister, "region"_a, "timeout_s"_a)
      .def("begin_connect", &PyAgentCore::begin_connect, "address"_a, "timeout_s"_a)
      .def("disconnect", &PyAgentCore::disconnect, "peer"_a, "code"_a = static_cast<int>(Code::kPeerLost),
           "text"_a = "disconnect() was called")
      .def("peer", &PyAgentCore::peer, "peer"_a)
      .def("peers", &PyAgentCore::peers)
      .def("set_secrets", &PyAgentCore::set_secrets, "first"_a, "second"_a)
      .def("reload_secrets", &PyAgentCore::reload_secrets)
      .def("renew_certificates", &PyAgentCore::renew_certificates, "files"_a)
      .def("limit_peer", &PyAgentCore::limit_peer, "name"_a, "max_bytes_per_s"_a, "least_priority"_a)
      .def("peer_limits", &PyAgentCore::peer_limits)
      .def("switch_rails", &PyAgentCore::switch_rails, "transport"_a, "on"_a)
      .def("rails_off", &PyAgentCore::rails_off)
      .def("peer_regions", &PyAgentCore::peer_regions, "peer"_a)
      .def("ways", &PyAgentCore::ways, "peer"_a, "region"_a, "remote"_a, "converts"_a)
      .def("install_program", &PyAgentCore::install_program, "program"_a)
      .def("route", &PyAgentCore::route, "peer"_a, "program"_a, "first_layer"_a, "num_layers"_a,
           "timeout_s"_a, "integrity"_a, "as_ids"_a)
      .def("trigger", [](const PyAgentCore& c) { return PyTrigger{take(c.runtime().make_trigger())}; })
      .def("command_ring", &PyAgentCore::command_ring, "num_commands"_a)
      .def("record", &PyAgentCore::record, "trigger"_a, "stream"_a, "value"_a)
      .def("after_stream", &PyAgentCore::after_stream, "stream"_a)
      .def("after_event", &PyAgentCore::after_event, "event"_a)
      .def("expect", &PyAgentCore::expect, "expected"_a)
      .def("grant", &PyAgentCore::grant, "grant"_a)
      .def("extend_lease", &PyAgentCore::extend_lease, "lease"_a, "ttl_s"_a)
      .def("revoke", &PyAgentCore::revoke, "lease"_a, "timeout_s"_a)
      .def("await_acknowledged", &PyAgentCore::await_acknowledged, "lease"_a)
      .def("lease_state", &PyAgentCore::lease_state, "lease"_a);
}

}  // namespace kvxfer::python
