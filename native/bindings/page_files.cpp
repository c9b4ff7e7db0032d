// Pages in files, for the daemon's page store.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "bindings/convert.h"
#include "bindings/gil.h"
#include "store/page_files.h"

namespace kvxfer::python {
namespace {

using nb::literals::operator""_a;
using store::FileTier;
using store::PageDigest;
using store::PageFiles;

const char* name_of(FileTier::Answer answer) {
  switch (answer) {
    case FileTier::Answer::kBegun: return "begun";
    case FileTier::Answer::kThere: return "there";
    case FileTier::Answer::kMissing: return "missing";
    case FileTier::Answer::kNoRoom: return "no-room";
    case FileTier::Answer::kBusy: return "busy";
    case FileTier::Answer::kOut: return "out";
    case FileTier::Answer::kTooSlow: return "too-slow";
  }
  return "";
}

const char* name_of(FileTier::End end) {
  switch (end) {
    case FileTier::End::kDone: return "done";
    case FileTier::End::kGone: return "gone";
    case FileTier::End::kDamaged: return "damaged";
    case FileTier::End::kFailed: return "failed";
    case FileTier::End::kOut: return "out";
  }
  return "";
}

const char* name_of(FileTier::Health health) {
  switch (health) {
    case FileTier::Health::kUp: return "up";
    case FileTier::Health::kReadOnly: return "read-only";
    case FileTier::Health::kOut: return "out";
  }
  return "";
}

PageDigest to_digest(const nb::bytes& bytes) {
  PageDigest digest{};
  if (bytes.size() != digest.size()) raise({Code::kInvalidArgument, "a page's digest has 16 bytes"});
  std::memcpy(digest.data(), bytes.c_str(), digest.size());
  return digest;
}

nb::bytes from_digest(const PageDigest& digest) {
  return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

class PyPageFiles {
 public:
  PyPageFiles(std::string directory, std::uint64_t nbytes, std::vector<std::uint32_t> tenant_of_salt,
              std::uint32_t num_threads, double stalled_s, double retry_s) {
    PageFiles::Options options;
    options.directory = std::move(directory);
    options.nbytes = nbytes;
    options.num_threads = num_threads;
    options.tenant_of_salt = std::move(tenant_of_salt);
    options.stalled_ns = static_cast<std::uint64_t>(stalled_s * 1e9);
    options.retry_ns = static_cast<std::uint64_t>(retry_s * 1e9);
    Result<std::shared_ptr<PageFiles>> opened = [&] {
      const WithoutGil released;
      return PageFiles::open(options);
    }();
    files_ = take(std::move(opened));
  }

  const char* write(const nb::bytes& digest, std::uint32_t salt, std::string_view key, std::uint64_t address,
                    std::size_t nbytes, bool durable, std::uint64_t ticket) {
    return name_of(
        files_->write(to_digest(digest), salt, key, to_page(address, nbytes), durable, to_ticket(ticket)));
  }
  const char* read(const nb::bytes& digest, std::uint64_t address, std::size_t nbytes, double worth_s,
                   std::uint64_t ticket) {
    const auto worth_ns = static_cast<std::uint64_t>(worth_s * 1e9);
    return name_of(files_->read(to_digest(digest), to_page(address, nbytes), worth_ns, to_ticket(ticket)));
  }
  const char* drop(const nb::bytes& digest, std::uint64_t ticket) {
    return name_of(files_->drop(to_digest(digest), to_ticket(ticket)));
  }
  const char* sync(const nb::bytes& digest, std::uint64_t ticket) {
    return name_of(files_->sync(to_digest(digest), to_ticket(ticket)));
  }
  nb::bytes look_up(const nb::bytes& digests, bool counts) {
    if (digests.size() % sizeof(PageDigest) != 0)
      raise({Code::kInvalidArgument, "a page's digest has 16 bytes"});
    std::vector<PageDigest> asked(digests.size() / sizeof(PageDigest));
    if (!asked.empty()) std::memcpy(asked.data(), digests.c_str(), digests.size());
    const std::vector<bool> there = files_->look_up(asked, counts);
    std::string answer(there.begin(), there.end());
    return nb::bytes(answer.data(), answer.size());
  }
  nb::list pages(std::uint32_t segment, std::uint32_t slot, std::optional<std::uint32_t> tenant,
                 std::size_t most) {
    std::vector<PageFiles::Listed> found;
    {
      const WithoutGil released;
      found = files_->list({segment, slot}, tenant, most);
    }
    nb::list shown;
    for (const PageFiles::Listed& each : found) {
      const std::string_view key = each.head.key_text();
      shown.append(nb::make_tuple(each.place.segment, each.place.slot, each.head.salt,
                                  nb::str(key.data(), key.size()), each.head.key_is_cut, each.head.nbytes));
    }
    return shown;
  }
  nb::tuple take_ended() {
    std::vector<FileTier::Ended> ends;
    std::vector<store::SlotIndex::Gone> evicted;
    files_->take(ends, evicted);
    nb::list ended, gone;
    for (const FileTier::Ended& each : ends)
      ended.append(nb::make_tuple(each.ticket, name_of(each.end), each.error));
    for (const store::SlotIndex::Gone& each : evicted)
      gone.append(nb::make_tuple(from_digest(each.digest), each.salt));
    return nb::make_tuple(ended, gone);
  }
  nb::dict figures() {
    const PageFiles::Figures now = files_->figures();
    nb::dict shown;
    const auto put = [&shown](const char* name, auto value) { shown[name] = nb::cast(value); };
    put("state", std::string(name_of(now.health)));
    put("why", now.why);
    put("nbytes", now.nbytes);
    put("used_nbytes", now.used_nbytes);
    put("pages", now.num_pages);
    put("resting", now.num_resting);
    put("running", now.num_running);
    put("waiting", now.num_waiting);
    put("read_p50_s", static_cast<double>(now.read_p50_ns) / 1e9);
    put("read_p99_s", static_cast<double>(now.read_p99_ns) / 1e9);
    put("written_total", now.counts.written);
    put("read_total", now.counts.read);
    put("hits_total", now.counts.hits);
    put("misses_total", now.counts.misses);
    put("evicted_total", now.counts.evicted);
    put("dropped_total", now.counts.dropped);
    put("damaged_total", now.counts.damaged);
    put("read_errors_total", now.counts.read_errors);
    put("write_errors_total", now.counts.write_errors);
    put("no_room_total", now.counts.refused_no_room);
    put("busy_total", now.counts.refused_busy);
    put("out_total", now.counts.refused_out);
    put("too_slow_total", now.counts.refused_slow);
    put("times_out_total", now.counts.times_out);
    return shown;
  }
  bool close(double within_s) {
    const WithoutGil released;
    return files_->close(static_cast<std::uint64_t>(within_s * 1e9));
  }

  int event_fd() const { return files_->event_fd(); }
  bool is_direct() const { return files_->files().is_direct(); }
  std::string why_not_direct() const { return files_->files().why_not_direct(); }
  void set_tenant(std::uint32_t salt, std::uint32_t tenant) { files_->set_tenant(salt, tenant); }
  void set_bound(std::uint32_t tenant, std::uint64_t most) { files_->set_bound(tenant, most); }
  std::uint64_t tenant_nbytes(std::uint32_t tenant) const { return files_->tenant_nbytes(tenant); }
  double read_s(std::uint64_t nbytes) const { return static_cast<double>(files_->read_ns(nbytes)) / 1e9; }

 private:
  static std::span<std::byte> to_page(std::uint64_t address, std::size_t nbytes) {
    if (address % store::kBlockNbytes != 0 || nbytes % store::kBlockNbytes != 0 || nbytes == 0)
      raise({Code::kInvalidArgument, "a page in files begins and ends at a multiple of 4096 bytes"});
    return {reinterpret_cast<std::byte*>(address), nbytes};
  }
  static std::uint64_t to_ticket(std::uint64_t ticket) {
    if (ticket == 0) raise({Code::kInvalidArgument, "tickets begin at 1"});
    return ticket;
  }

  std::shared_ptr<PageFiles> files_;
};

}  // namespace

void define_page_files(nb::module_& m) {
  m.attr("PAGE_FILE_BLOCK_NBYTES") = store::kBlockNbytes;
  nb::class_<PyPageFiles>(m, "PageFiles")
      .def(nb::init<std::string, std::uint64_t, std::vector<std::uint32_t>, std::uint32_t, double, double>(),
           "directory"_a, "nbytes"_a, "tenant_of_salt"_a, "num_threads"_a = 16, "stalled_s"_a = 10.0,
           "retry_s"_a = 5.0)
      .def_prop_ro("event_fd", &PyPageFiles::event_fd)
      .def_prop_ro("is_direct", &PyPageFiles::is_direct)
      .def_prop_ro("why_not_direct", &PyPageFiles::why_not_direct)
      .def("write", &PyPageFiles::write, "digest"_a, "salt"_a, "key"_a, "address"_a, "nbytes"_a, "durable"_a,
           "ticket"_a)
      .def("read", &PyPageFiles::read, "digest"_a, "address"_a, "nbytes"_a, "worth_s"_a, "ticket"_a)
      .def("drop", &PyPageFiles::drop, "digest"_a, "ticket"_a)
      .def("sync", &PyPageFiles::sync, "digest"_a, "ticket"_a)
      .def("look_up", &PyPageFiles::look_up, "digests"_a, "counts"_a)
      .def("pages", &PyPageFiles::pages, "segment"_a, "slot"_a, "tenant"_a.none(), "most"_a)
      .def("take_ended", &PyPageFiles::take_ended)
      .def("set_tenant", &PyPageFiles::set_tenant, "salt"_a, "tenant"_a)
      .def("set_bound", &PyPageFiles::set_bound, "tenant"_a, "most_nbytes"_a)
      .def("tenant_nbytes", &PyPageFiles::tenant_nbytes, "tenant"_a)
      .def("read_s", &PyPageFiles::read_s, "nbytes"_a)
      .def("figures", &PyPageFiles::figures)
      .def("close", &PyPageFiles::close, "within_s"_a);
}

}  // namespace kvxfer::python
