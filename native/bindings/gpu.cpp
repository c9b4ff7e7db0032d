// Runs copies on a GPU without agents: for tests, and to measure what a machine can do.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings/convert.h"
#include "core/region.h"
#include "gpu/calibrate.h"
#include "gpu/copy_stream.h"
#include "gpu/make_job.h"

namespace kvxfer::python {
namespace {

using namespace nb::literals;
using Units = std::array<std::uint32_t, 4>;

CopyProgram checked_program(std::uint32_t num_layers, nb::handle loops, nb::handle conversions,
                            nb::handle scales, const Units& units) {
  CopyProgram program = to_program(num_layers, loops, conversions, scales, units);
  check(check_program(program));
  return program;
}

gpu::Part part_of(const std::array<std::uint32_t, 2>& layers, const BlockIds& ids, std::uint32_t num_fine) {
  const auto num_pairs = static_cast<std::uint32_t>(ids.size());
  if (num_fine > num_pairs) raise({Code::kInvalidArgument, "num_fine is larger than the number of pairs"});
  return {layers[0], layers[1], num_pairs, num_fine};
}

// Every atom of a part in the order in which the kernels find them, slice by slice: (kernel, source's offset,
// destination's, bytes at the source).
nb::object atoms(std::uint32_t num_layers, nb::handle loops, nb::handle conversions, nb::handle scales,
                 const Units& units, const std::array<std::uint32_t, 2>& layers, const BlockIds& src_ids,
                 const BlockIds& dst_ids, std::uint32_t num_fine, std::uint64_t src_address,
                 std::uint64_t dst_address, bool bulk) {
  if (src_ids.size() != dst_ids.size()) raise({Code::kLengthMismatch, "the tables differ in length"});
  const CopyProgram program = checked_program(num_layers, loops, conversions, scales, units);
  const std::span<const std::uint32_t> src_table(src_ids.data(), src_ids.size());
  const std::span<const std::uint32_t> dst_table(dst_ids.data(), dst_ids.size());
  const auto launches =
      take(gpu::make_launches(program, part_of(layers, src_ids, num_fine), src_table, dst_table,
                              gpu::Placement(src_address), gpu::Placement(dst_address), bulk));
  auto* rows = new std::vector<std::array<std::uint64_t, 4>>;
  nb::capsule owner(
      rows, [](void* p) noexcept { delete static_cast<std::vector<std::array<std::uint64_t, 4>>*>(p); });
  for (const gpu::Launch& launch : launches)
    for (std::uint32_t index = 0; index < launch.job.num_slices; ++index) {
      const gpu::Slice slice = gpu::slice_at(launch.job, index);
      const gpu::JobLoop& loop = launch.job.loops[slice.loop];
      for (std::uint32_t k = 0; k < slice.num_atoms; ++k) {
        const gpu::AtomPlace place = gpu::place_of(loop, slice.first_atom + k);
        rows->push_back({static_cast<std::uint64_t>(launch.kernel),
                         gpu::address_of(loop.src, place, src_table[place.pair], slice.layer) - src_address,
                         gpu::address_of(loop.dst, place, dst_table[place.pair], slice.layer) - dst_address,
                         gpu::src_nbytes_of(loop, place)});
      }
    }
  return nb::cast(nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<2>>(rows->data(), {rows->size(), 4}, owner));
}

// A program, parsed once.
class PyGpuProgram {
 public:
  PyGpuProgram(std::uint32_t num_layers, nb::handle loops, nb::handle conversions, nb::handle scales,
               const Units& units)
      : program_(checked_program(num_layers, loops, conversions, scales, units)) {}
  const CopyProgram& get() const { return program_; }

