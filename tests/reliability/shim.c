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
 *
 * mode 5 stops nothing: every operation that succeeded is written to `log` with all that is needed to do it again, in
 * the order in which the operations of all processes took place (`note`). recording.py reads it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
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
enum { COUNT, KILL, HALF, FULL, READ_ONLY, RECORD };
enum { OPEN = 1, WRITE, CLOSE, SYNC, TRUNCATE, RENAME, UNLINK, LINK, MKDIR, RMDIR, SYMLINK, SYNC_ALL };
static const char *names[] = {"", "open", "write", "close", "fsync", "truncate", "rename", "unlink", "link", "mkdir",
                              "rmdir", "symlink", "sync"};

static char directory[PATH_MAX];
static size_t length;
static long at, mode, error_number;
static int log_descriptor = -1;
static atomic_long done, writes; /* operations so far, and writes among them */
static atomic_int failing;       /* this operation is the first of those that fail */
static char tracked[FILES];

static pthread_mutex_t one_thread = PTHREAD_MUTEX_INITIALIZER;
static void hold_thread(void) { pthread_mutex_lock(&one_thread); }
static void let_thread(void) { pthread_mutex_unlock(&one_thread); }

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

void shim_arm(const char *path, long at_, long mode_, long error_, int log_) {
    strncpy(directory, path, sizeof directory - 1);
    length = strlen(directory);
    at = at_, mode = mode_, error_number = error_, log_descriptor = log_;
    memset(tracked, 0, sizeof tracked);
    done = writes = 0;
    static int is_asked;
    if (!is_asked++) pthread_atfork(hold_thread, let_thread, let_thread); /* a child has no thread that would let go */
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

/* Open for writing (and directories), or only for reading: of those nothing but fsync matters. */
enum { WRITES = 1, READS };
static int follows(int fd) { return length && fd >= 0 && fd < FILES && tracked[fd] == WRITES; }
static int reads(int fd) { return length && fd >= 0 && fd < FILES && tracked[fd] == READS; }

static void say(long n, int kind, const char *path, int fd) {
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

/* -- mode 5: an operation and its record are one, for all threads and processes that write to one log. */

static void hold_log(short how) {
    struct flock lock = {.l_type = how, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    if (how == F_WRLCK) pthread_mutex_lock(&one_thread);
    while (syscall(SYS_fcntl, log_descriptor, F_SETLKW, &lock) && errno == EINTR) continue;
    if (how == F_UNLCK) pthread_mutex_unlock(&one_thread);
}

static void append(const void *data, size_t size) {
    while (size) {
        ssize_t n = syscall(SYS_write, log_descriptor, data, size);
        if (n < 0) abort(); /* a record with a hole is none */
        data = (const char *)data + n, size -= n;
    }
}

static unsigned long inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

static unsigned long inode_at(int dir, const char *path) {
    struct stat found;
    return fstatat(dir, path, &found, AT_SYMLINK_NOFOLLOW) ? 0 : found.st_ino;
}

static const char *whole(int dir, const char *path, char *into) {
    into[0] = 0;
    if (!path) return into;
    if (path[0] != '/') {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        if (dir == AT_FDCWD) {
            if (!getcwd(into, PATH_MAX)) abort();
        } else {
            ssize_t n = readlink(link, into, PATH_MAX - 1);
            if (n < 0) abort();
            into[n] = 0;
        }
    }
    size_t used = strlen(into);
    snprintf(into + used, PATH_MAX - used, "%s%s", used ? "/" : "", path);
    return into;
}

/* One line, "kind process inode a b bytes bytes bytes", then the path, the other path and the data. What was written is
 * read back from the file, because some calls never see it. */
static void note(int kind, int fd, unsigned long inode, int dir, const char *path, int other_dir, const char *other,
                 long a, long b) {
    int error = errno;
    char first[PATH_MAX], second[PATH_MAX], line[256], data[1 << 16];
    whole(dir, path, first), whole(other_dir, other, second);
    size_t size = kind == WRITE ? b : 0;
    int n = snprintf(line, sizeof line, "%s %d %lu %ld %ld %zu %zu %zu\n", names[kind], getpid(), inode, a, b,
                     strlen(first), strlen(second), size);
    append(line, n), append(first, strlen(first)), append(second, strlen(second));
    if (size) {
        snprintf(line, sizeof line, "/proc/self/fd/%d", fd);
        int from = syscall(SYS_openat, AT_FDCWD, line, O_RDONLY, 0);
        while (size) {
            ssize_t got = syscall(SYS_pread64, from, data, size < sizeof data ? size : sizeof data, a);
            if (got <= 0) abort();
            append(data, got);
            size -= got, a += got;
        }
        syscall(SYS_close, from);
    }
    errno = error;
}

#define RECORDED(expression, succeeded, ...) \
    if (length && mode == RECORD) { \
        hold_log(F_WRLCK); \
        __auto_type result_ = expression; \
        if (succeeded) note(__VA_ARGS__); \
        int error_ = errno; \
        hold_log(F_UNLCK); \
        errno = error_; \
        return result_; \
    }
#define WROTE(expression, fd, positioned, where) \
    RECORDED(expression, result_ > 0, WRITE, fd, inode_of(fd), 0, NULL, 0, NULL, \
             positioned ? where : (long)lseek64(fd, 0, SEEK_CUR) - (long)result_, result_)
#define OF_FILE(kind, expression, fd, a) RECORDED(expression, !result_, kind, fd, inode_of(fd), 0, NULL, 0, NULL, a, 0)

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

static int remember(int fd, int how) {
    if (fd >= 0 && fd < FILES) tracked[fd] = how;
    return fd;
}

static int open_below(int dir, const char *path, int flags, mode_t bits) {
    if (!for_writing(flags)) /* it may be forced to the disk nevertheless: directories are for nothing else */
        return remember(syscall(SYS_openat, dir, path, flags, bits), flags & O_DIRECTORY ? WRITES : READS);
    RECORDED(remember(syscall(SYS_openat, dir, path, flags, bits), WRITES), result_ >= 0, OPEN, result_,
             inode_of(result_), dir, path, 0, NULL, flags, 0)
    CALL(OPEN, path, -1, -1, remember(syscall(SYS_openat, dir, path, flags, bits), WRITES));
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
    if (file) remember(fileno(file), WRITES);
    return file;
}

#define FOPEN_LIKE(name) \
    FILE *name(const char *path, const char *how) { \
        REAL(FILE *, #name, const char *, const char *); \
        if (!below(path) || (how[0] == 'r' && !strchr(how, '+'))) return real(path, how); \
        RECORDED(track_stream(real(path, how)), result_, OPEN, -1, inode_of(fileno(result_)), AT_FDCWD, path, 0, NULL, \
                 how[0] == 'w' ? O_CREAT | O_TRUNC : how[0] == 'a' ? O_CREAT : 0, 0) \
        CALL(OPEN, path, -1, NULL, track_stream(real(path, how))); \
    }
FOPEN_LIKE(fopen)
FOPEN_LIKE(fopen64)

/* How much of a write is done: half where the process dies in it or the disk is full, if there is a half. */
static ssize_t write_part(int fd, const void *data, size_t size, off64_t where, int positioned) {
    return positioned ? syscall(SYS_pwrite64, fd, data, size, where) : syscall(SYS_write, fd, data, size);
}

static ssize_t write_below(int fd, const void *data, size_t size, off64_t where, int positioned) {
    WROTE(write_part(fd, data, size, where, positioned), fd, positioned, where)
    int what = step(WRITE, NULL, fd);
    if (!what) return write_part(fd, data, size, where, positioned);
    if (what == 1) {
        /* A handful of bytes, as of a pointer, gets into the page together: a file that was emptied stays empty. */
        if (size > 16) write_part(fd, data, size / 2, where, positioned);
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
    WROTE(syscall(SYS_writev, fd, parts, number), fd, 0, 0)
    /* One plain write of the first part that is not empty: short writes are allowed, and the caller comes again. */
    int i = 0;
    while (i < number - 1 && !parts[i].iov_len) i++;
    if (mode == COUNT || mode == KILL) CALL(WRITE, NULL, fd, -1, syscall(SYS_writev, fd, parts, number));
    return write_below(fd, parts[i].iov_base, parts[i].iov_len, 0, 0);
}

size_t fwrite(const void *data, size_t size, size_t number, FILE *file) {
    REAL(size_t, "fwrite", const void *, size_t, size_t, FILE *);
    if (!length || !follows(fileno(file))) return real(data, size, number, file);
    RECORDED(real(data, size, number, file), !fflush(file) && result_, WRITE, fileno(file),
             inode_of(fileno(file)), 0, NULL, 0, NULL, ftell(file) - (long)(result_ * size), result_ * size)
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
        WROTE(syscall(SYS_sendfile, to, from, where, size), to, 0, 0) \
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
    if (follows(to))
        WROTE(syscall(SYS_copy_file_range, from, there, to, here, size, flags), to, here, *here - (long)result_)
    if (follows(to)) CALL(WRITE, NULL, to, -1, syscall(SYS_copy_file_range, from, there, to, here, size, flags));
    return syscall(SYS_copy_file_range, from, there, to, here, size, flags);
}

int close(int fd) {
    if (follows(fd)) {
        tracked[fd] = 0;
        unsigned long inode = mode == RECORD ? inode_of(fd) : 0;
        RECORDED(syscall(SYS_close, fd), !result_, CLOSE, -1, inode, 0, NULL, 0, NULL, 0, 0)
        CALL(CLOSE, NULL, fd, -1, syscall(SYS_close, fd));
    }
    if (reads(fd)) tracked[fd] = 0;
    return syscall(SYS_close, fd);
}

int fclose(FILE *file) {
    REAL(int, "fclose", FILE *);
    int fd = length ? fileno(file) : -1;
    if (follows(fd)) {
        tracked[fd] = 0;
        unsigned long inode = mode == RECORD ? inode_of(fd) : 0;
        RECORDED(real(file), !result_, CLOSE, -1, inode, 0, NULL, 0, NULL, 0, 0)
        CALL(CLOSE, NULL, fd, EOF, real(file));
    }
    return real(file);
}

int fsync(int fd) {
    if (follows(fd) || reads(fd)) {
        OF_FILE(SYNC, syscall(SYS_fsync, fd), fd, 0)
        CALL(SYNC, NULL, fd, -1, syscall(SYS_fsync, fd));
    }
    return syscall(SYS_fsync, fd);
}

int fdatasync(int fd) {
    if (follows(fd) || reads(fd)) {
        OF_FILE(SYNC, syscall(SYS_fdatasync, fd), fd, 0)
        CALL(SYNC, NULL, fd, -1, syscall(SYS_fdatasync, fd));
    }
    return syscall(SYS_fdatasync, fd);
}

/* sync_file_range is none of the operations: it promises nothing about a power cut. */

int syncfs(int fd) {
    RECORDED(syscall(SYS_syncfs, fd), !result_, SYNC_ALL, -1, 0, 0, NULL, 0, NULL, 0, 0)
    return syscall(SYS_syncfs, fd);
}

static int sync_all(void) {
    RECORDED((int)syscall(SYS_sync), !result_, SYNC_ALL, -1, 0, 0, NULL, 0, NULL, 0, 0)
    return syscall(SYS_sync);
}
void sync(void) { sync_all(); }

#define FTRUNCATE_LIKE(name) \
    int name(int fd, off64_t size) { \
        if (follows(fd)) OF_FILE(TRUNCATE, syscall(SYS_ftruncate, fd, size), fd, size) \
        if (follows(fd)) CALL(TRUNCATE, NULL, fd, -1, syscall(SYS_ftruncate, fd, size)); \
        return syscall(SYS_ftruncate, fd, size); \
    }
FTRUNCATE_LIKE(ftruncate)
FTRUNCATE_LIKE(ftruncate64)

#define TRUNCATE_LIKE(name) \
    int name(const char *path, off64_t size) { \
        if (below(path) && mode == RECORD) { \
            int fd = open(path, O_WRONLY); \
            int result = fd < 0 ? -1 : ftruncate(fd, size); \
            if (fd >= 0) close(fd); \
            return result; \
        } \
        if (below(path)) CALL(TRUNCATE, path, -1, -1, syscall(SYS_truncate, path, size)); \
        return syscall(SYS_truncate, path, size); \
    }
TRUNCATE_LIKE(truncate)
TRUNCATE_LIKE(truncate64)

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    if (below_at(to, new) || below_at(from, old))
        RECORDED(syscall(SYS_renameat2, from, old, to, new, flags), !result_, RENAME, -1, 0, from, old, to, new, flags,
                 0)
    if (below_at(to, new)) CALL(RENAME, new, -1, -1, syscall(SYS_renameat2, from, old, to, new, flags));
    return syscall(SYS_renameat2, from, old, to, new, flags);
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int dir, const char *path, int flags) {
    if (below_at(dir, path))
        RECORDED(syscall(SYS_unlinkat, dir, path, flags), !result_, flags & AT_REMOVEDIR ? RMDIR : UNLINK, -1, 0, dir,
                 path, 0, NULL, 0, 0)
    if (below_at(dir, path))
        CALL(flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, -1, -1, syscall(SYS_unlinkat, dir, path, flags));
    return syscall(SYS_unlinkat, dir, path, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int dir, const char *path, mode_t bits) {
    if (below_at(dir, path))
        RECORDED(syscall(SYS_mkdirat, dir, path, bits), !result_, MKDIR, -1, inode_at(dir, path), dir, path, 0, NULL, 0,
                 0)
    if (below_at(dir, path)) CALL(MKDIR, path, -1, -1, syscall(SYS_mkdirat, dir, path, bits));
    return syscall(SYS_mkdirat, dir, path, bits);
}
int mkdir(const char *path, mode_t bits) { return mkdirat(AT_FDCWD, path, bits); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    if (below_at(to, new))
        RECORDED(syscall(SYS_linkat, from, old, to, new, flags), !result_, LINK, -1, inode_at(to, new), from, old, to,
                 new, 0, 0)
    if (below_at(to, new)) CALL(LINK, new, -1, -1, syscall(SYS_linkat, from, old, to, new, flags));
    return syscall(SYS_linkat, from, old, to, new, flags);
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int symlinkat(const char *target, int dir, const char *path) {
    if (below_at(dir, path))
        RECORDED(syscall(SYS_symlinkat, target, dir, path), !result_, SYMLINK, -1, inode_at(dir, path), dir, path, 0,
                 NULL, 0, 0)
    if (below_at(dir, path)) CALL(LINK, path, -1, -1, syscall(SYS_symlinkat, target, dir, path));
    return syscall(SYS_symlinkat, target, dir, path);
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }
