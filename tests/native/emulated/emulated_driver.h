// Replaces libcuda: a driver whose device is this process. A stream is a thread that does its work in order,
// device memory is shared memory, and kernels are C++ (cuda_threads.h). It implements the calls that our code
// makes, as the driver's documentation describes them, and nothing else.
//
// Handles of memory work between processes and, unlike CUDA's, also within one process.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu/driver.h"

namespace kvxfer::gpu {

// A kernel: the function that runs it with the given CTAs, threads and arguments.
struct FunctionHandle {
  void (*run)(unsigned num_ctas, unsigned num_threads, unsigned shared_nbytes, void** arguments);
  std::vector<std::size_t> argument_nbytes;
};

struct StreamHandle {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool idle = true, ending = false;
  bool lost = false;  // used by the thread alone: its work does not end any more
  // While the stream is being captured: the graph's work, which a test can run any number of times.
  bool capturing = false;
  std::vector<std::function<void()>> captured;
  Context context = nullptr;
  std::jthread thread;
};

// Fires when a test says so.
struct EventHandle {
  std::mutex mutex;
  std::condition_variable changed;
  bool fired = false;
  bool captured = false;  // recorded in a capture

  void fire() {
    const std::lock_guard lock(mutex);
    fired = true;
    changed.notify_all();
  }
};

}  // namespace kvxfer::gpu

