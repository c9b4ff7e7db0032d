// What a caller says of the agent that it makes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/control/session.h"
#include "core/system/memory_node.h"
#include "core/tls/credentials.h"
#include "gpu/gpu_part.h"
#include "kvxfer/transport_kind.h"

namespace kvxfer {

struct RuntimeOptions {
  std::string name;
  std::string listen;                    // "tcp://host:port", "" accepts nobody
  // Every peer proves to know it, as whatever user and from whatever host.
  std::string secret;
  std::string second_secret;             // that they may prove instead; "": none
  std::string secret_file;  // absolute path of where both came from, read again there; "": none
  // Where there is no such secret: known to all processes of this user. Peers are those alone, on this host.
  std::string user_secret;
  // Instead of both: peers prove who they are by certificates, and all that goes over TCP is encrypted.
  std::shared_ptr<const tls::Credentials> credentials;
  tls::CredentialFiles credential_files;  // that those were read from
  // Shared memory goes to whoever knows the secret, and not to processes of this user alone.
  bool shares_with_all = false;
  std::vector<std::string> transports;  // names of kinds in the registry (kvxfer/transport_kind.h)
  std::vector<std::string> require;  // of those: no session goes on without
  NamedOptions transport_options;  // of those and of others
  std::vector<GpuPart> gpus;  // whose memory it registers; one for now
  Time silent_ns = 2'000'000'000, heartbeat_ns = 500'000'000, handshake_ns = 2'000'000'000;
  Time lease_margin_ns = 100'000'000, spin_ns = 50'000;
  std::uint32_t max_transfers_per_peer = 1024;
  std::uint32_t eager_nbytes = 0;  // core/engine/eager.h: of one write, sent and taken
  std::uint32_t copy_threads = 1;  // that copy on this processor, with the one that drives; at least 1
  std::string faults;  // FaultyTransport around every transport
  // Of host memory, where that makes a difference to a rail: asked off the gate, when a device has pinned it.
  int (*numa_node_of)(const LocalRegion& region) = &kvxfer::numa_node_of;
  bool meter_gate = false;  // how long the gate is held is measured exactly: two system calls each time
};

}  // namespace kvxfer
