/* Counts the calls that change files under a folder, and at the nth of them kills the process or
 * lets the disk be full from there on. Preloaded; armed by disk_fault_arm from inside the process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long calls, kill_at, full_at;

void disk_fault_arm(const char *folder, long kill_call, long full_call)
{
    snprintf(root, sizeof root, "%s", folder);
    calls = 0;
    kill_at = kill_call;
    full_at = full_call;
}

long disk_fault_calls(void) { return calls; }

/* Whether the disk has no room for this call. */
static int hit(const char *path, int needs_room)
{
    if (!root[0] || !path || !strstr(path, root))
        return 0;
    long n = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (kill_at && n == kill_at)
        kill(getpid(), SIGKILL);
    if (full_at && n >= full_at && needs_room) {
        errno = ENOSPC;
        return 1;
    }
    return 0;
}

static int hit_fd(int fd, int needs_room)
{
    char link[64], path[PATH_MAX];
    if (!root[0])
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0)
        return 0;
    path[n] = 0;
    return hit(path, needs_room);
}

#define NEXT(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

#define OPEN(name)                                                                       \
    int name(const char *path, int flags, ...)                                           \
    {                                                                                    \
        va_list a;                                                                       \
        va_start(a, flags);                                                              \
        int mode = va_arg(a, int);                                                       \
        va_end(a);                                                                       \
        if ((flags & O_CREAT) && hit(path, access(path, F_OK) != 0))                     \
            return -1;                                                                   \
        return NEXT(int, #name, const char *, int, ...)(path, flags, mode);              \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                     \
    int name(int dir, const char *path, int flags, ...)                                  \
    {                                                                                    \
        va_list a;                                                                       \
        va_start(a, flags);                                                              \
        int mode = va_arg(a, int);                                                       \
        va_end(a);                                                                       \
        if ((flags & O_CREAT) && hit(path, access(path, F_OK) != 0))                     \
            return -1;                                                                   \
        return NEXT(int, #name, int, const char *, int, ...)(dir, path, flags, mode);    \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t n)
{
    return hit_fd(fd, 1) ? -1 : NEXT(ssize_t, "write", int, const void *, size_t)(fd, data, n);
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at)
{
    return hit_fd(fd, 1)
               ? -1
               : NEXT(ssize_t, "pwrite", int, const void *, size_t, off_t)(fd, data, n, at);
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at)
{
    return hit_fd(fd, 1)
               ? -1
               : NEXT(ssize_t, "pwrite64", int, const void *, size_t, off64_t)(fd, data, n, at);
}

ssize_t writev(int fd, const struct iovec *v, int n)
{
    return hit_fd(fd, 1) ? -1 : NEXT(ssize_t, "writev", int, const struct iovec *, int)(fd, v, n);
}

int fsync(int fd) { return hit_fd(fd, 0) ? -1 : NEXT(int, "fsync", int)(fd); }
int fdatasync(int fd) { return hit_fd(fd, 0) ? -1 : NEXT(int, "fdatasync", int)(fd); }

int rename(const char *a, const char *b)
{
    return hit(b, 0) ? -1 : NEXT(int, "rename", const char *, const char *)(a, b);
}

int mkdir(const char *path, mode_t mode)
{
    return hit(path, 1) ? -1 : NEXT(int, "mkdir", const char *, mode_t)(path, mode);
}

int unlink(const char *path)
{
    return hit(path, 0) ? -1 : NEXT(int, "unlink", const char *)(path);
}

int unlinkat(int dir, const char *path, int flags)
{
    char full[PATH_MAX * 2] = "", link[64];
    if (root[0] && dir >= 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        ssize_t n = readlink(link, full, PATH_MAX - 1);
        if (n > 0)
            full[n] = 0;
    }
    return hit(full[0] ? full : path, 0)
               ? -1
               : NEXT(int, "unlinkat", int, const char *, int)(dir, path, flags);
}

int rmdir(const char *path)
{
    return hit(path, 0) ? -1 : NEXT(int, "rmdir", const char *)(path);
}

int ftruncate(int fd, off_t n)
{
    return hit_fd(fd, 0) ? -1 : NEXT(int, "ftruncate", int, off_t)(fd, n);
}
