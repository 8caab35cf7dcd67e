# ruff: noqa: PTH101, PTH102, PTH103, PTH106, PTH108, PTH112, PTH113, PTH114, PTH115, PTH118, PTH120, PTH123, PTH208, PTH211
# Between fork and exec pathlib costs more than it clarifies.
"""Pid 1 of a run: build the file system, give everything up, start the test process, reap.

fork tree of one run: launcher -> supervisor (outside) -> init (pid 1 inside) -> test process.
The init never executes repository code; its exit takes every process of the run with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct

from . import commands
from . import syscalls as sc
from .process import Job, reap_until, start_test_process
from .user_namespaces import new_root_namespace, new_user_namespace

TESTBED = "/testbed"
_MAX_INODES = 100_000  # of the tree's changes and /tmp: each costs a kilobyte that no size= counts
_SYSTEM_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_FILES = ("ld.so.cache", "localtime", "alternatives")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_UNMASKING = ("/proc/sys/fs/binfmt_misc", "/proc/fs/nfsd")  # mounted on directories that are empty without them
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_PASSWD = "root:x:0:0:root:/:/bin/sh\nsandbox:x:1000:1000:sandbox:/tmp:/bin/sh\n"
_GROUP = "root:x:0:\nsandbox:x:1000:\n"


def enter(job: Job) -> None:
    """Create the namespaces of a run, as root or through a user namespace. Raises OSError."""
    flags = sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWNET | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS
    if job["uid"] == 0:
        new_user_namespace(flags)
    elif sc.may_mount():  # also where a warm launcher has made itself root of a user namespace
        sc.unshare(flags)
    else:
        new_root_namespace(flags)


def enter_with_readonly(directories: list[str]) -> None:
    """Move this process to a mount namespace in which nothing below ``directories`` can be written. Raises OSError."""
    if os.geteuid() != 0:
        new_user_namespace(sc.CLONE_NEWNS, inside=0)  # an id other than 0 loses its capabilities by exec
    elif sc.may_mount():
        sc.unshare(sc.CLONE_NEWNS)
    else:
        new_root_namespace(sc.CLONE_NEWNS)
    sc.mount("", "/", "", sc.MS_REC | sc.MS_PRIVATE)
    for directory in directories:
        _bind_directory(directory, directory)


def run_init(job: Job, fds: dict[str, int]) -> None:
    """Set up, start the test process and reap until it ends. Runs as pid 1 of the namespace."""
    sc.prctl(sc.PR_SET_PDEATHSIG, 9)
    has_loopback = _start_loopback()
    writable_proc = _build_root(job)
    _become_nobody(job, writable_proc, has_loopback)
    os.close(writable_proc)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)  # nothing inside may read /proc/1
    sc.prctl(sc.PR_SET_PDEATHSIG, 9)  # a change of credentials cleared it
    if job["is_session"]:
        commands.serve(job, fds, TESTBED, is_pid_1=True)
        return
    child = start_test_process(job, fds, TESTBED)
    reap_until(child, fds["status"])


def _start_loopback() -> bool:
    """Bring up the one device of the run's own network, for processes that talk to each other; False = we may not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        try:
            fcntl.ioctl(channel, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
        except PermissionError:
            return False
    return True


def _build_root(job: Job) -> int:
    """Build and enter the run's file system; returns what `_make_devices` does."""
    sc.mount("", "/", "", sc.MS_REC | sc.MS_PRIVATE)
    root = job["mount_point"]
    if job["rootfs"]:  # an imported environment has every mount point that is needed here
        sc.mount(job["rootfs"], root, "", sc.MS_BIND)
        sc.make_readonly(root, recursive=False)
        sc.mount("tmpfs", f"{root}/dev", "tmpfs", sc.MS_NOSUID, "size=64k,mode=755")
    else:
        sc.mount("tmpfs", root, "tmpfs", sc.MS_NOSUID, "size=1m,mode=755")
    _make_tree(root, job)  # before the binds: an interpreter may lie under /tmp
    if job["rootfs"]:
        for source, target in job["binds"]:
            _bind_directory(source, root + target)
    else:
        _bind_system(root, job["binds"])
    writable_proc = _make_devices(root)
    sc.sethostname("sandbox")
    sc.pivot_root(root)
    _apply_delta(job)
    bound: set[str] = set()
    for path in job["readonly"]:
        _protect(path, bound)
    for target in ("/", *(["/dev"] if job["rootfs"] else [])):
        sc.mount("", target, "", sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID)
    return writable_proc


def _make_devices(root: str) -> int:
    """Make /dev and /proc; returns a descriptor of a /proc that may be written, for the maps of a user namespace."""
    for path in ("dev", "proc"):
        os.makedirs(f"{root}/{path}", 0o755, exist_ok=True)
    for name in _DEVICES:
        _bind_file(f"/dev/{name}", f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm", 0o777)
    sc.mount("tmpfs", f"{root}/dev/shm", "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "size=64m,nr_inodes=4096,mode=1777")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    _mount_proc(f"{root}/proc")
    writable = os.open(f"{root}/proc", os.O_RDONLY | os.O_DIRECTORY)
    sc.detach(f"{root}/proc")
    _mount_proc(f"{root}/proc")
    sc.make_readonly(f"{root}/proc", recursive=False)
    return writable


def _mount_proc(target: str) -> None:
    try:
        sc.mount("proc", target, "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
    except PermissionError as error:
        with open("/proc/self/mountinfo") as file:
            points = {line.split()[4] for line in file}
        masks = sorted(point for point in points if point.startswith("/proc/") and point not in _UNMASKING)
        if not masks:
            raise
        # nor would the masked one do: it shows the processes of the machine, and no run's own
        raise OSError(
            f"no /proc for a run, since parts of this one are masked ({', '.join(masks[:3])}"
            f"{', …' if masks[3:] else ''}): a user namespace may not see more than its maker. Docker: "
            "--security-opt systempaths=unconfined; Podman: --security-opt unmask=ALL; Kubernetes: procMount: Unmasked"
        ) from error


def _bind_system(root: str, binds: list[tuple[str, str]]) -> None:
    for name in _SYSTEM_DIRECTORIES:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            _bind_directory(f"/{name}", f"{root}/{name}")
    _bind_directory("/usr", f"{root}/usr")
    for source, target in binds:
        if not source.startswith("/usr/"):
            _bind_directory(source, root + target)
    os.makedirs(f"{root}/etc", exist_ok=True)
    for name in _ETC_FILES:
        source = os.path.realpath(f"/etc/{name}")
        if os.path.isdir(source):
            _bind_directory(source, f"{root}/etc/{name}")
        elif os.path.isfile(source):
            _bind_file(source, f"{root}/etc/{name}")
            sc.make_readonly(f"{root}/etc/{name}", recursive=False)
    _write(f"{root}/etc/passwd", _PASSWD)
    _write(f"{root}/etc/group", _GROUP)
    _write(f"{root}/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")


def _bind_directory(source: str, target: str) -> None:
    os.makedirs(target, mode=0o755, exist_ok=True)
    sc.mount(source, target, "", sc.MS_BIND | sc.MS_REC)
    sc.make_readonly(target, recursive=True)


def _bind_file(source: str, target: str) -> None:
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    sc.mount(source, target, "", sc.MS_BIND)


def _make_tree(root: str, job: Job) -> None:
    """Mount the tree and /tmp, both on one tmpfs whose size is the run's disk limit."""
    disk = f"{root}/.disk"
    for path in (disk, root + TESTBED, f"{root}/tmp"):
        os.makedirs(path, mode=0o755, exist_ok=True)
    sc.mount(
        "tmpfs", disk, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, f"size={job['disk_mb']}m,nr_inodes={_MAX_INODES},mode=755"
    )
    for name, mode in (("upper", 0o755), ("work", 0o755), ("tmp", 0o1777)):
        os.mkdir(f"{disk}/{name}")
        os.chmod(f"{disk}/{name}", mode)
    if job["uid"]:
        os.chown(f"{disk}/upper", job["uid"], job["uid"])
    if job["tree"] == "overlay":
        options = f"lowerdir={job['lower']},upperdir={disk}/upper,workdir={disk}/work"
        if job["user_namespace"]:
            options += ",userxattr"
        sc.mount("overlay", root + TESTBED, "overlay", sc.MS_NOSUID | sc.MS_NODEV, options)
    else:
        copy_tree(job["lower"], f"{disk}/upper", job["uid"])
        sc.mount(f"{disk}/upper", root + TESTBED, "", sc.MS_BIND)
    sc.mount(f"{disk}/tmp", f"{root}/tmp", "", sc.MS_BIND)
    sc.detach(disk)  # the tree is reachable only where it belongs
    if not job["rootfs"]:
        os.rmdir(disk)


def copy_tree(source: str, target: str, uid: int) -> None:
    """Copy a tree for hosts without overlay; symlinks stay symlinks."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    if uid:
        for directory, _, names in os.walk(target):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                os.lchown(path, uid, uid)


def _apply_delta(job: Job) -> None:
    """Write the patched files, as the run's own user, so that a mistake here stays in the sandbox."""
    if job["uid"]:
        os.setegid(job["uid"])
        os.seteuid(job["uid"])
    write_delta(TESTBED, job)
    if job["uid"]:
        os.seteuid(0)
        os.setegid(0)


def write_delta(tree: str, job: Job) -> None:
    """Turn the base tree under ``tree`` into the patched one."""
    for path in job["deleted"]:
        os.unlink(f"{tree}/{path}")
        parent = os.path.dirname(path)
        while parent and not os.listdir(f"{tree}/{parent}"):  # git knows no empty directory
            os.rmdir(f"{tree}/{parent}")
            parent = os.path.dirname(parent)
    for path, (executable, content) in job["files"].items():
        target = f"{tree}/{path}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.lexists(target):
            os.unlink(target)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if executable else 0o644)
        with open(fd, "wb") as file:
            file.write(content)


def _protect(path: str, bound: set[str]) -> None:
    """Bind one file read-only, and its directories to themselves so that none can be renamed away."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        directory = f"{TESTBED}/{'/'.join(parts[:depth])}"
        if directory not in bound:
            sc.mount(directory, directory, "", sc.MS_BIND | sc.MS_REC)
            bound.add(directory)
    target = f"{TESTBED}/{path}"
    if os.path.isfile(target) and not os.path.islink(target):
        sc.mount(target, target, "", sc.MS_BIND)
        sc.make_readonly(target, recursive=False)


def _become_nobody(job: Job, writable_proc: int, has_loopback: bool) -> None:
    uid = job["uid"]
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        sc.prctl(sc.PR_SET_DUMPABLE, 1)  # or /proc/self would belong to root and refuse the maps
        # a root without CAP_NET_ADMIN has it in this namespace, over a network that is made with it
        network = 0 if has_loopback else sc.CLONE_NEWNET
        try:  # so this run's processes count apart from every other run's
            new_user_namespace(network, f"/proc/self/fd/{writable_proc}/self")
            if not has_loopback:
                _start_loopback()
        except OSError:
            job["pids"] *= 4  # one user's runs share a count: leave room for the neighbours
    sc.drop_capabilities()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
