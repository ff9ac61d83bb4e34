#include "worker/keep/output.h"
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int output_open(const char *path)
{
    return open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
}

unsigned output_hold(int fd, uint64_t max_bytes)
{
    struct stat st;

    if (!max_bytes || fstat(fd, &st) < 0)
        return 0;
    uint64_t held = (uint64_t)st.st_blocks * 512, size = (uint64_t)st.st_size;

    if (held > size)
        held = size; /* the last block is not full */
    if (held > max_bytes && size > max_bytes / 2) {
        off_t keep_from =
            (off_t)(size - max_bytes / 2) & ~(off_t)65535; /* whole pages of any size */

        if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, keep_from) < 0 &&
            ftruncate(fd, 0) < 0)
            return 100;
        held = max_bytes / 2;
    }
    return (unsigned)(held * 100 / max_bytes);
}

size_t output_tail(int fd, char *buf, size_t cap)
{
    struct stat st;

    if (fstat(fd, &st) < 0 || st.st_size == 0)
        return 0;
    off_t from = st.st_size > (off_t)cap ? st.st_size - (off_t)cap : 0;
    ssize_t n = pread(fd, buf, cap, from);
    const char *line = from && n > 0 ? memchr(buf, '\n', (size_t)n / 2) : NULL;

    if (line) {
        n -= line + 1 - buf;
        memmove(buf, line + 1, (size_t)n);
    }
    return n > 0 ? (size_t)n : 0;
}
