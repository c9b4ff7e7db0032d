// Rails over UCX and libfabric, for tests: the real libraries.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "check.h"
#include "kvxfer/transport_kind.h"
#include "library_leaks.h"
#include "transports/fabric/fabric_rail.h"
#include "transports/libfabric/libfabric_fabric.h"
#include "transports/ucx/ucx_fabric.h"

namespace fabric_ends {

using namespace kvxfer;

inline const ucx::Library& ucx_library() {
  const auto library = ucx::Library::load();
  REQUIRE_OK(library);
  return *library.value();
}

// Its endpoints seem to have a lane of RDMA, so that pieces are written, in software.
inline const ucx::Library& ucx_with_rdma() {
  static ucx::Library seeming = ucx_library();
  seeming.ep_print_info = [](ucx::abi::EndpointHandle*, std::FILE* stream) {
    std::fputs("lane[0]: 0:rc_mlx5/mlx5_0:1 md[0] -> rma_bw#0 am\n", stream);
  };
  return seeming;
}

inline std::unique_ptr<Transport> make_ucx(Reactor& reactor, const FenceTable& fences, ucx::Options options,
                                           const ucx::Library& library) {
  auto fabric = ucx::UcxFabric::create(library, options);
  REQUIRE_OK(fabric);
  auto rail = FabricRail::create(reactor, fences, std::move(fabric).value());
  REQUIRE_OK(rail);
  return std::move(rail).value();
}

inline std::unique_ptr<Transport> make_libfabric(Reactor& reactor, const FenceTable& fences,
                                                 const libfabric::Options& options,
                                                 const libfabric::Library& library) {
  auto fabrics = libfabric::LibfabricFabric::create(library, options);
  REQUIRE_OK(fabrics);
  auto rail = FabricRail::create(reactor, fences, std::move(fabrics.value().front()));
  REQUIRE_OK(rail);
  return std::move(rail).value();
}

inline const libfabric::Library& libfabric_library() {
  const auto library = libfabric::Library::load();
  REQUIRE_OK(library);
  return *library.value();
}

// Why the library cannot be opened here; "" if it can (SKIP_FILE_FOR).
template <class Library>
std::string missing() {
  return std::string(Library::load().status().message());
}

}  // namespace fabric_ends

// The suite's promises for a way over which no end may end while it reads or writes.
#define FABRIC_WITHOUT_ENDS(PROMISE, subject)                \
  PROMISE(subject, every_byte_arrives_and_no_other_changes)  \
  PROMISE(subject, programs_of_every_kind_arrive)            \
  PROMISE(subject, post_accepts_a_prefix_and_the_rest_later) \
  PROMISE(subject, transfers_in_both_directions_do_not_mix)  \
  PROMISE(subject, a_fence_that_moved_is_noticed)            \
  PROMISE(subject, mistakes_complete_and_harm_nobody)        \
  PROMISE(subject, pieces_without_bytes_complete)            \
  PROMISE(subject, what_is_detached_is_not_read)             \
  PROMISE(subject, descriptors_are_given_back)
