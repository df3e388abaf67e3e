// Make chosen system calls fail: an LD_PRELOAD library, controlled through a shared file.
//
//     cc -shared -fPIC -O1 -o libfail.so fail_system_calls.c -ldl
//     FAIL_CONTROL=control.bin LD_PRELOAD=./libfail.so program …
//
// The file FAIL_CONTROL holds a `Control`. A call is counted if its kind is `kind` and its path contains `path`; call
// number `nth` fails with `error`, and all later ones too if `stays`. Every process that inherits the environment shares
// the file, so that worker processes are covered. `experiments/faults/system_calls.py` writes and reads it.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ALL = -1, OPEN = 1, READ, WRITE, RENAME, FSYNC, MMAP, UNLINK, KINDS };

typedef struct {
  int kind, error, stays, unused;
  long nth;
  atomic_long seen[KINDS], fired;  // seen: calls per kind; `kind` ALL counts every kind
  char path[512];
  char fired_path[512];  // of the first call that failed
} Control;

static Control* control;

__attribute__((constructor)) static void attach(void) {
  const char* name = getenv("FAIL_CONTROL");
  int file = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  void* memory = mmap(NULL, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory != MAP_FAILED) control = memory;
}

static int is_watched(int kind) { return control && (control->kind == kind || control->kind == ALL); }

// Return whether this call must fail; sets errno.
static int fails(int kind, const char* path) {
  if (!is_watched(kind) || !control->path[0] || !strstr(path, control->path)) return 0;
  long number = atomic_fetch_add(&control->seen[kind], 1) + 1;
  if (!control->nth || number < control->nth || (number > control->nth && !control->stays)) return 0;
  if (!atomic_fetch_add(&control->fired, 1)) strncpy(control->fired_path, path, sizeof control->fired_path - 1);
  errno = control->error;
  return 1;
}

static int fails_at(int kind, int directory, const char* name) {
  if (!is_watched(kind) || !name) return 0;
  if (name[0] == '/' || directory == AT_FDCWD) return fails(kind, name);
  char link[64], path[1024];
  snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
  ssize_t size = readlink(link, path, sizeof path - 300);
  if (size < 0) return 0;
  snprintf(path + size, sizeof path - size, "/%.255s", name);
  return fails(kind, path);
}

static int fails_file(int kind, int file) {
  if (!is_watched(kind) || file < 0) return 0;
  int before = errno;
  char link[64], path[1024];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, sizeof path - 1);
  errno = before;
  if (size < 0) return 0;
  path[size] = 0;
  return fails(kind, path);
}

#define NEXT(name) static __typeof__(name)* next; if (!next) next = dlsym(RTLD_NEXT, #name)
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | __O_TMPFILE)) { \
  va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char* path, int flags, ...) { MODE(flags); NEXT(open); return fails_at(OPEN, AT_FDCWD, path) ? -1 : next(path, flags, mode); }
int open64(const char* path, int flags, ...) { MODE(flags); NEXT(open64); return fails_at(OPEN, AT_FDCWD, path) ? -1 : next(path, flags, mode); }
int openat(int at, const char* path, int flags, ...) { MODE(flags); NEXT(openat); return fails_at(OPEN, at, path) ? -1 : next(at, path, flags, mode); }
int openat64(int at, const char* path, int flags, ...) { MODE(flags); NEXT(openat64); return fails_at(OPEN, at, path) ? -1 : next(at, path, flags, mode); }
FILE* fopen(const char* path, const char* mode) { NEXT(fopen); return fails_at(OPEN, AT_FDCWD, path) ? NULL : next(path, mode); }
FILE* fopen64(const char* path, const char* mode) { NEXT(fopen64); return fails_at(OPEN, AT_FDCWD, path) ? NULL : next(path, mode); }
DIR* opendir(const char* path) { NEXT(opendir); return fails_at(OPEN, AT_FDCWD, path) ? NULL : next(path); }

ssize_t read(int f, void* b, size_t n) { NEXT(read); return fails_file(READ, f) ? -1 : next(f, b, n); }
ssize_t pread(int f, void* b, size_t n, off_t o) { NEXT(pread); return fails_file(READ, f) ? -1 : next(f, b, n, o); }
ssize_t pread64(int f, void* b, size_t n, off64_t o) { NEXT(pread64); return fails_file(READ, f) ? -1 : next(f, b, n, o); }
ssize_t readv(int f, const struct iovec* v, int n) { NEXT(readv); return fails_file(READ, f) ? -1 : next(f, v, n); }
ssize_t preadv(int f, const struct iovec* v, int n, off_t o) { NEXT(preadv); return fails_file(READ, f) ? -1 : next(f, v, n, o); }
ssize_t preadv64(int f, const struct iovec* v, int n, off64_t o) { NEXT(preadv64); return fails_file(READ, f) ? -1 : next(f, v, n, o); }
ssize_t preadv2(int f, const struct iovec* v, int n, off_t o, int l) { NEXT(preadv2); return fails_file(READ, f) ? -1 : next(f, v, n, o, l); }
ssize_t preadv64v2(int f, const struct iovec* v, int n, off64_t o, int l) { NEXT(preadv64v2); return fails_file(READ, f) ? -1 : next(f, v, n, o, l); }

