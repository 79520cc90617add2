/* Preloaded into a process, this counts the calls that change files below a folder, and lets one of them go wrong.
 *
 * file_faults_arm(folder, call, action, error, log) begins: calls are numbered from 1, and call number `call` (0: none)
 *   'k'  kills the process before it,
 *   't'  writes half of what it should, then kills the process (calls that write nothing: as 'k'),
 *   'e'  fails with `error`,
 *   'f'  fails with `error`, as do all later calls that need space, after half of the first one is written.
 * Each call becomes a line of the file `log`: number, kind, inode, path (and second path), separated by tabs. A rename
 * of a folder is preceded by a line "tree" for each file and folder in it. Before each call that is logged, the function
 * given to file_faults_observe is called with its number. Programs that are started in turn are armed by the variables
 * FILE_FAULTS_FOLDER, _CALL, _ACTION, _ERROR and _LOG.
 *
 * Not seen: what a program does without the C library (safetensors renames its drafts so).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
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
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_length;
static long target;
static char action;
static int failure, log_file = -1;
static atomic_long calls;
static void (*observer)(long);

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

long file_faults_count(void) { return atomic_load(&calls); }

void file_faults_observe(void (*each)(long)) { observer = each; }

void file_faults_arm(const char *where, long call, char what, int error, const char *log)
{
    atomic_store(&calls, 0);
    target = call, action = what, failure = error;
    log_file = log && *log ? (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    snprintf(folder, sizeof folder, "%s", where);
    folder_length = strlen(folder);
}

__attribute__((constructor)) static void arm_from_environment(void)
{
    const char *where = getenv("FILE_FAULTS_FOLDER"), *call = getenv("FILE_FAULTS_CALL");
    const char *what = getenv("FILE_FAULTS_ACTION"), *error = getenv("FILE_FAULTS_ERROR");
    if (where)
        file_faults_arm(where, call ? atol(call) : 0, what ? *what : 0, error ? atoi(error) : 0, getenv("FILE_FAULTS_LOG"));
}

/* Whether the path is the folder or below it; `full` becomes the absolute path. */
static int is_below(int at, const char *path, char *full)
{
    char base[PATH_MAX] = "", link[64];
    if (!folder_length || !path)
        return 0;
    if (*path != '/') {
        if (at == AT_FDCWD) {
            if (!getcwd(base, sizeof base))
                return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0)
                return 0;
            base[length] = 0;
        }
    }
    int length = *path == '/' ? snprintf(full, PATH_MAX, "%s", path)
                              : snprintf(full, PATH_MAX, *path ? "%s/%s" : "%s", base, path);
    return length < PATH_MAX && !strncmp(full, folder, folder_length) && (!full[folder_length] || full[folder_length] == '/');
}

static int is_open_below(int fd, char *full)
{
    if (!folder_length || fd < 3)
        return 0;
    int saved = errno, below = is_below(fd, "", full);
    errno = saved;
    return below;
}

static void note(long number, const char *kind, unsigned long inode, const char *path, const char *second)
{
    char line[2 * PATH_MAX + 64];
    if (log_file < 0)
        return;
    int length = snprintf(line, sizeof line, "%ld\t%s\t%lu\t%s\t%s\n", number, kind, inode, path, second);
    syscall(SYS_write, log_file, line, length);
}

static unsigned long inode_of(const char *path)
{
    struct stat facts;
    return lstat(path, &facts) ? 0 : facts.st_ino;
}

static int note_tree(const char *path, const struct stat *facts, int kind, struct FTW *where)
{
    (void)kind, (void)where;
    note(0, S_ISDIR(facts->st_mode) ? "tree folder" : "tree", facts->st_ino, path, "");
    return 0;
}

