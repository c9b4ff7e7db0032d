// The interface between a plug-in and NIXL 1.5.1's agent: layouts and tables of functions, as in the wheel.
// No wheel contains NIXL's headers. This was written from NIXL's published documents and from the wheel's own
// UCX plug-in: where its constructor writes, and the order of its virtual functions.
// tests/nixl/test_plugin.py compares it with the wheel.
//
// The names are ours; NIXL does not see them. Every order matters: of members, of virtual functions, of
// numbers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvxfer::nixl {

inline constexpr int kPluginApi = 1;  // of 1.5.1

enum Segment : int { kDram, kVram, kBlock, kObject, kFile };
enum Operation : int { kRead, kWrite };
enum Answer : int {
  kInProgress = 1,
  kSuccess = 0,
  kNotPosted = -1,
  kInvalidParam = -2,
  kBackendError = -3,
  kNotFound = -4,
  kMismatch = -5,
  kNotAllowed = -6,
  kRepostActive = -7,
  kUnknown = -8,
  kNotSupported = -9,
  kRemoteDisconnect = -10,
  kCanceled = -11,
};

using Parameters = std::unordered_map<std::string, std::string>;
using Segments = std::vector<Segment>;

// What a backend stores for some memory.
class Metadata {
 public:
  explicit Metadata(bool is_own) : is_private_(is_own) {}
  virtual ~Metadata() = default;

 protected:
  bool is_private_;
};

// What a backend stores for a transfer.
class Transfer {
 public:
  virtual ~Transfer() = default;
};

struct Registered {
  std::uintptr_t address;
  std::size_t nbytes;
  std::uint64_t device;
  std::string note;  // for our memory its owner's note; for a remote agent, its public_data()
};
struct Named {
  std::uintptr_t address;
  std::size_t nbytes;
  std::uint64_t device;
  Metadata* metadata;
};

template <class T>
class List {
 public:
  virtual ~List() = default;
  Segment segment;
  std::vector<T> entries;
};

struct TransferOptions {
  std::string notification;
  bool notifies = false;
  std::string custom;
};

struct EngineOptions {
  std::string agent;
  std::string type;
  Parameters* parameters;
  bool has_thread;
  std::uint64_t thread_delay_us;
  int synchronized;
  bool keeps_telemetry;
};

using Notifications = std::vector<std::pair<std::string, std::string>>;

// A backend. NIXL's agent reads the members directly.
class Engine {
 public:
  explicit Engine(const EngineOptions& options)
      : type_(options.type),
        parameters_(options.parameters == nullptr ? Parameters() : *options.parameters),
        agent_(options.agent),
        keeps_telemetry_(options.keeps_telemetry) {}
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual ~Engine() = default;
  virtual bool supports_remote() const = 0;
  virtual bool supports_local() const = 0;
  virtual bool supports_notifications() const = 0;
  virtual Segments segments() const = 0;
  virtual Answer register_memory(const Registered& memory, const Segment& segment, Metadata*& out) = 0;
  virtual Answer deregister_memory(Metadata* metadata) = 0;
  virtual Answer connect(const std::string& remote) = 0;
  virtual Answer disconnect(const std::string& remote) = 0;
  virtual Answer unload(Metadata* metadata) = 0;
  virtual Answer prepare(const Operation& operation, const List<Named>& local, const List<Named>& remote,
                         const std::string& agent, Transfer*& handle,
                         const TransferOptions* options) const = 0;
  virtual Answer post(const Operation& operation, const List<Named>& local, const List<Named>& remote,
                      const std::string& agent, Transfer*& handle, const TransferOptions* options) const = 0;
  virtual Answer check(Transfer* handle) const = 0;
  virtual Answer release(Transfer* handle) const = 0;
  virtual Answer prepare_remote_view(const void*, void*&, const TransferOptions*) const {
    return kNotSupported;
  }
  virtual Answer prepare_local_view(const List<Named>&, void*&, const TransferOptions*) const {
    return kNotSupported;
  }
  virtual void release_view(void*) const {}
  virtual Answer public_data(const Metadata* metadata, std::string& out) const = 0;
  virtual Answer connection(std::string& out) const = 0;
  virtual Answer load_connection(const std::string& remote, const std::string& told) = 0;
  virtual Answer load_remote(const Registered& told, const Segment& segment, const std::string& remote,
                             Metadata*& out) = 0;
  virtual Answer load_local(Metadata* own, Metadata*& out) = 0;
  virtual Answer notifications(Notifications& out) = 0;
  virtual Answer notify(const std::string& remote, const std::string& payload) const = 0;
  virtual Answer query(const void*, std::vector<std::optional<Parameters>>&) const { return kNotSupported; }
  virtual Answer estimate(const Operation&, const List<Named>&, const List<Named>&, const std::string&,
                          Transfer* const&, std::chrono::microseconds&, std::chrono::microseconds&, int&,
                          const void*) const {
    return kNotSupported;
  }

 private:
  std::string type_;
  Parameters parameters_;
  std::vector<char> telemetry_;  // for NIXL's events; always empty
  std::mutex telemetry_mutex_;

 protected:
  bool has_failed_ = false;  // if set, NIXL destroys the engine
  const std::string agent_;
  const bool keeps_telemetry_;
};

struct Plugin {
  int api;
  Engine* (*create)(const EngineOptions* options);
  void (*destroy)(Engine* engine);
  const char* (*name)();
  const char* (*version)();
  Parameters (*parameters)();
  Segments (*segments)();
};

}  // namespace kvxfer::nixl
