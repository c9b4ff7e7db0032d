/* A plain loop of UCX's gets between two processes of this host, and nothing of ours: the limit of transport ucx. Reads
 * pages of one size in random order, so many at a time, and looks at every byte.
 *
 *   ucx_loop TRANSPORTS PAGE_NBYTES NUM_PAGES WINDOW REPEATS
 *
 * prints the nanoseconds of each repeat, a line each. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include "loop.h"

#define MOST_NBYTES 4096

static void check(ucs_status_t status, const char *what) {
  if (status == UCS_OK) return;
  fprintf(stderr, "ucx_loop: %s: %s\n", what, ucs_status_string(status));
  exit(1);
}
#define CHECK(call) check((call), #call)

struct introduction {
  size_t address_nbytes, key_nbytes;
  uint64_t memory;
  char address[MOST_NBYTES], key[MOST_NBYTES];
};

static size_t num_done;

static void done(void *request, ucs_status_t status, void *unused) {
  (void)unused;
  check(status, "a get");
  ++num_done;
  ucp_request_free(request);
}

static void send_all(int to, const void *bytes, size_t nbytes) {
  for (size_t at = 0; at < nbytes;) {
    const ssize_t sent = write(to, (const char *)bytes + at, nbytes - at);
    if (sent <= 0) exit(1);
    at += (size_t)sent;
  }
}

static void receive_all(int from, void *bytes, size_t nbytes) {
  for (size_t at = 0; at < nbytes;) {
    const ssize_t received = read(from, (char *)bytes + at, nbytes - at);
    if (received <= 0) exit(1);
    at += (size_t)received;
  }
}

int main(int argc, char **argv) {
  if (argc != 6) return 2;
  const size_t page = strtoull(argv[2], NULL, 10), count = strtoull(argv[3], NULL, 10), nbytes = page * count;
  const size_t window = strtoull(argv[4], NULL, 10);
  int line[2];
  if (pipe(line) != 0) return 1;
  const pid_t source = fork();
  if (source == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  char *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  madvise(memory, nbytes, MADV_HUGEPAGE);
  memset(memory, source == 0 ? 7 : 0, nbytes);

  ucp_config_t *config;
  CHECK(ucp_config_read(NULL, NULL, &config));
  if (argv[1][0] != '\0') CHECK(ucp_config_modify(config, "TLS", argv[1]));
  const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA};
  ucp_context_h context;
  CHECK(ucp_init(&params, config, &context));
  ucp_config_release(config);
  const ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                             .thread_mode = UCS_THREAD_MODE_SINGLE};
  ucp_worker_h worker;
  CHECK(ucp_worker_create(context, &worker_params, &worker));
  const ucp_mem_map_params_t map_params = {
      .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
      .address = memory,
      .length = nbytes};
  ucp_mem_h mapped;
  CHECK(ucp_mem_map(context, &map_params, &mapped));

  static struct introduction told;
  if (source == 0) {
    ucp_address_t *address;
    void *key;
    CHECK(ucp_worker_get_address(worker, &address, &told.address_nbytes));
    CHECK(ucp_rkey_pack(context, mapped, &key, &told.key_nbytes));
    if (told.address_nbytes > MOST_NBYTES || told.key_nbytes > MOST_NBYTES) return 1;
    memcpy(told.address, address, told.address_nbytes);
    memcpy(told.key, key, told.key_nbytes);
    told.memory = (uint64_t)memory;
    send_all(line[1], &told, sizeof told);
    for (;;)
      if (ucp_worker_progress(worker) == 0) sched_yield();
  }
  close(line[1]);
  receive_all(line[0], &told, sizeof told);
  const ucp_ep_params_t endpoint_params = {
      .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
      .address = (const ucp_address_t *)told.address,
      .err_mode = UCP_ERR_HANDLING_MODE_PEER};
  ucp_ep_h endpoint;
  CHECK(ucp_ep_create(worker, &endpoint_params, &endpoint));
  ucp_rkey_h key;
  CHECK(ucp_ep_rkey_unpack(endpoint, told.key, &key));

  uint32_t *order = malloc(count * sizeof *order);
  shuffle(order, count);
  const ucp_request_param_t get = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_MEMH,
                                   .cb.send = done,
                                   .memh = mapped};
  for (long repeat = strtol(argv[5], NULL, 10); repeat > 0; --repeat) {
    memset(memory, 0, nbytes);
    num_done = 0;
    const uint64_t start = now_ns();
    for (size_t posted = 0; num_done < count;) {
      while (posted < count && posted - num_done < window) {
        const size_t at = order[posted] * page;
        void *const request = ucp_get_nbx(endpoint, memory + at, page, told.memory + at, key, &get);
        if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "ucp_get_nbx");
        if (request == NULL) ++num_done;
        ++posted;
      }
      if (ucp_worker_progress(worker) == 0) sched_yield();
    }
    printf("%llu\n", (unsigned long long)(now_ns() - start));
    for (size_t i = 0; i < nbytes; ++i)
      if (memory[i] != 7) return fprintf(stderr, "ucx_loop: byte %zu is wrong\n", i), 1;
  }
  fflush(stdout);
  kill(source, SIGKILL);
  waitpid(source, NULL, 0);
  _exit(0); /* its peer is gone: UCX would wait for it */
}
