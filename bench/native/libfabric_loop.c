/* A plain loop of libfabric's reads between two processes of this host, and nothing of ours: the limit of transport
 * libfabric. Reads pages of one size in random order, so many at a time, and looks at every byte.
 *
 *   libfabric_loop PROVIDER ADDRESS PAGE_NBYTES NUM_PAGES WINDOW REPEATS
 *
 * prints the nanoseconds of each repeat, a line each. Both ends poll, which is the faster. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "loop.h"

#define MOST_WINDOW 4096
#define NAME_NBYTES 256

static void check(long result, const char *what) {
  if (result >= 0) return;
  fprintf(stderr, "libfabric_loop: %s: %s\n", what, fi_strerror((int)-result));
  exit(1);
}
#define CHECK(call) check((long)(call), #call)

struct end {
  struct fi_info *info;
  struct fid_fabric *fabric;
  struct fid_domain *domain;
  struct fid_ep *endpoint;
  struct fid_cq *queue;
  struct fid_av *addresses;
  struct fid_mr *region;
};

struct introduction {
  size_t name_nbytes;
  char name[NAME_NBYTES];
  uint64_t address, key;
};

static struct introduction open_end(struct end *end, const char *provider, const char *address, char *memory,
                                    size_t nbytes) {
  struct fi_info *hints = fi_allocinfo();
  hints->caps = FI_RMA | FI_READ | FI_REMOTE_READ;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->control_progress = hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->fabric_attr->prov_name = strdup(provider);
  CHECK(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &end->info));
  if (address[0] != '\0') {
    struct sockaddr_in *source = calloc(1, sizeof *source);
    source->sin_family = AF_INET;
    inet_pton(AF_INET, address, &source->sin_addr);
    end->info->src_addr = source;
    end->info->src_addrlen = sizeof *source;
  }
  CHECK(fi_fabric(end->info->fabric_attr, &end->fabric, NULL));
  CHECK(fi_domain(end->fabric, end->info, &end->domain, NULL));
  CHECK(fi_endpoint(end->domain, end->info, &end->endpoint, NULL));
  struct fi_cq_attr queue = {.format = FI_CQ_FORMAT_CONTEXT, .size = MOST_WINDOW};
  CHECK(fi_cq_open(end->domain, &queue, &end->queue, NULL));
  struct fi_av_attr addresses = {.type = FI_AV_TABLE, .count = 1};
  CHECK(fi_av_open(end->domain, &addresses, &end->addresses, NULL));
  CHECK(fi_ep_bind(end->endpoint, &end->addresses->fid, 0));
  CHECK(fi_ep_bind(end->endpoint, &end->queue->fid, FI_TRANSMIT | FI_RECV));
  CHECK(fi_enable(end->endpoint));
  CHECK(fi_mr_reg(end->domain, memory, nbytes, FI_READ | FI_REMOTE_READ, 0, 0x5eed, 0, &end->region, NULL));
  struct introduction own = {.name_nbytes = NAME_NBYTES, .key = fi_mr_key(end->region)};
  if (end->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) own.address = (uint64_t)memory;
  CHECK(fi_getname(&end->endpoint->fid, own.name, &own.name_nbytes));
  return own;
}

/* Serves what is read until it is told to stop, by its parent's death at the latest. */
static void serve(const struct end *end) {
  struct fi_cq_entry entry;
  for (;;)
    if (fi_cq_read(end->queue, &entry, 1) <= 0) sched_yield();
}

int main(int argc, char **argv) {
  if (argc != 7) return 2;
  const size_t page = strtoull(argv[3], NULL, 10), count = strtoull(argv[4], NULL, 10), nbytes = page * count;
  size_t window = strtoull(argv[5], NULL, 10);
  if (window > MOST_WINDOW) window = MOST_WINDOW;
  int line[2];
  if (pipe(line) != 0) return 1;
  const pid_t source = fork();
  if (source == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  char *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  madvise(memory, nbytes, MADV_HUGEPAGE);
  memset(memory, source == 0 ? 7 : 0, nbytes);
  struct end end;
  const struct introduction own = open_end(&end, argv[1], argv[2], memory, nbytes);
  if (source == 0) {
    if (write(line[1], &own, sizeof own) != sizeof own) return 1;
    serve(&end);
  }
  close(line[1]);
  struct introduction theirs;
  fi_addr_t peer;
  if (read(line[0], &theirs, sizeof theirs) != sizeof theirs) return 1;
  CHECK(fi_av_insert(end.addresses, theirs.name, 1, &peer, 0, NULL) - 1);

  uint32_t *order = malloc(count * sizeof *order);
  shuffle(order, count);
  struct fi_context2 *contexts = calloc(window, sizeof *contexts);
  size_t *spare = malloc(window * sizeof *spare), num_spare = window;
  for (size_t i = 0; i < window; ++i) spare[i] = i;
  for (long repeat = strtol(argv[6], NULL, 10); repeat > 0; --repeat) {
    memset(memory, 0, nbytes);
    const uint64_t start = now_ns();
    for (size_t posted = 0, landed = 0; landed < count;) {
      while (num_spare != 0 && posted < count) {
        const size_t at = order[posted] * page;
        const ssize_t result =
            fi_read(end.endpoint, memory + at, page, fi_mr_desc(end.region), peer, theirs.address + at, theirs.key,
                    &contexts[spare[num_spare - 1]]);
        if (result == -FI_EAGAIN) break;
        CHECK(result);
        --num_spare, ++posted;
      }
      struct fi_cq_entry entries[64];
      const ssize_t found = fi_cq_read(end.queue, entries, 64);
      if (found != -FI_EAGAIN) CHECK(found);
      if (found < 0) sched_yield();
      for (ssize_t i = 0; i < found; ++i)
        spare[num_spare++] = (size_t)((struct fi_context2 *)entries[i].op_context - contexts);
      if (found > 0) landed += (size_t)found;
    }
    printf("%llu\n", (unsigned long long)(now_ns() - start));
    for (size_t i = 0; i < nbytes; ++i)
      if (memory[i] != 7) return fprintf(stderr, "libfabric_loop: byte %zu is wrong\n", i), 1;
  }
  kill(source, SIGKILL);
  waitpid(source, NULL, 0);
  return 0;
}