static void die(void)
{
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Counts a call; returns 0 if it is to be made, 1 if half of it is, and sets errno and returns -1 if it fails. */
static int fault(const char *kind, unsigned long inode, const char *path, const char *second, int needs_space)
{
    long number = atomic_fetch_add(&calls, 1) + 1;
    note(number, kind, inode, path, second);
    if (log_file >= 0 && observer) {
        int saved = errno;
        observer(number);
        errno = saved;
    }
    int writes = !strcmp(kind, "write");
    if (!target || number < target)
        return 0;
    if (number == target) {
        if (action == 'k' || (action == 't' && !writes))
            die();
        if (action == 't' || (action == 'f' && writes))
            return 1;
    }
    if ((number == target && action == 'e') || (action == 'f' && needs_space)) {
        errno = failure;
        return -1;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------- opening */

static int fault_open(int at, const char *path, int flags)
{
    char full[PATH_MAX];
    struct stat facts;
    if (!((flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT)) || !is_below(at, path, full))
        return 0;
    int is_new = lstat(full, &facts) != 0;
    return fault(is_new ? "create" : flags & O_TRUNC ? "empty" : "open", is_new ? 0 : facts.st_ino, full, "", is_new) < 0;
}

#define MODE(last) mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, last); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) return fault_open(AT_FDCWD, path, flags) ? -1 : REAL(open)(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return fault_open(AT_FDCWD, path, flags) ? -1 : REAL(open64)(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) return fault_open(at, path, flags) ? -1 : REAL(openat)(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) return fault_open(at, path, flags) ? -1 : REAL(openat64)(at, path, flags, mode); }
int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static int flags_of(const char *mode) { return *mode == 'w' ? O_CREAT | O_TRUNC | O_WRONLY : *mode == 'a' ? O_CREAT | O_WRONLY : strchr(mode, '+') ? O_RDWR : O_RDONLY; }
FILE *fopen(const char *path, const char *mode) { return fault_open(AT_FDCWD, path, flags_of(mode)) ? NULL : REAL(fopen)(path, mode); }
FILE *fopen64(const char *path, const char *mode) { return fault_open(AT_FDCWD, path, flags_of(mode)) ? NULL : REAL(fopen64)(path, mode); }

/* ------------------------------------------------------------------------------------------------------- writing */

static int fault_at(const char *kind, int fd)
{
    char full[PATH_MAX];
    struct stat facts;
    if (!is_open_below(fd, full))
        return 0;
    return fault(kind, fstat(fd, &facts) ? 0 : facts.st_ino, full, "", 1);
}

#define WRITE(whole, half) { int fails = fault_at("write", fd); if (fails < 0) return -1; if (!fails) return whole; ssize_t written = half; if (action == 't') die(); return written; }

ssize_t write(int fd, const void *data, size_t size) WRITE(REAL(write)(fd, data, size), REAL(write)(fd, data, size / 2))
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) WRITE(REAL(pwrite)(fd, data, size, at), REAL(pwrite)(fd, data, size / 2, at))
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) WRITE(REAL(pwrite64)(fd, data, size, at), REAL(pwrite64)(fd, data, size / 2, at))
ssize_t writev(int fd, const struct iovec *parts, int count) WRITE(REAL(writev)(fd, parts, count), REAL(write)(fd, parts[0].iov_base, parts[0].iov_len / 2))
ssize_t sendfile(int fd, int from, off_t *at, size_t size) WRITE(REAL(sendfile)(fd, from, at, size), REAL(sendfile)(fd, from, at, 16))
ssize_t sendfile64(int fd, int from, off64_t *at, size_t size) WRITE(REAL(sendfile64)(fd, from, at, size), REAL(sendfile64)(fd, from, at, 16))
ssize_t copy_file_range(int from, off64_t *at, int fd, off64_t *to, size_t size, unsigned flags) WRITE(REAL(copy_file_range)(from, at, fd, to, size, flags), REAL(copy_file_range)(from, at, fd, to, 16, flags))

int ftruncate(int fd, off_t size) { return fault_at("truncate", fd) < 0 ? -1 : REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return fault_at("truncate", fd) < 0 ? -1 : REAL(ftruncate64)(fd, size); }
int fsync(int fd) { return fault_at("fsync", fd) < 0 ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return fault_at("fsync", fd) < 0 ? -1 : REAL(fdatasync)(fd); }

/* --------------------------------------------------------------------------------------------------------- names */

static int fault_name(const char *kind, int at, const char *path, int needs_space)
{
    char full[PATH_MAX];
    return is_below(at, path, full) && fault(kind, inode_of(full), full, "", needs_space) < 0;
}

int truncate(const char *path, off_t size) { return fault_name("truncate", AT_FDCWD, path, 0) ? -1 : REAL(truncate)(path, size); }
int truncate64(const char *path, off64_t size) { return fault_name("truncate", AT_FDCWD, path, 0) ? -1 : REAL(truncate64)(path, size); }
int mkdir(const char *path, mode_t mode) { return fault_name("mkdir", AT_FDCWD, path, 1) ? -1 : REAL(mkdir)(path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { return fault_name("mkdir", at, path, 1) ? -1 : REAL(mkdirat)(at, path, mode); }
int unlink(const char *path) { return fault_name("unlink", AT_FDCWD, path, 0) ? -1 : REAL(unlink)(path); }
int unlinkat(int at, const char *path, int flags) { return fault_name("unlink", at, path, 0) ? -1 : REAL(unlinkat)(at, path, flags); }
int rmdir(const char *path) { return fault_name("unlink", AT_FDCWD, path, 0) ? -1 : REAL(rmdir)(path); }

static int fault_rename(int from_at, const char *from, int to_at, const char *to)
{
    char full[PATH_MAX], second[PATH_MAX];
    if (!is_below(from_at, from, full) || !is_below(to_at, to, second))
        return 0;
    if (log_file >= 0)
        nftw(full, note_tree, 16, FTW_PHYS);
    return fault("rename", inode_of(full), full, second, 0) < 0;
}

int rename(const char *from, const char *to) { return fault_rename(AT_FDCWD, from, AT_FDCWD, to) ? -1 : REAL(rename)(from, to); }
int renameat(int from_at, const char *from, int to_at, const char *to) { return fault_rename(from_at, from, to_at, to) ? -1 : REAL(renameat)(from_at, from, to_at, to); }
int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) { return fault_rename(from_at, from, to_at, to) ? -1 : REAL(renameat2)(from_at, from, to_at, to, flags); }
