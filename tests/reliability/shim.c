/* Counts the operations that change a directory, and stops the process at one of them.
 *
 * Preloaded into a whole process (LD_PRELOAD), so that Python, torch's C++ writers and every library go through it.
 * Inert until shim_arm() names the directory. Built by build.py; the counts are compared with strace's in
 * test_shim.py.
 *
 * Operations: open for writing or creating, write (and its kin), close and fsync of a file that is open below the
 * directory, truncate, rename, unlink, link, mkdir, rmdir. Reading is none.
 *
 * At operation number `at`, counted from 1:
 *   mode 1  SIGKILL in its place
 *   mode 2  only writes are counted: half of it, then SIGKILL
 *   mode 3  it, and every one after it that would take space, fails with `error` (half of a write is still done)
 *   mode 4  it, and every one after it that would change a name or create a file, fails with `error`
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 4096
enum { COUNT, KILL, HALF, FULL, READ_ONLY };
enum { OPEN = 1, WRITE, CLOSE, SYNC, TRUNCATE, RENAME, UNLINK, LINK, MKDIR, RMDIR };

static char directory[PATH_MAX];
static size_t length;
static long at, mode, error_number;
static int log_descriptor = -1;
static atomic_long done, writes; /* operations so far, and writes among them */
static atomic_int failing;       /* this operation is the first of those that fail */
static char tracked[FILES];

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

void shim_arm(const char *path, long at_, long mode_, long error_, int log_) {
    strncpy(directory, path, sizeof directory - 1);
    length = strlen(directory);
    at = at_, mode = mode_, error_number = error_, log_descriptor = log_;
    memset(tracked, 0, sizeof tracked);
    done = writes = 0;
}

long shim_disarm(void) {
    length = 0;
    return done;
}

static int below(const char *path) {
    if (!length || !path) return 0;
    char absolute[PATH_MAX];
    if (path[0] != '/') {
        if (!getcwd(absolute, sizeof absolute)) return 0;
        size_t used = strlen(absolute);
        snprintf(absolute + used, sizeof absolute - used, "/%s", path);
        path = absolute;
    }
    return !strncmp(path, directory, length) && (path[length] == '/' || !path[length]);
}

static int below_at(int dir, const char *path) {
    if (!length || !path) return 0;
    if (dir == AT_FDCWD || path[0] == '/') return below(path);
    char link[64], base[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t n = readlink(link, base, sizeof base - 1);
    if (n < 0) return 0;
    base[n] = 0;
    return below(base);
}

static int follows(int fd) { return length && fd >= 0 && fd < FILES && tracked[fd]; }

static void say(long n, int kind, const char *path, int fd) {
    static const char *names[] = {"", "open", "write", "close", "fsync", "truncate", "rename", "unlink", "link",
                                  "mkdir", "rmdir"};
    if (log_descriptor < 0) return;
    char line[PATH_MAX + 64], of[PATH_MAX], link[64];
    if (!path) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(link, of, sizeof of - 1);
        of[size < 0 ? 0 : size] = 0;
        path = of;
    }
    if (!strncmp(path, directory, strlen(directory))) path += strlen(directory);
    int size = snprintf(line, sizeof line, "%ld %s %s\n", n, names[kind], path);
    syscall(SYS_write, log_descriptor, line, size);
}

static void die(void) {
    if (log_descriptor >= 0) syscall(SYS_write, log_descriptor, "stopped\n", 8);
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Before an operation. Returns 0: go on. 1: do it (half), then die. 2: fail with errno. */
static int step(int kind, const char *path, int fd) {
    long n = ++done;
    say(n, kind, path, fd);
    failing = 0;
    if (mode == HALF) return kind == WRITE && ++writes == at;
    if (n < at || !mode) return 0;
    if (mode == KILL) die();
    int takes_space = kind == OPEN || kind == WRITE || kind == MKDIR || kind == SYNC;
    int changes_names = kind == OPEN || kind == RENAME || kind == UNLINK || kind == LINK || kind == MKDIR ||
                        kind == RMDIR || kind == TRUNCATE;
    if ((mode == FULL && takes_space) || (mode == READ_ONLY && changes_names)) {
        failing = n == at;
        errno = error_number;
        return 2;
    }
    return 0;
}

#define CALL(kind, path, fd, failed, expression) \
    do { \
        int what_ = step(kind, path, fd); \
        if (what_ == 2) return failed; \
        __auto_type result_ = expression; \
        if (what_ == 1) die(); \
        return result_; \
    } while (0)

static int for_writing(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)); }