 private:
  CopyProgram program_;
};

using KernelHandles = std::array<std::uint64_t, gpu::kNumKernels>;

gpu::Kernels to_kernels(const KernelHandles& handles) {
  gpu::Kernels kernels;
  for (std::size_t k = 0; k < gpu::kNumKernels; ++k)
    kernels.functions[k] = reinterpret_cast<gpu::Function>(handles[k]);
  return kernels;
}

using WayRow = std::tuple<unsigned, unsigned, std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t>;
using CtaRow = std::tuple<unsigned, std::uint32_t, std::uint64_t, std::uint64_t>;

// A file may contain anything. Beyond these bounds, sums would not be exact.
constexpr std::size_t kMostSamples = 256;
constexpr std::uint64_t kMostOfSample = std::uint64_t{1} << 48;  // bytes, and three days in ns

template <class Row>
std::vector<Row> sample_rows(nb::handle samples) {
  auto rows = nb::cast<std::vector<Row>>(samples);
  if (rows.size() > kMostSamples)
    raise({Code::kInvalidArgument, "a calibration has " + std::to_string(kMostSamples) + " samples at most"});
  return rows;
}

void check_sample(bool is_sound) {
  if (!is_sound)
    raise({Code::kInvalidArgument,
           "a calibration sample of copies between a GPU and the host is out of bounds: pass the samples of "
           "kvxfer.gpu.calibration"});
}

bool is_measured(std::uint64_t number) { return number != 0 && number < kMostOfSample; }

gpu::Direction to_direction(unsigned number) {
  if (number > static_cast<unsigned>(gpu::Direction::kOnDevice))
    raise({Code::kInvalidArgument, "a direction is 0, 1 or 2"});
  return static_cast<gpu::Direction>(number);
}

// Samples of CTAs, samples of ways, and why there are none of the latter.
using MeasuredRows = std::tuple<std::vector<CtaRow>, std::vector<WayRow>, std::optional<std::string>>;
MeasuredRows calibrate(int device, const KernelHandles& kernels) {
  const gpu::Driver* driver = take(gpu::Driver::load());
  const gpu::PrimaryContext context = take(gpu::PrimaryContext::retain(*driver, device));
  const gpu::Measured measured = take([&] {
    const WithoutGil released;
    return gpu::calibrate(*driver, context.get(), to_kernels(kernels), {});  // as agents' streams are made
  }());
  MeasuredRows rows;
  auto& [ctas, ways, no_engines] = rows;
  for (const gpu::CtaSample& each : measured.ctas)
    ctas.emplace_back(static_cast<unsigned>(each.direction), each.num_ctas, each.nbytes, each.ns);
  for (const gpu::WaySample& each : measured.ways)
    ways.emplace_back(static_cast<unsigned>(each.direction), static_cast<unsigned>(each.form), each.alignment,
                      each.run_nbytes, each.kernel_ns, each.engine_ns);
  if (!measured.engines.ok()) no_engines = measured.engines.message();
  return rows;
}

std::uint32_t staging_ctas(nb::handle samples) {
  std::vector<gpu::CtaSample> native;
  for (const auto& [direction, num_ctas, nbytes, ns] : sample_rows<CtaRow>(samples)) {
    check_sample(direction < gpu::kNumHostDirections && num_ctas >= 1 && num_ctas <= gpu::kMostStagingCtas &&
                 is_measured(nbytes) && is_measured(ns));
    native.push_back({to_direction(direction), num_ctas, nbytes, ns});
  }
  return gpu::staging_ctas_of(native);
}

// By direction, form and alignment (0: 16 bytes). No value where copy engines are never faster.
using LeastRun = std::tuple<unsigned, unsigned, unsigned, std::optional<std::uint64_t>>;
std::vector<LeastRun> least_runs(nb::handle samples) {
  const gpu::Calibration calibration = to_calibration(samples);
  std::vector<LeastRun> rows;
  for (unsigned direction = 0; direction < gpu::kNumHostDirections; ++direction)
    for (unsigned form = 0; form < gpu::kNumForms; ++form)
      for (unsigned loose = 0; loose < 2; ++loose) {
        const std::uint64_t least = calibration.least_run_nbytes[direction][form][loose];
        rows.emplace_back(direction, form, loose,
                          least == gpu::Calibration::kNever ? std::nullopt : std::optional(least));
      }
  return rows;
}

class PyGpuCopyStream {
 public:
  PyGpuCopyStream(int device, const KernelHandles& kernels, std::uint32_t num_ctas,
                  std::uint32_t tables_nbytes, bool high_priority, nb::handle samples) {
    const gpu::Kernels functions = to_kernels(kernels);
    const gpu::Calibration calibration =
        samples.is_none() ? gpu::Calibration::always() : to_calibration(samples);
    const gpu::Driver* driver = take(gpu::Driver::load());
    context_.emplace(take(gpu::PrimaryContext::retain(*driver, device)));
    stream_ = take(gpu::CopyStream::create(*driver, context_->get(), functions,
                                           {num_ctas, tables_nbytes, high_priority, calibration}));
  }

