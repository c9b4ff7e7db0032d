// Random bytes where a sandbox forbids the system call. Each case runs in a child, because a filter cannot be
// removed.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <vector>

#include "check.h"
#include "core/runtime.h"
#include "core/system/random.h"

namespace kvxfer {
namespace {

// From now on these system calls of this process fail with EPERM.
bool forbid(const std::vector<unsigned>& numbers) {
  std::vector<sock_filter> filter = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const unsigned number : numbers) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// The result of a child that may not make these calls; 77 if they cannot be forbidden here.
int found_without(const std::vector<unsigned>& numbers, int (*look)()) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::alarm(60);  // ends a call that would wait without end
    ::_exit(forbid(numbers) ? look() : 77);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int fills() {
  std::array<std::byte, 64> first{}, second{};
  return fill_random(first).ok() && fill_random(second).ok() && first != second ? 0 : 1;
}
int says_why() {
  std::array<std::byte, 16> bytes{};
  const Status status = fill_random(bytes);
  return !status.ok() && status.message().find("getrandom") != std::string::npos &&
                 status.message().find("/dev/urandom") != std::string::npos
             ? 0
             : 1;
}
int no_agent_starts() {
  RuntimeOptions options;
  options.name = "sandboxed";
  options.listen = "";
  options.transports = {"tcp"};
  const auto created = Runtime::create(std::move(options));
  return !created.ok() && created.status().message().find("random") != std::string::npos ? 0 : 1;
}

TEST(random_bytes_come_from_the_device_where_the_call_is_forbidden) {
  const int found = found_without({SYS_getrandom}, fills);
  if (found == 77) return;
  CHECK_EQ(found, 0);
}

TEST(without_any_random_bytes_an_error_says_so_and_no_agent_starts) {
  const int found = found_without({SYS_getrandom, SYS_openat, SYS_open}, says_why);
  if (found == 77) return;
  CHECK_EQ(found, 0);
  CHECK_EQ(found_without({SYS_getrandom, SYS_openat, SYS_open}, no_agent_starts), 0);
}

}  // namespace
}  // namespace kvxfer
