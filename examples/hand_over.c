/* Hands memory to the node's daemon: a program without an agent, in about a hundred lines.
 *
 *   cc -Wall -Wextra -Werror -o hand_over examples/hand_over.c
 *   ./hand_over /run/kvxfer/memory.sock my-cache
 *
 * It makes 64 pages of 64 KiB, fills page i with bytes i, hands them over, and prints the daemon's answer: one
 * line of JSON with the region's name, the daemon's agent and its address. From then on the daemon moves pages
 * of that region, as /v1/transfers asks for. When standard input ends the memory is taken back, and the first
 * byte of each page is printed. When the program dies the daemon takes the region away by itself.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { kPages = 64, kPageBytes = 64 * 1024 };

static void die(const char* what) {
  perror(what);
  exit(1);
}

/* Memory that can be shared, and that cannot shrink under the daemon's feet: it refuses what can. */
static unsigned char* make_memory(int* fd) {
  const size_t nbytes = (size_t)kPages * kPageBytes;
  *fd = memfd_create("hand-over", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (*fd < 0 || ftruncate(*fd, (off_t)nbytes) < 0) die("memfd_create");
  if (fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0) die("F_ADD_SEALS");
  unsigned char* memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
  if (memory == MAP_FAILED) die("mmap");
  for (int page = 0; page < kPages; ++page) memset(memory + (size_t)page * kPageBytes, page, kPageBytes);
  return memory;
}

static int connect_to(const char* path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof address.sun_path) die("the socket's path is too long");
  memcpy(address.sun_path, path, strlen(path));
  const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection < 0 || connect(connection, (struct sockaddr*)&address, sizeof address) < 0) die(path);
  return connection;
}

/* One line, with the descriptor beside it. */
static void send_line(int connection, const char* line, int fd) {
  char space[CMSG_SPACE(sizeof fd)] = {0};
  struct iovec text = {(void*)line, strlen(line)};
  struct msghdr message = {
      .msg_iov = &text, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
  struct cmsghdr* control = CMSG_FIRSTHDR(&message);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof fd);
  memcpy(CMSG_DATA(control), &fd, sizeof fd);
  const ssize_t sent = sendmsg(connection, &message, MSG_NOSIGNAL);
  if (sent < 0 && errno != EPIPE)
    die("sendmsg"); /* EPIPE: the daemon refused at once, and show_line prints why. A short line goes whole. */
}

/* Copies one line that the daemon says to standard output; returns whether it is there, and no error. */
static int show_line(int connection) {
  char line[4096] = {0};
  size_t nbytes = 0;
  while (nbytes < sizeof line - 1 && read(connection, line + nbytes, 1) == 1 && line[nbytes++] != '\n') {}
  fputs(line, stdout);
  fflush(stdout);
  return nbytes > 0 && strncmp(line, "{\"error\"", 8) != 0;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: %s /path/of/memory.sock NAME\n", argv[0]);
    return 2;
  }
  int fd = -1;
  const unsigned char* memory = make_memory(&fd);
  /* A layout (kvxfer/LAYOUTS.md): pages of opaque bytes, one behind the other. */
  char line[1024];
  const int length =
      snprintf(line, sizeof line,
               "{\"name\": \"%s\", \"layout\": {\"kvxfer_layout\": 2, \"dtype\": \"uint8\", \"itemsize\": 1, "
               "\"num_blocks\": %d, \"block_tokens\": 1, \"num_kv\": 1, \"head_dim\": %d, "
               "\"first_layer\": 0, \"num_layers\": 1, \"total_layers\": 1, "
               "\"first_head\": 0, \"num_heads\": 1, \"total_heads\": 1, "
               "\"block_stride\": %d, \"token_stride\": 0, \"head_stride\": 0, \"dim_stride\": 1}}\n",
               argv[2], kPages, kPageBytes, kPageBytes);
  if (length < 0 || (size_t)length >= sizeof line) die("the name is too long");

  const int connection = connect_to(argv[1]);
  send_line(connection, line, fd);
  if (!show_line(connection)) return 1;

  char byte;
  while (read(STDIN_FILENO, &byte, 1) > 0) {}
  /* Taken back: when the daemon has said so it touches no byte of it any more. */
  shutdown(connection, SHUT_WR);
  show_line(connection);
  close(connection);
  for (int page = 0; page < kPages; ++page) printf("%d ", memory[(size_t)page * kPageBytes]);
  putchar('\n');
  return 0;
}
