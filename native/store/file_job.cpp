#include "store/file_job.h"

namespace kvxfer::store {
namespace {

int erase_head(const FileJob& job, Files& files) {
  const SlotHeadBytes none{};
  return files.write_head(job.place.segment, head_offset(job.place.slot), none);
}

int write(FileJob& job, Files& files) {
  // Without it a restart in the middle would find a damaged page where there is none.
  if (const int error = erase_head(job, files)) return error;
  job.head.page_crc = crc_of_page(job.head.digest, job.page);
  const std::uint64_t offset = std::uint64_t{job.place.slot} * job.page.size();
  if (const int error = files.write_page(job.place.segment, offset, job.page)) return error;
  return files.write_head(job.place.segment, head_offset(job.place.slot), encode(job.head));
}

int read(FileJob& job, Files& files) {
  const std::uint64_t offset = std::uint64_t{job.place.slot} * job.page.size();
  if (const int error = files.read_page(job.place.segment, offset, job.page)) return error;
  job.is_whole = crc_of_page(job.head.digest, job.page) == job.head.page_crc;
  return 0;
}

int cut(FileJob& job, Files& files) {
  if (const int error = files.make(job.place.segment)) return error;
  return files.write_head(job.place.segment, 0, encode(job.segment));
}

int run(FileJob& job, Files& files) {
  switch (job.kind) {
    case FileJob::Kind::kCut: return cut(job, files);
    case FileJob::Kind::kWrite: return write(job, files);
    case FileJob::Kind::kRead: return read(job, files);
    case FileJob::Kind::kErase: return erase_head(job, files);
    case FileJob::Kind::kSync: return 0;
    case FileJob::Kind::kProbe: return files.probe();
  }
  return 0;
}

}  // namespace

void perform(FileJob& job, Files& files) {
  job.error = run(job, files);
  if (job.error == 0 && job.durable) job.error = files.sync(job.place.segment);
}

}  // namespace kvxfer::store
