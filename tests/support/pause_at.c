// Stops a program at a file operation for as long as a test likes, so that a test need not hope for the right moment.
// LD_PRELOAD puts it into every process of a job.
//
// INVAR_PAUSES names the moments, one a line: FOLDER<tab>CALL<tab>PATTERN. CALL is write, fsync or rename. PATTERN is
// of the file's path, of a rename's old one, as in fnmatch(3). The test talks through files in FOLDER:
//   hold       a call that fits waits before it does anything, as long as this file is there. A write fits if its bytes
//              contain the text of this file, which may change at any time.
//   reached    appears when a call waits
//   signalled  appears when a signal was handled by the thread that waits
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { kPathBytes = 4096, kTextBytes = 256 };

// What is called, on which path, with which bytes; of a call that writes none, data is null.
struct call {
  const char* name;
  const char* path;
  const void* data;
  size_t size;
};

static int has_text(const struct call* call, const char* text, size_t length) {
  return call->data == NULL || memmem(call->data, call->size, text, length) != NULL;
}

// Whether FOLDER/hold is there and its text is in what the call writes.
static int is_held(const char* folder, const struct call* call) {
  char path[kPathBytes], text[kTextBytes];
  snprintf(path, sizeof path, "%s/hold", folder);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t length = read(file, text, sizeof text);
  close(file);
  return length >= 0 && has_text(call, text, (size_t)length);
}

static void mark(const char* folder, const char* name) {
  char path[kPathBytes];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  const int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file >= 0) close(file);
}

static void wait_while_held(const char* folder, const struct call* call) {
  const struct timespec moment = {0, 2 * 1000 * 1000};
  if (!is_held(folder, call)) return;
  mark(folder, "reached");
  while (is_held(folder, call)) {
    if (nanosleep(&moment, NULL) != 0 && errno == EINTR) mark(folder, "signalled");
  }
}

static void pause_at(struct call call) {
  const char* pauses = getenv("INVAR_PAUSES");
  if (pauses == NULL) return;
  const int error = errno;
  char line[kPathBytes];
  for (const char* next = pauses; *next != 0;) {
    const size_t length = strcspn(next, "\n");
    snprintf(line, sizeof line, "%.*s", (int)length, next);
    next += length + (next[length] == '\n');
    char* rest = line;
    const char* folder = strsep(&rest, "\t");
    const char* name = strsep(&rest, "\t");
    if (rest == NULL || strcmp(name, call.name) != 0 || fnmatch(rest, call.path, 0) != 0) continue;
    wait_while_held(folder, &call);
  }
  errno = error;
}

static void pause_at_file(const char* name, int file, const void* data, size_t size) {
  if (getenv("INVAR_PAUSES") == NULL) return;
  const int error = errno;
  char link[64], path[kPathBytes];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length > 0) {
    path[length] = 0;
    pause_at((struct call){name, path, data, size});
  }
  errno = error;
}

// The function that this one stands before.
#define NEXT(function) ((__typeof__(&function))dlsym(RTLD_NEXT, #function))

ssize_t write(int file, const void* data, size_t size) {
  pause_at_file("write", file, data, size);
  return NEXT(write)(file, data, size);
}

ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  pause_at_file("write", file, data, size);
  return NEXT(pwrite)(file, data, size, offset);
}

ssize_t pwrite64(int file, const void* data, size_t size, off64_t offset) {
  pause_at_file("write", file, data, size);
  return NEXT(pwrite64)(file, data, size, offset);
}

// Of the bytes only the first piece is looked at.
ssize_t writev(int file, const struct iovec* pieces, int count) {
  if (count > 0) pause_at_file("write", file, pieces[0].iov_base, pieces[0].iov_len);
  return NEXT(writev)(file, pieces, count);
}

size_t fwrite(const void* data, size_t size, size_t count, FILE* file) {
  pause_at_file("write", fileno(file), data, size * count);
  return NEXT(fwrite)(data, size, count, file);
}

int fsync(int file) {
  pause_at_file("fsync", file, NULL, 0);
  return NEXT(fsync)(file);
}

int rename(const char* from, const char* to) {
  pause_at((struct call){"rename", from, NULL, 0});
  return NEXT(rename)(from, to);
}
