#include "gpu/copy_stream.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gpu/convert_job.h"

namespace kvxfer::gpu {
namespace {

struct Shape {
  std::uint32_t num_threads;
  std::uint32_t shared_nbytes;  // dynamic
};

Shape shape_of(Kernel kernel) noexcept {
  switch (kernel) {
    case Kernel::kCopyVectors: return {512, 0};
    case Kernel::kCopyBulk: return {kRings * kWarp, kRings * sizeof(Ring)};
    case Kernel::kConvert: return {kMostConvertWarps * kWarp, sizeof(ConvertMemory)};
  }
  return {};
}

std::uint64_t aligned(std::uint64_t nbytes) noexcept { return (nbytes + 15) / 16 * 16; }

// Divisors are exact below 2^31.
bool are_countable(std::span<const std::uint32_t> ids) noexcept {
  std::uint32_t all = 0;
  for (const std::uint32_t id : ids) all |= id;
  return all < 1u << 31;
}

template <class T>
T* pointer(Address address) noexcept {
  return reinterpret_cast<T*>(address);
}

}  // namespace

Result<std::unique_ptr<CopyStream>> CopyStream::create(const Driver& driver, Context context,
                                                       const Kernels& kernels,
                                                       const CopyStreamOptions& options) {
  std::unique_ptr<CopyStream> stream(new CopyStream(driver, context, kernels, options));
  if (Status status = stream->allocate(); !status.ok()) return status;
  return stream;
}

Status CopyStream::allocate() {
  const ContextScope scope(driver_, context_);
  int least = 0, greatest = 0;
  int error = driver_.priority_range(&least, &greatest);
  if (error != 0) return driver_.status(error, "cuCtxGetStreamPriorityRange");
  error = driver_.stream_create(&stream_, kNonBlocking, options_.high_priority ? greatest : least);
  if (error != 0) return driver_.status(error, "cuStreamCreateWithPriority");

  void* memory = nullptr;
  error = driver_.host_allocate(&memory, options_.tables_nbytes, kPortable | kDeviceMap);
  if (error != 0) return driver_.status(error, "cuMemHostAlloc of the tables of blocks");
  host_tables_ = static_cast<std::byte*>(memory);
  error = driver_.host_allocate(&memory, sizeof(*done_), kPortable | kDeviceMap);
  if (error != 0) return driver_.status(error, "cuMemHostAlloc of the word of completion");
  done_ = new (memory) std::uint64_t(0);
  error = driver_.memory_allocate(&device_tables_, options_.tables_nbytes);
  if (error != 0) return driver_.status(error, "cuMemAlloc of the tables of blocks");
  error = driver_.memory_allocate(&arrivals_, sizeof(std::uint32_t));
  if (error != 0) return driver_.status(error, "cuMemAlloc of the counter of arrivals");
  error = driver_.memory_set(arrivals_, 0, sizeof(std::uint32_t), stream_);
  if (error != 0) return driver_.status(error, "cuMemsetD8Async");

  for (std::size_t k = 0; k < kNumKernels; ++k) {
    const Shape shape = shape_of(static_cast<Kernel>(k));
    if (kernels_.functions[k] == nullptr || shape.shared_nbytes == 0) continue;
    error = driver_.function_set(kernels_.functions[k], kMaxDynamicSharedNbytes,
                                 static_cast<int>(shape.shared_nbytes));
    if (error != 0) return driver_.status(error, "cuFuncSetAttribute");
  }
  return {};
}

CopyStream::~CopyStream() {
  const ContextScope scope(driver_, context_);
  if (stream_ != nullptr) {
    driver_.stream_synchronize(stream_);
    driver_.stream_destroy(stream_);
  }
  if (arrivals_ != 0) driver_.memory_free(arrivals_);
  if (device_tables_ != 0) driver_.memory_free(device_tables_);
  if (done_ != nullptr) driver_.host_free(done_);
  if (host_tables_ != nullptr) driver_.host_free(host_tables_);
}

CopyStream::Ticket CopyStream::done() const noexcept {
  return std::atomic_ref(*done_).load(std::memory_order_acquire);
}

Result<std::uint32_t> CopyStream::reserve(std::uint64_t nbytes) {
  const std::uint32_t capacity = options_.tables_nbytes;
  if (nbytes > capacity)
    return Status(Code::kExhausted, "tables of blocks take " + std::to_string(nbytes) +
                                        " bytes, and there is room for " + std::to_string(capacity) +
                                        ": copy fewer pairs at a time");
  const Ticket ended = done();
  while (!under_way_.empty() && under_way_.front().ticket <= ended) under_way_.pop_front();
  if (under_way_.empty()) free_from_ = 0;
  // A ring of contiguous parts: a table that does not fit before the ring's end goes to its beginning.
  const std::uint32_t oldest = under_way_.empty() ? capacity : under_way_.front().begin;
  const bool wrapped = !under_way_.empty() && oldest >= free_from_;
  const std::uint32_t end = wrapped ? oldest : capacity;
  if (nbytes <= end - free_from_) return free_from_;
  if (!wrapped && nbytes <= oldest) return 0u;
  return Status(Code::kAgain, "");
}

Result<CopyStream::Ticket> CopyStream::submit(const CopyProgram& program, const Part& part,
                                              std::span<const std::uint32_t> src_ids,
                                              std::span<const std::uint32_t> dst_ids, const Placement& src,
                                              const Placement& dst, Direction direction) {
  if (src_ids.size() != part.num_pairs || dst_ids.size() != part.num_pairs)
    return Status(Code::kLengthMismatch, "a part of " + std::to_string(part.num_pairs) +
                                             " pairs came with tables of " + std::to_string(src_ids.size()) +
                                             " and " + std::to_string(dst_ids.size()));
  if (!failed_.ok()) return failed_;
  if (!are_countable(src_ids) || !are_countable(dst_ids))
    return Status(Code::kOutOfRange, "kernels cannot number blocks and tokens from 2^31 on");
  const bool had_engines = engines_.work();
  Result<Ticket> ticket = submit_once(program, part, src_ids, dst_ids, src, dst, direction);
  // The driver has just refused the engines: kernels copy everything, also what engines may have copied.
  if (had_engines && !engines_.work() && failed_.ok())
    return submit_once(program, part, src_ids, dst_ids, src, dst, direction);
  return ticket;
}

Result<CopyStream::Ticket> CopyStream::submit_once(const CopyProgram& program, const Part& part,
                                                   std::span<const std::uint32_t> src_ids,
                                                   std::span<const std::uint32_t> dst_ids,
                                                   const Placement& src, const Placement& dst,
                                                   Direction direction) {
  const bool bulk = kernels_.functions[static_cast<std::size_t>(Kernel::kCopyBulk)] != nullptr;
  Result<JobWork> work = make_work(program, part, src_ids, dst_ids, src, dst, bulk,
                                   engines_.work() ? direction : Direction::kOnDevice, options_.calibration);
  if (!work.ok()) return work.status();
  std::vector<Launch>& launches = work.value().launches;
  const std::vector<EngineShare>& copies = work.value().copies;
  if (launches.empty() && copies.empty()) return last_;

  // Engines need no tables on the device.
  const std::uint64_t ids_nbytes = aligned(src_ids.size_bytes());
  const std::uint64_t nbytes =
      launches.empty() ? 0 : 2 * ids_nbytes + aligned(program.scales.size() * sizeof(float));
  const Result<std::uint32_t> begin = reserve(nbytes);
  if (!begin.ok()) return begin.status();
  const ContextScope scope(driver_, context_);
  if (const int error = engines_.enqueue(copies, src_ids, dst_ids, stream_); error != 0)
    return engines_fail(error, "cuMemcpyBatchAsync or cuMemcpy2DAsync");

  const Address on_device = device_tables_ + begin.value();
  if (!launches.empty()) {
    std::byte* tables = host_tables_ + begin.value();
    std::memcpy(tables, src_ids.data(), src_ids.size_bytes());
    std::memcpy(tables + ids_nbytes, dst_ids.data(), dst_ids.size_bytes());
    if (!program.scales.empty())
      std::memcpy(tables + 2 * ids_nbytes, program.scales.data(), program.scales.size() * sizeof(float));
    if (const int error = driver_.host_to_device(on_device, tables, nbytes, stream_); error != 0) {
      const Status status = driver_.status(error, "cuMemcpyHtoDAsync of the tables of blocks");
      if (!copies.empty()) failed_ = status;  // the engines' copies are under way
      return status;
    }
  }
  const Ticket ticket = ++last_;
  if (!launches.empty()) {
    under_way_.push_back({ticket, begin.value(), static_cast<std::uint32_t>(nbytes)});
    free_from_ = begin.value() + static_cast<std::uint32_t>(nbytes);
  }
  for (Launch& each : launches) {
    each.job.src_ids = pointer<const std::uint32_t>(on_device);
    each.job.dst_ids = pointer<const std::uint32_t>(on_device + ids_nbytes);
    if (copies.empty() && &each == &launches.back()) {
      each.job.arrivals = pointer<std::uint32_t>(arrivals_);
      each.job.done = done_;
      each.job.done_value = ticket;
    }
    // If this fails, some launches may be under way without a report of their end, so nothing can follow.
    if (failed_ = launch(each, on_device + 2 * ids_nbytes); !failed_.ok()) return failed_;
  }
  // Engines cannot write the word of completion, so the stream does, after a barrier (flags 0). A reader that
  // acquires the word sees what engines and kernels wrote before it.
  if (!copies.empty())
    if (const int error = driver_.stream_write_64(stream_, reinterpret_cast<Address>(done_), ticket, 0);
        error != 0)
      return engines_fail(error, "cuStreamWriteValue64 of the word of completion");
  return ticket;
}

// Some copies may be under way. If the device does not support these calls, this waits for the copies, and
// kernels take over. After any other error nothing can follow.
Status CopyStream::engines_fail(int error, const char* call) {
  const Status status = driver_.status(error, call);
  engines_.give_up();
  if (error != kNotSupported)
    failed_ = status;
  else
    failed_ = driver_.status(driver_.stream_synchronize(stream_), "work on the GPU");
  return failed_.ok() ? status : failed_;
}

Status CopyStream::launch(const Launch& launch, Address scales) {
  const auto index = static_cast<std::size_t>(launch.kernel);
  if (kernels_.functions[index] == nullptr)
    return Status(Code::kUnsupported, "this device has no kernel for that part of the program");
  const Shape shape = shape_of(launch.kernel);
  const std::uint32_t slices_per_cta =
      launch.conversions.team == Team::kWholeCta ? 1 : shape.num_threads / kWarp;
  const std::uint32_t num_ctas =
      std::min(options_.num_ctas, (launch.job.num_slices + slices_per_cta - 1) / slices_per_cta);
  ConvertJob conversions = launch.conversions;
  conversions.scales = pointer<const float>(scales);
  CopyJob job = launch.job;
  void* arguments[] = {&job, &conversions};
  return driver_.status(driver_.launch(kernels_.functions[index], num_ctas, 1, 1, shape.num_threads, 1, 1,
                                       shape.shared_nbytes, stream_, arguments, nullptr),
                        "cuLaunchKernel");
}

Status CopyStream::wait_for(Event event) {
  const ContextScope scope(driver_, context_);
  return driver_.status(driver_.stream_wait_event(stream_, event, 0), "cuStreamWaitEvent");
}

Status CopyStream::check() const {
  if (!failed_.ok()) return failed_;
  const ContextScope scope(driver_, context_);
  const int error = driver_.stream_query(stream_);
  return error == kNotReady ? Status() : driver_.status(error, "work on the GPU");
}

bool CopyStream::is_running() const {
  const ContextScope scope(driver_, context_);
  return driver_.stream_query(stream_) == kNotReady;
}

Status CopyStream::synchronize() {
  const ContextScope scope(driver_, context_);
  return driver_.status(driver_.stream_synchronize(stream_), "work on the GPU");
}

}  // namespace kvxfer::gpu
