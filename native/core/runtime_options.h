// The options of an agent, as its maker gives them.
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
  std::string listen;                    // "tcp://host:port"; "" accepts no calls
  // Every peer must prove that it knows this secret, whatever its user and host.
  std::string secret;
  std::string second_secret;             // peers may prove this one instead; "": none
  std::string secret_file;  // absolute path of the file of both secrets; read again there; "": none
  // Used if there is no such secret: all processes of this user know it. Only they, on this host, can be
  // peers.
  std::string user_secret;
  // Instead of both: peers prove who they are by certificates, and everything on TCP is encrypted.
  std::shared_ptr<const tls::Credentials> credentials;
  tls::CredentialFiles credential_files;  // the files that those were read from
  // Shared memory goes to all peers that know the secret, and not only to processes of this user.
  bool shares_with_all = false;
  std::vector<std::string> transports;  // names of kinds in the registry (kvxfer/transport_kind.h)
  std::vector<std::string> require;  // of those: transports without which no session goes on
  NamedOptions transport_options;  // of those and of others
  std::vector<GpuPart> gpus;  // whose memory it registers; one for now
  Time silent_ns = 2'000'000'000, heartbeat_ns = 500'000'000, handshake_ns = 2'000'000'000;
  Time lease_margin_ns = 100'000'000, spin_ns = 50'000;
  std::uint32_t max_transfers_per_peer = 1024;
  std::uint32_t eager_nbytes = 0;  // core/engine/eager.h: the most bytes of one write, sent and accepted
  // Threads that copy on this processor, the driving one included; at least 1.
  std::uint32_t copy_threads = 1;
  std::string faults;  // puts FaultyTransport around every transport
  // Finds the node of host memory, if that makes a difference to a rail. Called without the gate, once a
  // device has pinned the memory.
  int (*numa_node_of)(const LocalRegion& region) = &kvxfer::numa_node_of;
  bool meter_gate = false;  // measures exactly how long the gate is held: two system calls each time
};

}  // namespace kvxfer