namespace emulated {

using namespace kvxfer::gpu;

inline constexpr int kInvalidValue = 1, kNotMapped = 211, kLaunchFailed = 719, kNotPermitted = 800;
inline constexpr int kCaptureUnsupported = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
inline constexpr std::size_t kGranularity = 2 * 1024 * 1024;  // of memory from cuMemCreate

// Memory of the device that this process has allocated or mapped.
struct Block {
  std::size_t nbytes = 0;
  int fd = -1;  // the memfd behind it
  int handle_types = 0;
  bool by_pages = false;  // cuMemCreate and cuMemMap, not cuMemAlloc
};

struct Device {
  std::mutex mutex;
  std::map<Address, Block> blocks;
  std::atomic<int> num_contexts{0}, num_multiprocessors{132};
  // Faults that a test can set: the n-th launch from now on, all memory beyond a number of bytes, every
  // stream.
  std::atomic<int> launches_until_failure{-1};
  std::atomic<std::size_t> most_nbytes{SIZE_MAX};
  std::atomic<int> stream_error{0};
  std::atomic<bool> fabric{false};  // a fabric manager runs: memory has fabric handles
  std::atomic<int> reserve_error{0}, map_error{0}, access_error{0};
  // What the code under test has still to give back: handles of allocations, and reserved address ranges.
  std::atomic<int> num_handles{0}, num_reserved{0};
  std::atomic<std::size_t> most_host_nbytes{SIZE_MAX};  // pinned, at once
  std::atomic<bool> refuses_imports{false};  // by IPC handle
  std::map<Address, std::size_t> pinned;  // under the mutex
  // Copy engines: the error that their calls return, whether copies never end, and functions called around
  // each copy.
  std::atomic<int> engine_error{0}, word_error{0};
  std::atomic<bool> hangs{false};
  std::atomic<void (*)()> engine_begins{nullptr}, engine_ends{nullptr};
  std::atomic<std::uint64_t> num_batches{0}, num_copies{0}, num_2d_copies{0};
  std::atomic<bool> refuses_waits{false};  // streams refuse to wait for words
  std::atomic<bool> flushes_remote_writes{false};  // whether such a wait can flush at its end
  // NICs and the device's memory: the order in which it sees their writes, who may flush them, dmabufs.
  std::atomic<int> writes_ordering{kSeenByOwner}, flush_options{kFlushByHost}, exports_dmabufs{1};
  std::atomic<int> flush_error{0};
  std::atomic<void (*)()> flush{nullptr};  // called for each flush
  std::atomic<std::uint64_t> num_flushes{0};
  // Captures in the mode that watches all threads, and how many of them were ended by a forbidden call.
  std::atomic<int> num_captures{0}, num_broken_captures{0};
};

inline Device& device() {
  static Device one;
  return one;
}

inline std::map<Address, Block>::iterator block_at(Address address) {
  auto after = device().blocks.upper_bound(address);
  if (after == device().blocks.begin()) return device().blocks.end();
  --after;
  return address < after->first + after->second.nbytes ? after : device().blocks.end();
}

// True if the driver knows the whole range.
inline bool is_known(Address address, std::size_t nbytes) {
  const std::lock_guard lock(device().mutex);
  if (const auto found = block_at(address); found != device().blocks.end())
    return nbytes <= found->first + found->second.nbytes - address;
  auto after = device().pinned.upper_bound(address);
  if (after == device().pinned.begin()) return false;
  --after;
  return address - after->first < after->second && nbytes <= after->second - (address - after->first);
}

inline Address map_shared(int fd, std::size_t nbytes, int protection, Address at = 0) {
  void* mapped =
      ::mmap(reinterpret_cast<void*>(at), nbytes, protection, MAP_SHARED | (at != 0 ? MAP_FIXED : 0), fd, 0);
  return mapped == MAP_FAILED ? 0 : reinterpret_cast<Address>(mapped);
}

inline int allocate(Address* address, std::size_t nbytes, bool by_pages, int handle_types) {
  if (nbytes == 0) return kInvalidValue;
  if (nbytes > device().most_nbytes) return kOutOfMemory;
  const int fd = ::memfd_create("emulated GPU memory", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) return kOutOfMemory;
  const Address mapped = map_shared(fd, nbytes, PROT_READ | PROT_WRITE);
  if (mapped == 0) return kOutOfMemory;
  const std::lock_guard lock(device().mutex);
  device().blocks[mapped] = {nbytes, fd, handle_types, by_pages};
  *address = mapped;
  return 0;
}

// Memory from cuMemCreate and cuMemMap, shareable by the given kinds of handles.
inline Address allocate_pages(std::size_t nbytes, int handle_types) {
  Address address = 0;
  return allocate(&address, nbytes, true, handle_types) == 0 ? address : 0;
}

inline int release(Address address) {
  const std::lock_guard lock(device().mutex);
  const auto found = device().blocks.find(address);
  if (found == device().blocks.end()) return kInvalidValue;
  ::munmap(reinterpret_cast<void*>(address), found->second.nbytes);
  ::close(found->second.fd);
  device().blocks.erase(found);
  return 0;
}

// Handles of 64 bytes name a process and a descriptor of it.
struct Named { std::uint64_t pid, fd, nbytes; };

inline int open_named(const std::byte* handle, std::size_t* nbytes) {
  Named named;
  std::memcpy(&named, handle, sizeof named);
  *nbytes = named.nbytes;
  const std::string path = "/proc/" + std::to_string(named.pid) + "/fd/" + std::to_string(named.fd);
  return ::open(path.c_str(), O_RDWR | O_CLOEXEC);
}

// The contents of a dmabuf, which is a memfd that says which memory it stands for.
struct Stretch { Address address, nbytes; };

// The handle of an allocation: a descriptor, and the kinds of handles by which it can be shared.
inline Allocation handle_of(int fd, int handle_types) {
  ++device().num_handles;
  return static_cast<Allocation>(fd) << 8 | static_cast<Allocation>(handle_types);
}

inline void run_stream(StreamHandle& stream) {
  std::unique_lock lock(stream.mutex);
  for (;;) {
    stream.idle = stream.work.empty();
    stream.changed.notify_all();
    stream.changed.wait(lock, [&] { return !stream.work.empty() || stream.ending; });
    if (stream.work.empty()) return;
    stream.idle = false;
    const auto work = std::move(stream.work.front());
    stream.work.pop_front();
    lock.unlock();
    if (!stream.lost) work();
    lock.lock();
  }
}

inline int enqueue(Stream stream, std::function<void()> work) {
  if (stream == nullptr) return kInvalidValue;
  const std::lock_guard lock(stream->mutex);
  stream->work.push_back(std::move(work));
  stream->changed.notify_all();
  return 0;
}

inline constexpr int kIllegalAddress = 700;

struct EngineCopy {
  Address dst, src;
  std::size_t nbytes;
};

// Runs on the stream's thread, when its turn comes. Memory that is gone by then ends the device.
inline void run_engine(StreamHandle& stream, const std::vector<EngineCopy>& copies) {
  if (const auto begins = device().engine_begins.load()) begins();
  if (device().hangs) {
    stream.lost = true;
    return;
  }
  // The last one first, so that code that relies on an order fails.
  for (auto copy = copies.rbegin(); copy != copies.rend(); ++copy) {
    if (!is_known(copy->src, copy->nbytes) || !is_known(copy->dst, copy->nbytes)) {
      device().stream_error = kIllegalAddress;
      stream.lost = true;
      return;
    }
    std::memcpy(reinterpret_cast<void*>(copy->dst), reinterpret_cast<void*>(copy->src), copy->nbytes);
  }
  if (const auto ends = device().engine_ends.load()) ends();
}

// The ranges are checked when the driver is called, and copied later.
inline int enqueue_engine(Stream stream, std::vector<EngineCopy> copies) {
  if (device().stream_error != 0) return device().stream_error.load();
  if (device().launches_until_failure.fetch_sub(1) == 0) return kLaunchFailed;
  for (const EngineCopy& copy : copies)
    if (copy.nbytes == 0 || !is_known(copy.src, copy.nbytes) || !is_known(copy.dst, copy.nbytes))
      return kInvalidValue;
  return enqueue(stream, [stream, copies = std::move(copies)] { run_engine(*stream, copies); });
}

inline Context own_context() { return reinterpret_cast<Context>(&device()); }

// The thread's contexts, the current one last.
inline std::vector<Context>& contexts() {
  thread_local std::vector<Context> of_thread;
  return of_thread;
}

// The thread's CUstreamCaptureMode (0: global, 1: thread local, 2: relaxed).
inline int& capture_mode() {
  thread_local int of_thread = 0;
  return of_thread;
}

// The documentation names the calls that a capture forbids by example alone (cudaMalloc; querying an event is
// another). So here it forbids all that allocate, free, map, query or wait.
template <auto kCall, class... Arguments>
void forbid_in_captures(Driver& driver, int (*Driver::*)(Arguments...)) {
  static int (*allowed)(Arguments...) = nullptr;
  allowed = driver.*kCall;
  driver.*kCall = [](Arguments... arguments) {
    if (device().num_captures == 0 || capture_mode() != 0) return allowed(arguments...);
    ++device().num_broken_captures;
    return kCaptureUnsupported;
  };
}
template <auto... kCalls>
void forbid_in_captures(Driver& driver) {
  (forbid_in_captures<kCalls>(driver, kCalls), ...);
}

inline Driver make_driver() {
  Driver driver{};
  driver.init = [](unsigned) { return 0; };
  driver.error_name = [](int error, const char** name) {
    *name = error == kOutOfMemory      ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == kNotReady       ? "CUDA_ERROR_NOT_READY"
            : error == kNotSupported   ? "CUDA_ERROR_NOT_SUPPORTED"
            : error == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                       : "CUDA_ERROR_INVALID_VALUE";
    return 0;
  };
  driver.error_string = [](int, const char** text) {
    *text = "emulated";
    return 0;
  };
  driver.device_get = [](kvxfer::gpu::Device* found, int index) {
    *found = index;
    return index == 0 ? 0 : 101;  // CUDA_ERROR_INVALID_DEVICE
  };
  driver.primary_context_retain = [](Context* context, kvxfer::gpu::Device) {
    ++device().num_contexts;
    *context = own_context();
    return 0;
  };
  driver.primary_context_release = [](kvxfer::gpu::Device) {
    --device().num_contexts;
    return 0;
  };
  driver.context_push = [](Context context) {
    contexts().push_back(context);
    return 0;
  };
  driver.context_pop = [](Context* context) {
    *context = contexts().back();
    contexts().pop_back();
    return 0;
  };
  driver.exchange_capture_mode = [](int* mode) {
    std::swap(*mode, capture_mode());
    return 0;
  };
  driver.context_device = [](kvxfer::gpu::Device* found) {
    *found = contexts().back() == own_context() ? 0 : 1;
    return 0;
  };
  driver.priority_range = [](int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
  };
  driver.stream_create = [](Stream* stream, unsigned, int) {
    auto* made = new StreamHandle;
    made->context = own_context();
    made->thread = std::jthread([made] { run_stream(*made); });
    *stream = made;
    return 0;
  };
  driver.stream_destroy = [](Stream stream) {
    {
      const std::lock_guard lock(stream->mutex);
      stream->ending = true;
      stream->changed.notify_all();
    }
    stream->thread.join();
    delete stream;
    return 0;
  };
  driver.stream_query = [](Stream stream) {
    if (device().stream_error != 0) return device().stream_error.load();
    const std::lock_guard lock(stream->mutex);
    return stream->idle && stream->work.empty() ? 0 : kNotReady;
  };
  driver.stream_synchronize = [](Stream stream) {
    std::unique_lock lock(stream->mutex);
    stream->changed.wait(lock, [&] { return stream->idle && stream->work.empty(); });
    return device().stream_error.load();
  };
  driver.stream_wait_event = [](Stream stream, Event event, unsigned) {
    return enqueue(stream, [event] {
      std::unique_lock lock(event->mutex);
      event->changed.wait(lock, [&] { return event->fired; });
    });
  };
  driver.stream_write = [](Stream stream, Address address, std::uint32_t value, unsigned) {
    if (device().stream_error != 0) return device().stream_error.load();
    if (stream == nullptr || address % sizeof value != 0) return kInvalidValue;
    auto store = [=] {
      std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address)).store(value, std::memory_order_release);
    };
    if (!stream->capturing) return enqueue(stream, store);
    stream->captured.push_back(store);
    return 0;
  };
  driver.stream_wait = [](Stream stream, Address address, std::uint32_t value, unsigned flags) {
    if (device().stream_error != 0) return device().stream_error.load();
    if (device().refuses_waits) return kNotSupported;
    const bool flushes = (flags & kFlushRemoteWrites) != 0;
    if (flushes && !device().flushes_remote_writes) return kNotSupported;
    if (stream == nullptr || address % sizeof value != 0 || (flags & ~kFlushRemoteWrites) != kWaitForMore)
      return kInvalidValue;
    auto wait = [=] {
      const std::atomic_ref word(*reinterpret_cast<std::uint32_t*>(address));
      // A device gets no notice of a store, so it polls; and ">=" compares modulo 2^32.
      while (static_cast<std::int32_t>(word.load(std::memory_order_acquire) - value) < 0)
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    };
    if (!stream->capturing) return enqueue(stream, wait);
    stream->captured.push_back(wait);
    return 0;
  };
  driver.device_attribute = [](int* value, int attribute, kvxfer::gpu::Device) {
    switch (attribute) {
      case kMultiprocessorCount: *value = device().num_multiprocessors; break;
      case kCanFlushRemoteWrites: *value = device().flushes_remote_writes ? 1 : 0; break;
      case kWritesOrdering: *value = device().writes_ordering; break;
      case kFlushOptions: *value = device().flush_options; break;
      case kDmabufSupported: *value = device().exports_dmabufs; break;
      default: *value = 0;
    }
    return 0;
  };
  driver.stream_is_capturing = [](Stream stream, int* status) {
    *status = stream->capturing ? 1 : 0;
    return 0;
  };
  driver.stream_context = [](Stream stream, Context* context) {
    *context = stream->context;
    return 0;
  };
  driver.event_query = [](Event event) {
    if (event->captured) return 907;  // CUDA_ERROR_CAPTURED_EVENT
    const std::lock_guard lock(event->mutex);
    return event->fired ? 0 : kNotReady;
  };
  driver.memory_allocate = [](Address* address, std::size_t nbytes) {
    return allocate(address, nbytes, false, 0);
  };
  driver.memory_free = [](Address address) { return release(address); };
  driver.host_allocate = [](void** memory, std::size_t nbytes, unsigned) {
    if (nbytes > device().most_host_nbytes) return kOutOfMemory;
    *memory = operator new(nbytes, std::align_val_t{4096});
    const std::lock_guard lock(device().mutex);
    device().pinned[reinterpret_cast<Address>(*memory)] = nbytes;
    return 0;
  };
  driver.host_free = [](void* memory) {
    {
      const std::lock_guard lock(device().mutex);
      device().pinned.erase(reinterpret_cast<Address>(memory));
    }
    operator delete(memory, std::align_val_t{4096});
    return 0;
  };
  driver.host_to_device = [](Address dst, const void* src, std::size_t nbytes, Stream stream) {
    // Pinned memory is read when the copy's turn comes, not before.
    return enqueue(stream, [=] { std::memcpy(reinterpret_cast<void*>(dst), src, nbytes); });
  };
  driver.copy_batch = [](Address* dst, Address* src, std::size_t* nbytes, std::size_t count,
                         CopyAttributes* attributes, std::size_t* first_copies, std::size_t num_attributes,
                         std::size_t* failed, Stream stream) {
    if (device().engine_error != 0) return device().engine_error.load();
    *failed = SIZE_MAX;
    if (stream == nullptr || count == 0 || num_attributes == 0 || num_attributes > count ||
        first_copies[0] != 0)
      return kInvalidValue;
    for (std::size_t k = 0; k < num_attributes; ++k)
      if (attributes[k].src_access_order != 1 || attributes[k].flags > 1 ||
          (k != 0 && first_copies[k] <= first_copies[k - 1]) || first_copies[k] >= count)
        return kInvalidValue;
    std::vector<EngineCopy> copies;  // the caller may reuse its arrays when this returns
    for (std::size_t k = 0; k < count; ++k) copies.push_back({dst[k], src[k], nbytes[k]});
    ++device().num_batches;
    device().num_copies += count;
    return enqueue_engine(stream, std::move(copies));
  };
  driver.copy_2d = [](const Copy2D* copy, Stream stream) {
    if (device().engine_error != 0) return device().engine_error.load();
    if (copy->src_type != 4 || copy->dst_type != 4 || copy->width_nbytes == 0 || copy->height == 0 ||
        copy->src_pitch < copy->width_nbytes || copy->dst_pitch < copy->width_nbytes ||
        std::max(copy->src_pitch, copy->dst_pitch) > 0x7fffffff)
      return kInvalidValue;
    std::vector<EngineCopy> rows;
    for (std::size_t row = 0; row < copy->height; ++row)
      rows.push_back(
          {copy->dst + row * copy->dst_pitch, copy->src + row * copy->src_pitch, copy->width_nbytes});
    ++device().num_2d_copies;
    return enqueue_engine(stream, std::move(rows));
  };
  driver.stream_write_64 = [](Stream stream, Address address, std::uint64_t value, unsigned) {
    if (device().word_error != 0) return device().word_error.load();
    if (device().stream_error != 0) return device().stream_error.load();
    if (stream == nullptr || address % sizeof value != 0) return kInvalidValue;
    return enqueue(stream, [=] {
      std::atomic_ref(*reinterpret_cast<std::uint64_t*>(address)).store(value, std::memory_order_release);
    });
  };
  driver.memory_set = [](Address dst, unsigned char value, std::size_t nbytes, Stream stream) {
    return enqueue(stream, [=] { std::memset(reinterpret_cast<void*>(dst), value, nbytes); });
  };
  driver.function_set = [](Function, int, int) { return 0; };
  driver.launch = [](Function function, unsigned num_ctas, unsigned, unsigned, unsigned num_threads, unsigned,
                     unsigned, unsigned shared_nbytes, Stream stream, void** arguments, void**) {
    if (device().launches_until_failure.fetch_sub(1) == 0) return kLaunchFailed;
    std::vector<std::vector<std::byte>> copied;  // the caller may reuse its arguments when this returns
    for (std::size_t k = 0; k < function->argument_nbytes.size(); ++k) {
      const auto* first = static_cast<const std::byte*>(arguments[k]);
      copied.emplace_back(first, first + function->argument_nbytes[k]);
    }
    return enqueue(stream, [=]() mutable {
      std::vector<void*> pointers;
      for (auto& argument : copied) pointers.push_back(argument.data());
      function->run(num_ctas, num_threads, shared_nbytes, pointers.data());
    });
  };

  driver.address_range = [](Address* base, std::size_t* nbytes, Address address) {
    const std::lock_guard lock(device().mutex);
    const auto found = block_at(address);
    if (found == device().blocks.end()) return kInvalidValue;
    *base = found->first;
    *nbytes = found->second.nbytes;
    return 0;
  };
  driver.range_handle = [](void* handle, Address address, std::size_t nbytes, int type, unsigned long long) {
    constexpr std::size_t kPage = 4096;
    if (type != kDmabufHandle || nbytes == 0 || address % kPage != 0 || nbytes % kPage != 0)
      return kInvalidValue;
    if (device().exports_dmabufs == 0) return kNotSupported;
    const std::lock_guard lock(device().mutex);
    const auto found = block_at(address);
    if (found == device().blocks.end()) return kInvalidValue;
    const std::size_t whole = (found->second.nbytes + kPage - 1) / kPage * kPage;
    if (nbytes > found->first + whole - address) return kInvalidValue;  // it reaches into another allocation
    const int fd = ::memfd_create("emulated dmabuf", MFD_CLOEXEC);
    const Stretch stretch{address, nbytes};
    if (fd < 0 || ::write(fd, &stretch, sizeof stretch) != sizeof stretch) return kOutOfMemory;
    std::memcpy(handle, &fd, sizeof fd);
    return 0;
  };
  driver.flush_remote_writes = [](int target, int scope) {
    if (target != 0 || scope != kSeenByOwner || contexts().empty()) return kInvalidValue;
    if (device().flush_error != 0) return device().flush_error.load();
    ++device().num_flushes;
    if (const auto flush = device().flush.load()) flush();
    return 0;
  };
  driver.ipc_export = [](IpcHandle* handle, Address address) {
    const std::lock_guard lock(device().mutex);
    const auto found = block_at(address);
    if (found == device().blocks.end() || found->second.by_pages) return kInvalidValue;
    const Named named{static_cast<std::uint64_t>(::getpid()), static_cast<std::uint64_t>(found->second.fd),
                      found->second.nbytes};
    std::memcpy(handle->bytes, &named, sizeof named);
    return 0;
  };
  driver.ipc_open = [](Address* address, IpcHandle handle, unsigned) {
    std::size_t nbytes = 0;
    if (device().refuses_imports) return kInvalidValue;
    const int fd = open_named(handle.bytes, &nbytes);
    if (fd < 0) return kInvalidValue;
    *address = map_shared(fd, nbytes, PROT_READ | PROT_WRITE);
    const std::lock_guard lock(device().mutex);
    device().blocks[*address] = {nbytes, fd, 0, false};
    return 0;
  };
  driver.ipc_close = [](Address address) { return release(address); };
  driver.context_synchronize = [] { return 0; };
  driver.allocation_granularity = [](std::size_t* nbytes, const AllocationProperties*, int) {
    *nbytes = kGranularity;
    return 0;
  };
  driver.allocation_create = [](Allocation* allocation, std::size_t nbytes,
                                const AllocationProperties* properties, unsigned long long) {
    if (nbytes == 0 || nbytes % kGranularity != 0 || properties->location.id != 0) return kInvalidValue;
    if ((properties->handle_types & kFabricHandle) != 0 && !device().fabric) return kNotPermitted;
    if (nbytes > device().most_nbytes) return kOutOfMemory;
    const int fd = ::memfd_create("emulated GPU pages", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) return kOutOfMemory;
    *allocation = handle_of(fd, properties->handle_types);
    return 0;
  };
  driver.allocation_retain = [](Allocation* allocation, void* address) {
    const std::lock_guard lock(device().mutex);
    const auto found = block_at(reinterpret_cast<Address>(address));
    if (found == device().blocks.end() || !found->second.by_pages) return kNotMapped;
    *allocation = handle_of(::fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0), found->second.handle_types);
    return 0;
  };
  driver.allocation_release = [](Allocation allocation) {
    --device().num_handles;
    ::close(static_cast<int>(allocation >> 8));
    return 0;
  };
  driver.allocation_properties = [](AllocationProperties* properties, Allocation allocation) {
    *properties = {};
    properties->handle_types = static_cast<int>(allocation & 0xff);
    return 0;
  };
  driver.allocation_export = [](void* handle, Allocation allocation, int type, unsigned long long) {
    const int fd = static_cast<int>(allocation >> 8);
    if (type == kPosixFdHandle) {
      const int exported = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
      std::memcpy(handle, &exported, sizeof exported);
      return 0;
    }
    if (!device().fabric) return kNotPermitted;  // as if no fabric manager runs
    // Named by the descriptor of the mapping, since this handle's own descriptor is closed sooner.
    struct stat file{}, other{};
    if (::fstat(fd, &file) != 0) return kInvalidValue;
    const std::lock_guard lock(device().mutex);
    for (const auto& [address, block] : device().blocks) {
      if (!block.by_pages || ::fstat(block.fd, &other) != 0 || other.st_ino != file.st_ino) continue;
      const Named named{static_cast<std::uint64_t>(::getpid()), static_cast<std::uint64_t>(block.fd),
                        block.nbytes};
      std::memcpy(handle, &named, sizeof named);
      return 0;
    }
    return kInvalidValue;
  };
  driver.allocation_import = [](Allocation* allocation, void* handle, int type) {
    if (type == kFabricHandle && !device().fabric) return kNotPermitted;
    std::size_t nbytes = 0;
    const int fd = type == kFabricHandle ? open_named(static_cast<const std::byte*>(handle), &nbytes)
                                         : ::fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(handle)),
                                                   F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return kInvalidValue;
    *allocation = handle_of(fd, type);
    return 0;
  };
  driver.address_reserve = [](Address* address, std::size_t nbytes, std::size_t, Address,
                              unsigned long long) {
    if (device().reserve_error != 0) return device().reserve_error.load();
    void* reserved = ::mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return kOutOfMemory;
    *address = reinterpret_cast<Address>(reserved);
    ++device().num_reserved;
    return 0;
  };
  driver.address_free = [](Address address, std::size_t nbytes) {
    --device().num_reserved;
    return ::munmap(reinterpret_cast<void*>(address), nbytes) == 0 ? 0 : kInvalidValue;
  };
  driver.map = [](Address address, std::size_t nbytes, std::size_t, Allocation allocation,
                  unsigned long long) {
    const int fd = static_cast<int>(allocation >> 8);
    struct stat file{};
    if (::fstat(fd, &file) != 0 || static_cast<std::size_t>(file.st_size) < nbytes) return kInvalidValue;
    if (device().map_error != 0) return device().map_error.load();
    if (map_shared(fd, nbytes, PROT_NONE, address) != address) return kInvalidValue;
    const std::lock_guard lock(device().mutex);
    device().blocks[address] = {nbytes, ::fcntl(fd, F_DUPFD_CLOEXEC, 0), static_cast<int>(allocation & 0xff),
                                true};
    return 0;
  };
  driver.unmap = [](Address address, std::size_t nbytes) {
    {
      const std::lock_guard lock(device().mutex);
      const auto found = device().blocks.find(address);
      if (found == device().blocks.end() || found->second.nbytes != nbytes) return kInvalidValue;
      ::close(found->second.fd);
      device().blocks.erase(found);
    }
    return ::mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED
               ? kInvalidValue
               : 0;
  };
  driver.set_access = [](Address address, std::size_t nbytes, const Access* access, std::size_t) {
    if (device().access_error != 0) return device().access_error.load();
    const int protection = access->flags == kReadAccess ? PROT_READ : PROT_READ | PROT_WRITE;
    return ::mprotect(reinterpret_cast<void*>(address), nbytes, protection) == 0 ? 0 : kInvalidValue;
  };
  forbid_in_captures<
      &Driver::memory_allocate, &Driver::memory_free, &Driver::host_allocate, &Driver::host_free,
      &Driver::stream_create, &Driver::stream_destroy, &Driver::stream_query, &Driver::stream_synchronize,
      &Driver::event_query, &Driver::context_synchronize, &Driver::ipc_open, &Driver::ipc_close,
      &Driver::allocation_create, &Driver::map, &Driver::unmap, &Driver::set_access, &Driver::function_set>(
      driver);
  return driver;
}

inline const Driver& driver() {
  static const Driver one = make_driver();
  return one;
}

}  // namespace emulated
