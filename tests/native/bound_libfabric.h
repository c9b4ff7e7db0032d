// libfabric's tcp with the rules of a provider that binds memory to endpoints (FI_MR_ENDPOINT, as Slingshot's cxi
// does), which no machine without that network has. The library is the real one; the rules are checked in front
// of it. Breaking a rule that cxi would answer with an error ends the program.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "transports/libfabric/library.h"

namespace bound_libfabric {

namespace abi = kvxfer::libfabric::abi;

inline const kvxfer::libfabric::Library* real = nullptr;

struct State {
  std::mutex mutex;
  std::deque<std::unique_ptr<std::byte[]>> tables;  // that objects point to
  std::map<const abi::Object*, const abi::Domain*> domains;  // of each endpoint
  std::set<const abi::Object*> enabled;  // endpoints
  std::map<const abi::Object*, int> num_bound;  // registrations of each endpoint
  // The functions that were replaced; each is the same in all objects of a kind.
  decltype(abi::FabricOps::domain) domain;
  decltype(abi::DomainOps::endpoint) endpoint;
  decltype(abi::RegionOps::reg_params) reg_params;
  decltype(abi::ObjectOps::control) control;
  decltype(abi::ObjectOps::close) close;
};
inline State state;

inline void must(bool holds, const char* rule) {
  if (holds) return;
  std::fprintf(stderr, "bound_libfabric: %s\n", rule);
  std::abort();
}

// Points an object to a copy of its table, which the caller changes.
template <class Ops>
Ops& own_table(Ops*& ops) {
  auto& table = state.tables.emplace_back(std::make_unique<std::byte[]>(ops->size));
  std::memcpy(table.get(), ops, ops->size);
  ops = reinterpret_cast<Ops*>(table.get());
  return *ops;
}

struct Region {
  abi::MemoryRegion made{};  // first, since this is what the transport has
  abi::Domain* domain = nullptr;
  abi::RegionParams params;
  iovec span{};
  const abi::Object* endpoint = nullptr;
  abi::MemoryRegion* registered = nullptr;  // once it is enabled
};
inline Region& region_of(abi::Object* object) { return *reinterpret_cast<Region*>(object); }

inline int bind_region(abi::Object* object, abi::Object* endpoint, std::uint64_t) {
  const std::lock_guard lock(state.mutex);
  Region& region = region_of(object);
  must(region.endpoint == nullptr, "memory is bound once");
  must(state.enabled.contains(endpoint), "memory is bound to an endpoint that is enabled");
  must(state.domains[endpoint] == region.domain, "memory is bound to an endpoint of its own domain");
  region.endpoint = endpoint;
  ++state.num_bound[endpoint];
  return 0;
}
inline int control_region(abi::Object* object, int command, void*) {
  Region& region = region_of(object);
  must(command == abi::kEnable && region.endpoint != nullptr, "memory is bound before it is enabled");
  return state.reg_params(&region.domain->object, &region.params, 0, &region.registered);
}
inline int close_region(abi::Object* object) {
  const std::unique_ptr<Region> region(&region_of(object));
  if (region->registered != nullptr) region->registered->object.ops->close(&region->registered->object);
  const std::lock_guard lock(state.mutex);
  if (region->endpoint != nullptr) --state.num_bound[region->endpoint];
  return 0;
}
inline abi::ObjectOps region_ops{sizeof(abi::ObjectOps), close_region, bind_region, control_region};

inline int reg_params(abi::Object* domain, const abi::RegionParams* params, std::uint64_t flags,
                      abi::MemoryRegion** made) {
  must(flags == 0 && params->num_spans == 1, "memory is one span");
  auto region = std::make_unique<Region>();
  region->domain = reinterpret_cast<abi::Domain*>(domain);
  region->params = *params;
  region->span = *params->spans;
  region->params.spans = &region->span;
  region->made.object.ops = &region_ops;
  region->made.key = params->key;
  *made = &region.release()->made;
  return 0;
}

inline int control_endpoint(abi::Object* object, int command, void* argument) {
  const int done = state.control(object, command, argument);
  if (command != abi::kEnable || done != 0) return done;
  const std::lock_guard lock(state.mutex);
  state.enabled.insert(object);
  return 0;
}
inline int close_endpoint(abi::Object* object) {
  {
    const std::lock_guard lock(state.mutex);
    must(state.num_bound[object] == 0, "an endpoint closes when no memory is bound to it");
    state.num_bound.erase(object);
    state.enabled.erase(object);
    state.domains.erase(object);
  }
  return state.close(object);
}

// The library also calls it for its own connections, which are endpoints of another type.
inline int endpoint(abi::Domain* domain, abi::Info* info, abi::Endpoint** made, void* context) {
  const int opened = state.endpoint(domain, info, made, context);
  if (opened != 0 || info->endpoint->type != abi::kReliableDatagrams) return opened;
  const std::lock_guard lock(state.mutex);
  abi::Object& own = (*made)->object;
  state.domains[&own] = domain;
  abi::ObjectOps& ops = own_table(own.ops);
  state.control = ops.control;
  state.close = ops.close;
  ops.control = control_endpoint;
  ops.close = close_endpoint;
  return 0;
}

inline int domain(abi::Fabric* fabric, abi::Info* info, abi::Domain** made, void* context) {
  const int opened = state.domain(fabric, info, made, context);
  if (opened != 0) return opened;
  const std::lock_guard lock(state.mutex);
  abi::DomainOps& ops = own_table((*made)->ops);
  state.endpoint = ops.endpoint;
  ops.endpoint = endpoint;
  abi::RegionOps& regions = own_table((*made)->regions);
  state.reg_params = regions.reg_params;
  regions.reg_params = reg_params;
  return 0;
}

inline int open_fabric(abi::FabricAttributes* attributes, abi::Fabric** made, void* context) {
  const int opened = real->open_fabric(attributes, made, context);
  if (opened != 0) return opened;
  const std::lock_guard lock(state.mutex);
  abi::FabricOps& ops = own_table((*made)->ops);
  state.domain = ops.domain;
  ops.domain = domain;
  return 0;
}

inline int get_info(std::uint32_t version, const char* node, const char* service, std::uint64_t flags,
                    const abi::Info* hints, abi::Info** found) {
  if ((hints->domain->key_mode & abi::kKeysOfEndpoint) == 0) return -ENODATA;
  const int done = real->get_info(version, node, service, flags, hints, found);
  if (done == 0)
    for (abi::Info* info = *found; info != nullptr; info = info->next) {
      info->domain->key_mode |= abi::kKeysOfEndpoint;
      info->domain->key_nbytes = 4;
    }
  return done;
}

// The functions of a library, with those rules in front.
inline const kvxfer::libfabric::Library& over(const kvxfer::libfabric::Library& library) {
  static kvxfer::libfabric::Library bound = library;
  real = &library;
  bound.get_info = get_info;
  bound.open_fabric = open_fabric;
  return bound;
}

}  // namespace bound_libfabric
