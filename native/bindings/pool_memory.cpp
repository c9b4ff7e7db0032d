// Memory of pools.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "bindings/convert.h"
#include "bindings/gil.h"
#include "core/system/pool_memory.h"

namespace kvxfer::python {
namespace {

using nb::literals::operator""_a;

class PyPoolMemory {
 public:
  PyPoolMemory(std::size_t nbytes, nb::handle its_name, bool huge_pages, int numa_node) {
    const std::string name = to_text(its_name, "name");
    Result<std::shared_ptr<PoolMemory>> created = [&] {
      const WithoutGil released;
      return PoolMemory::create({nbytes, name, huge_pages, numa_node});
    }();
    memory_ = take(std::move(created));
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory_->data()); }
  std::size_t nbytes() const { return memory_->nbytes(); }
  std::string_view page_kind() const { return memory_->page_kind(); }
  nb::tuple seals() const { return nb::tuple(nb::cast(memory_->seals())); }
  nb::object array() const {
    auto* owned = new std::shared_ptr<PoolMemory>(memory_);
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::shared_ptr<PoolMemory>*>(p); });
    return nb::cast(
        nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(memory_->data(), {memory_->nbytes()}, owner));
  }

 private:
  std::shared_ptr<PoolMemory> memory_;
};

}  // namespace

void define_pool_memory(nb::module_& m) {
  nb::class_<PyPoolMemory>(m, "PoolMemory")
      .def(nb::init<std::size_t, nb::handle, bool, int>(), "nbytes"_a, "name"_a, "huge_pages"_a = true,
           "numa_node"_a = -1)
      .def_prop_ro("address", &PyPoolMemory::address)
      .def_prop_ro("nbytes", &PyPoolMemory::nbytes)
      .def_prop_ro("page_kind", &PyPoolMemory::page_kind)
      .def_prop_ro("seals", &PyPoolMemory::seals)
      .def("array", &PyPoolMemory::array);
}

}  // namespace kvxfer::python
