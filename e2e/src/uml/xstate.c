/*
 * Lets user-mode-linux 6.1 run on processors whose extended state is larger than it knows (AMX): preloaded into it.
 *
 * It keeps the state of each process in a buffer of fixed size and writes that back; the host's kernel refuses a write
 * that is shorter than the state of its processor (EFAULT, "ptrace set fp regs failed"). What is missing belongs to
 * features that a process must ask for, which nothing in user-mode-linux does: zeros, their state of rest.
 */
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* One thread of user-mode-linux traces. */
static char state[1 << 16];
static size_t size;

long ptrace(enum __ptrace_request request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    pid_t pid = va_arg(arguments, pid_t);
    void *address = va_arg(arguments, void *), *data = va_arg(arguments, void *);
    va_end(arguments);

    if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
        struct iovec *given = data, whole = {state, sizeof state};
        if (size == 0) {
            if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, address, &whole) < 0)
                return -1;
            size = whole.iov_len;
            memset(state, 0, size);
        }
        if (given->iov_len < size) {
            memcpy(state, given->iov_base, given->iov_len);
            whole.iov_len = size;
            return syscall(SYS_ptrace, request, pid, address, &whole);
        }
    }
    /* What the C library returns, the system call stores. */
    if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
        long word;
        return syscall(SYS_ptrace, request, pid, address, &word) < 0 ? -1 : word;
    }
    return syscall(SYS_ptrace, request, pid, address, data);
}