  std::uint64_t submit(const PyGpuProgram& program, const std::array<std::uint32_t, 2>& layers,
                       const BlockIds& src_ids, const BlockIds& dst_ids, std::uint32_t num_fine,
                       std::uint64_t src_address, std::uint64_t dst_address, unsigned direction) {
    return take(stream().submit(program.get(), part_of(layers, src_ids, num_fine),
                                {src_ids.data(), src_ids.size()}, {dst_ids.data(), dst_ids.size()},
                                gpu::Placement(src_address), gpu::Placement(dst_address),
                                to_direction(direction)));
  }
  bool has_copy_engines() const { return stream().has_copy_engines(); }
  void wait_for(std::uint64_t event) {
    python::check(stream().wait_for(reinterpret_cast<gpu::Event>(event)));
  }
  std::uint64_t done() const { return stream().done(); }
  void check() const { python::check(stream().check()); }
  void synchronize() {
    stream();
    const std::shared_ptr<gpu::CopyStream> waited = stream_;  // another thread may close it meanwhile
    Status status;
    {
      const WithoutGil released;
      status = waited->synchronize();
    }
    python::check(status);
  }
  void set_num_ctas(std::uint32_t num_ctas) { stream().set_num_ctas(num_ctas); }
  std::uint64_t handle() const { return reinterpret_cast<std::uint64_t>(stream().handle()); }
  void close() {
    std::shared_ptr<gpu::CopyStream> closed = std::exchange(stream_, nullptr);
    const WithoutGil released;
    closed.reset();
  }

 private:
  gpu::CopyStream& stream() const {
    if (stream_ == nullptr) raise({Code::kClosed, "this stream is closed"});
    return *stream_;
  }

  std::optional<gpu::PrimaryContext> context_;
  std::shared_ptr<gpu::CopyStream> stream_;  // in that context
};

std::optional<std::string> driver_missing() {
  const auto driver = gpu::Driver::load();
  if (driver.ok()) return std::nullopt;
  return driver.status().message();
}

}  // namespace

gpu::Calibration to_calibration(nb::handle samples) {
  std::vector<gpu::WaySample> native;
  for (const auto& [direction, form, alignment, run_nbytes, kernel_ns, engine_ns] :
       sample_rows<WayRow>(samples)) {
    check_sample(direction < gpu::kNumHostDirections && form < gpu::kNumForms && alignment != 0 &&
                 is_measured(run_nbytes) && is_measured(kernel_ns) && is_measured(engine_ns));
    native.push_back(
        {to_direction(direction), static_cast<gpu::Form>(form), alignment, run_nbytes, kernel_ns, engine_ns});
  }
  return gpu::calibration_of(native);
}

void define_gpu(nb::module_& m) {
  m.def("gpu_driver_missing", &driver_missing);
  m.def("gpu_calibrate", &calibrate, "device"_a, "kernels"_a);
  m.def("gpu_staging_ctas", &staging_ctas, "samples"_a);
  m.def("gpu_least_runs", &least_runs, "samples"_a);
  m.def("gpu_atoms", &atoms, "num_layers"_a, "loops"_a, "conversions"_a, "scales"_a, "units"_a, "layers"_a,
        "src_ids"_a, "dst_ids"_a, "num_fine"_a, "src_address"_a, "dst_address"_a, "bulk"_a);
  nb::class_<PyGpuProgram>(m, "GpuProgram")
      .def(nb::init<std::uint32_t, nb::handle, nb::handle, nb::handle, const Units&>(), "num_layers"_a,
           "loops"_a, "conversions"_a, "scales"_a, "units"_a);
  nb::class_<PyGpuCopyStream>(m, "GpuCopyStream")
      .def(nb::init<int, const KernelHandles&, std::uint32_t, std::uint32_t, bool, nb::handle>(), "device"_a,
           "kernels"_a, "num_ctas"_a, "tables_nbytes"_a, "high_priority"_a, "samples"_a.none())
      .def("submit", &PyGpuCopyStream::submit, "program"_a, "layers"_a, "src_ids"_a, "dst_ids"_a,
           "num_fine"_a, "src_address"_a, "dst_address"_a, "direction"_a)
      .def_prop_ro("has_copy_engines", &PyGpuCopyStream::has_copy_engines)
      .def_prop_ro("handle", &PyGpuCopyStream::handle)
      .def("wait_for", &PyGpuCopyStream::wait_for, "event"_a)
      .def("done", &PyGpuCopyStream::done)
      .def("check", &PyGpuCopyStream::check)
      .def("synchronize", &PyGpuCopyStream::synchronize)
      .def("set_num_ctas", &PyGpuCopyStream::set_num_ctas, "num_ctas"_a)
      .def("close", &PyGpuCopyStream::close);
}

}  // namespace kvxfer::python