ssize_t write(int f, const void* b, size_t n) { NEXT(write); return fails_file(WRITE, f) ? -1 : next(f, b, n); }
ssize_t pwrite(int f, const void* b, size_t n, off_t o) { NEXT(pwrite); return fails_file(WRITE, f) ? -1 : next(f, b, n, o); }
ssize_t pwrite64(int f, const void* b, size_t n, off64_t o) { NEXT(pwrite64); return fails_file(WRITE, f) ? -1 : next(f, b, n, o); }
ssize_t writev(int f, const struct iovec* v, int n) { NEXT(writev); return fails_file(WRITE, f) ? -1 : next(f, v, n); }
ssize_t pwritev(int f, const struct iovec* v, int n, off_t o) { NEXT(pwritev); return fails_file(WRITE, f) ? -1 : next(f, v, n, o); }
ssize_t pwritev64(int f, const struct iovec* v, int n, off64_t o) { NEXT(pwritev64); return fails_file(WRITE, f) ? -1 : next(f, v, n, o); }
ssize_t sendfile(int to, int from, off_t* o, size_t n) { NEXT(sendfile); return fails_file(WRITE, to) ? -1 : next(to, from, o, n); }
ssize_t sendfile64(int to, int from, off64_t* o, size_t n) { NEXT(sendfile64); return fails_file(WRITE, to) ? -1 : next(to, from, o, n); }
ssize_t copy_file_range(int f, off64_t* o, int t, off64_t* p, size_t n, unsigned l) { NEXT(copy_file_range); return fails_file(WRITE, t) ? -1 : next(f, o, t, p, n, l); }
int ftruncate(int f, off_t n) { NEXT(ftruncate); return fails_file(WRITE, f) ? -1 : next(f, n); }
int ftruncate64(int f, off64_t n) { NEXT(ftruncate64); return fails_file(WRITE, f) ? -1 : next(f, n); }
int mkdir(const char* path, mode_t mode) { NEXT(mkdir); return fails_at(WRITE, AT_FDCWD, path) ? -1 : next(path, mode); }
int mkdirat(int at, const char* path, mode_t mode) { NEXT(mkdirat); return fails_at(WRITE, at, path) ? -1 : next(at, path, mode); }

int rename(const char* from, const char* to) { NEXT(rename); return fails_at(RENAME, AT_FDCWD, to) ? -1 : next(from, to); }
int renameat(int a, const char* from, int b, const char* to) { NEXT(renameat); return fails_at(RENAME, b, to) ? -1 : next(a, from, b, to); }
int renameat2(int a, const char* from, int b, const char* to, unsigned l) { NEXT(renameat2); return fails_at(RENAME, b, to) ? -1 : next(a, from, b, to, l); }
int link(const char* from, const char* to) { NEXT(link); return fails_at(RENAME, AT_FDCWD, to) ? -1 : next(from, to); }

int fsync(int f) { NEXT(fsync); return fails_file(FSYNC, f) ? -1 : next(f); }
int fdatasync(int f) { NEXT(fdatasync); return fails_file(FSYNC, f) ? -1 : next(f); }

void* mmap(void* a, size_t n, int p, int l, int f, off_t o) { NEXT(mmap); return fails_file(MMAP, f) ? MAP_FAILED : next(a, n, p, l, f, o); }
void* mmap64(void* a, size_t n, int p, int l, int f, off64_t o) { NEXT(mmap64); return fails_file(MMAP, f) ? MAP_FAILED : next(a, n, p, l, f, o); }

int unlink(const char* path) { NEXT(unlink); return fails_at(UNLINK, AT_FDCWD, path) ? -1 : next(path); }
int unlinkat(int at, const char* path, int l) { NEXT(unlinkat); return fails_at(UNLINK, at, path) ? -1 : next(at, path, l); }
int rmdir(const char* path) { NEXT(rmdir); return fails_at(UNLINK, AT_FDCWD, path) ? -1 : next(path); }
int remove(const char* path) { NEXT(remove); return fails_at(UNLINK, AT_FDCWD, path) ? -1 : next(path); }