static int remember(int fd) {
    if (fd >= 0 && fd < FILES) tracked[fd] = 1;
    return fd;
}

static int open_below(int dir, const char *path, int flags, mode_t bits) {
    if (!for_writing(flags)) /* a directory, to be forced to the disk */
        return flags & O_DIRECTORY ? remember(syscall(SYS_openat, dir, path, flags, bits))
                                   : (int)syscall(SYS_openat, dir, path, flags, bits);
    CALL(OPEN, path, -1, -1, remember(syscall(SYS_openat, dir, path, flags, bits)));
}

#define OPEN_LIKE(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (below(path)) return open_below(AT_FDCWD, path, flags, bits); \
        REAL(int, #name, const char *, int, ...); \
        return real(path, flags, bits); \
    }
OPEN_LIKE(open)
OPEN_LIKE(open64)

#define OPENAT_LIKE(name) \
    int name(int dir, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (below_at(dir, path)) return open_below(dir, path, flags, bits); \
        REAL(int, #name, int, const char *, int, ...); \
        return real(dir, path, flags, bits); \
    }
OPENAT_LIKE(openat)
OPENAT_LIKE(openat64)

static FILE *track_stream(FILE *file) {
    if (file) remember(fileno(file));
    return file;
}

#define FOPEN_LIKE(name) \
    FILE *name(const char *path, const char *how) { \
        REAL(FILE *, #name, const char *, const char *); \
        if (!below(path) || (how[0] == 'r' && !strchr(how, '+'))) return real(path, how); \
        CALL(OPEN, path, -1, NULL, track_stream(real(path, how))); \
    }
FOPEN_LIKE(fopen)
FOPEN_LIKE(fopen64)

/* How much of a write is done: half where the process dies in it or the disk is full, if there is a half. */
static ssize_t write_part(int fd, const void *data, size_t size, off64_t where, int positioned) {
    return positioned ? syscall(SYS_pwrite64, fd, data, size, where) : syscall(SYS_write, fd, data, size);
}

static ssize_t write_below(int fd, const void *data, size_t size, off64_t where, int positioned) {
    int what = step(WRITE, NULL, fd);
    if (!what) return write_part(fd, data, size, where, positioned);
    if (what == 1) {
        write_part(fd, data, size / 2, where, positioned);
        die();
    }
    /* The write that fills the disk is short; the next one, which comes for the rest, fails. */
    return failing && size > 1 ? write_part(fd, data, size / 2, where, positioned) : -1;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (follows(fd)) return write_below(fd, data, size, 0, 0);
    return syscall(SYS_write, fd, data, size);
}

#define PWRITE_LIKE(name) \
    ssize_t name(int fd, const void *data, size_t size, off64_t where) { \
        if (follows(fd)) return write_below(fd, data, size, where, 1); \
        return syscall(SYS_pwrite64, fd, data, size, where); \
    }
PWRITE_LIKE(pwrite)
PWRITE_LIKE(pwrite64)

ssize_t writev(int fd, const struct iovec *parts, int number) {
    if (!follows(fd)) return syscall(SYS_writev, fd, parts, number);
    /* One plain write of the first part that is not empty: short writes are allowed, and the caller comes again. */
    int i = 0;
    while (i < number - 1 && !parts[i].iov_len) i++;
    if (mode == COUNT || mode == KILL) CALL(WRITE, NULL, fd, -1, syscall(SYS_writev, fd, parts, number));
    return write_below(fd, parts[i].iov_base, parts[i].iov_len, 0, 0);
}

size_t fwrite(const void *data, size_t size, size_t number, FILE *file) {
    REAL(size_t, "fwrite", const void *, size_t, size_t, FILE *);
    if (!length || !follows(fileno(file))) return real(data, size, number, file);
    int what = step(WRITE, NULL, fileno(file));
    if (what == 2) return 0;
    size_t written = real(data, size, what ? number / 2 : number, file);
    fflush(file);
    if (what == 1) die();
    return written;
}

#define SENDFILE_LIKE(name) \
    ssize_t name(int to, int from, off64_t *where, size_t size) { \
        if (!follows(to)) return syscall(SYS_sendfile, to, from, where, size); \
        int what = step(WRITE, NULL, to); \
        if (what == 2) return -1; \
        if (what == 1 && size > 256) size = 256; /* callers ask for as much as there may be */ \
        ssize_t sent = syscall(SYS_sendfile, to, from, where, size); \
        if (what == 1) die(); \
        return sent; \
    }
SENDFILE_LIKE(sendfile)
SENDFILE_LIKE(sendfile64)

ssize_t copy_file_range(int from, off64_t *there, int to, off64_t *here, size_t size, unsigned flags) {
    if (follows(to)) CALL(WRITE, NULL, to, -1, syscall(SYS_copy_file_range, from, there, to, here, size, flags));
    return syscall(SYS_copy_file_range, from, there, to, here, size, flags);
}

int close(int fd) {
    if (follows(fd)) {
        tracked[fd] = 0;
        CALL(CLOSE, NULL, fd, -1, syscall(SYS_close, fd));
    }
    return syscall(SYS_close, fd);
}

int fclose(FILE *file) {
    REAL(int, "fclose", FILE *);
    int fd = length ? fileno(file) : -1;
    if (follows(fd)) {
        tracked[fd] = 0;
        CALL(CLOSE, NULL, fd, EOF, real(file));
    }
    return real(file);
}

int fsync(int fd) {
    if (follows(fd)) CALL(SYNC, NULL, fd, -1, syscall(SYS_fsync, fd));
    return syscall(SYS_fsync, fd);
}

int fdatasync(int fd) {
    if (follows(fd)) CALL(SYNC, NULL, fd, -1, syscall(SYS_fdatasync, fd));
    return syscall(SYS_fdatasync, fd);
}

#define FTRUNCATE_LIKE(name) \
    int name(int fd, off64_t size) { \
        if (follows(fd)) CALL(TRUNCATE, NULL, fd, -1, syscall(SYS_ftruncate, fd, size)); \
        return syscall(SYS_ftruncate, fd, size); \
    }
FTRUNCATE_LIKE(ftruncate)
FTRUNCATE_LIKE(ftruncate64)

int truncate(const char *path, off_t size) {
    if (below(path)) CALL(TRUNCATE, path, -1, -1, syscall(SYS_truncate, path, size));
    return syscall(SYS_truncate, path, size);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    if (below_at(to, new)) CALL(RENAME, new, -1, -1, syscall(SYS_renameat2, from, old, to, new, flags));
    return syscall(SYS_renameat2, from, old, to, new, flags);
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int dir, const char *path, int flags) {
    if (below_at(dir, path))
        CALL(flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, -1, -1, syscall(SYS_unlinkat, dir, path, flags));
    return syscall(SYS_unlinkat, dir, path, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int dir, const char *path, mode_t bits) {
    if (below_at(dir, path)) CALL(MKDIR, path, -1, -1, syscall(SYS_mkdirat, dir, path, bits));
    return syscall(SYS_mkdirat, dir, path, bits);
}
int mkdir(const char *path, mode_t bits) { return mkdirat(AT_FDCWD, path, bits); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    if (below_at(to, new)) CALL(LINK, new, -1, -1, syscall(SYS_linkat, from, old, to, new, flags));
    return syscall(SYS_linkat, from, old, to, new, flags);
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int symlinkat(const char *target, int dir, const char *path) {
    if (below_at(dir, path)) CALL(LINK, path, -1, -1, syscall(SYS_symlinkat, target, dir, path));
    return syscall(SYS_symlinkat, target, dir, path);
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }
