"""The system calls of each machine, and which of them code in the sandbox may make.

A call in `ALLOWED` is made, one in `REFUSED` fails with EPERM, and one in `PRETENDED` returns 0 without being
made. `agentenv_jail.jail.seccomp` decides some calls by their arguments. Every other number, also
one that a newer kernel adds, fails as if the kernel did not have it.
"""

from __future__ import annotations

__all__ = ["ALLOWED", "NUMBERS", "PRETENDED", "REFUSED", "names"]

_X86_64 = """
read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt
getsockopt clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv
msgctl fcntl flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat
link unlink symlink readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo
times ptrace getuid syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid
setregid getgroups setgroups setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget
capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib
personality ustat statfs fstatfs sysfs getpriority setpriority sched_setparam sched_getparam
sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval
mlock munlock mlockall munlockall vhangup modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit
chroot sync acct settimeofday mount umount2 swapon swapoff reboot sethostname setdomainname iopl ioperm
create_module init_module delete_module get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg
afs_syscall tuxcall security gettid readahead setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity
sched_getaffinity set_thread_area io_setup io_destroy io_getevents io_submit io_cancel get_thread_area
lookup_dcookie epoll_create epoll_ctl_old epoll_wait_old remap_file_pages getdents64 set_tid_address
restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun timer_delete
clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes
vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify
mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get inotify_init
inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat futimesat newfstatat
unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll unshare set_robust_list
get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait signalfd timerfd_create
eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2
inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark
prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv
process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create
kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect
pkey_alloc pkey_free statx io_pgetevents rseq
"""
"""Names in the order of their numbers, from 0 on."""

_AARCH64 = """
io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr
fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie
eventfd2 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch
ioctl ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount
pivot_root nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod
fchmodat fchownat fchown openat close vhangup pipe2 quotactl getdents64 lseek read write readv writev
pread64 pwrite64 preadv pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat
fstat sync fsync fdatasync sync_file_range2 timerfd_create timerfd_settime timerfd_gettime utimensat acct
capget capset personality exit exit_group waitid set_tid_address unshare futex set_robust_list
get_robust_list nanosleep getitimer setitimer kexec_load init_module delete_module timer_create
timer_gettime timer_getoverrun timer_settime timer_delete clock_settime clock_gettime clock_getres
clock_nanosleep syslog ptrace sched_setparam sched_setscheduler sched_getscheduler sched_getparam
sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max sched_get_priority_min
sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend rt_sigaction
rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority reboot
setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid
getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit setrlimit getrusage
umask prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid
sysinfo mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd
semget semctl semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect
getsockname getpeername sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap
mremap add_key request_key keyctl clone execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock
mlockall munlockall mincore madvise remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages
move_pages rt_tgsigqueueinfo perf_event_open accept4 recvmmsg
"""
_AARCH64_FROM_260 = """
wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs setns
sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp
getrandom memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
"""

_FROM_424 = """
pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig
fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2
mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret
process_mrelease futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake
futex_wait futex_requeue
"""
"""From 424 on, a call has the same number on both machines."""


def _numbered(names: str, first: int) -> dict[str, int]:
    return {name: number for number, name in enumerate(names.split(), first)}


NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": _numbered(_X86_64, 0) | _numbered(_FROM_424, 424),
    "aarch64": _numbered(_AARCH64, 0) | _numbered(_AARCH64_FROM_260, 260) | _numbered(_FROM_424, 424),
}
"""Number of every call that was reviewed, by machine and name."""


def names(text: str) -> frozenset[str]:
    """Return the names in a text; a line that begins with `#` is a comment."""
    return frozenset(name for line in text.splitlines() if line[:1] != "#" for name in line.split())


ALLOWED = names("""
# files
read write open close stat fstat lstat newfstatat statx lseek pread64 pwrite64 readv writev preadv pwritev
preadv2 pwritev2 access faccessat faccessat2 pipe pipe2 select pselect6 poll ppoll dup dup2 dup3 sendfile
copy_file_range truncate ftruncate fallocate getdents getdents64 getcwd chdir fchdir rename renameat
renameat2 mkdir mkdirat rmdir creat link linkat unlink unlinkat symlink symlinkat readlink readlinkat chmod
fchmod fchmodat fchmodat2 chown fchown lchown fchownat umask utime utimes futimesat utimensat mknod mknodat
statfs fstatfs openat openat2 setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr
flistxattr removexattr lremovexattr fremovexattr epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime close_range
# memory
mmap mprotect munmap brk mremap mlock munlock mlock2 mlockall munlockall
# processes
fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill getpid getppid gettid getpgrp
getpgid setpgid getsid setsid getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid
setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capget capset set_tid_address
set_robust_list futex futex_waitv rseq restart_syscall arch_prctl set_thread_area get_thread_area getcpu
sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler sched_getattr
sched_get_priority_max sched_get_priority_min sched_rr_get_interval getpriority ioprio_get getrlimit
setrlimit prlimit64 getrusage times sysinfo uname pidfd_open pidfd_send_signal
# signals and time
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo
rt_sigsuspend sigaltstack pause alarm getitimer setitimer nanosleep clock_nanosleep gettimeofday time
clock_gettime clock_getres getrandom
# unix sockets
connect accept accept4 bind listen sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown getsockname
getpeername getsockopt
""")
"""What Python and its usual packages need for files, memory, processes, signals, time and unix sockets."""

PRETENDED = names("sync syncfs fsync fdatasync msync fadvise64 readahead")
"""Calls that write the machine's disks or drop files from its memory. What the code writes is thrown away, so
nothing has to be safe on a disk."""

REFUSED = names("""
# other processes' memory, and tracing
ptrace process_vm_readv process_vm_writev kcmp process_madvise process_mrelease pidfd_getfd get_robust_list
# mounts and roots
mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr
# kernel code and machinery
init_module finit_module delete_module create_module query_module get_kernel_syms kexec_load
kexec_file_load bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
seccomp personality modify_ldt iopl ioperm lookup_dcookie uselib ustat sysfs _sysctl nfsservctl
remap_file_pages fanotify_init fanotify_mark membarrier
# keyrings, namespaces, clocks, handles, quotas, machine state
add_key request_key keyctl unshare setns settimeofday clock_settime adjtimex clock_adjtime
name_to_handle_at open_by_handle_at quotactl quotactl_fd swapon swapoff reboot acct syslog
sethostname setdomainname vhangup
# slots that all processes of the machine or of the user share, and locks on files that may only be read
io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents timer_create timer_settime timer_gettime
timer_getoverrun timer_delete inotify_init inotify_init1 inotify_add_watch inotify_rm_watch flock
# what other processes have in memory
mincore cachestat
# NUMA and priorities
mbind set_mempolicy get_mempolicy migrate_pages move_pages set_mempolicy_home_node setpriority
ioprio_set sched_setscheduler sched_setparam sched_setattr
# memory that no limit counts: System V and POSIX IPC, memory files, gifts to pipes
shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open
mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr memfd_create memfd_secret vmsplice
""")
"""Calls that a program may try, and that must fail in words that it understands."""
