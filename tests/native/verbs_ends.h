// Verbs rails on counting devices (counting_device.h), for tests.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "check.h"
#include "counting_device.h"
#include "transports/verbs/verbs_transport.h"

namespace verbs_ends {

using namespace kvxfer;
using counting_device::Fabric;

// A rail on the first port of a device; "" for the first device.
inline std::unique_ptr<VerbsTransport> make_rail(Reactor& reactor, const FenceTable& fences,
                                                 const std::string& device, verbs::Options options = {},
                                                 std::shared_ptr<verbs::Device>* device_made = nullptr) {
  options.devices = device;
  const Result<const verbs::Library*> library = verbs::Library::load();
  REQUIRE_OK(library);
  auto devices = verbs::Device::open_all(*library.value(), options);
  REQUIRE_OK(devices);
  if (device_made != nullptr) *device_made = devices.value().front();
  auto made = VerbsTransport::create(reactor, fences, std::move(devices.value().front()));
  REQUIRE_OK(made);
  return std::move(made).value();
}

}  // namespace verbs_ends
