# ruff: noqa: PTH101, PTH102, PTH108, PTH112, PTH113, PTH114, PTH115, PTH116, PTH118, PTH120, PTH123, PTH208
# Between fork and exec pathlib costs more than it clarifies.
"""The weaker levels: bubblewrap, Landlock, and no isolation at all."""

from __future__ import annotations

import os
import platform
import shutil
import signal

from . import commands, seccomp
from . import syscalls as sc
from .namespaces import TESTBED, copy_tree, write_delta
from .process import Job, reap_until, start_test_process

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"),
    *("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)
NUM_UIDS = 512
"""Users above the sandbox's own, one for each run at a time: so runs cannot signal or count against each other."""


def run_init(job: Job, fds: dict[str, int]) -> None:
    """Copy the tree, run the test process on the copy, kill what it leaves, remove the copy."""
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGTERM)
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    tree, temporary = (f"{job['mount_point']}/{name}-{os.getpid()}" for name in ("tree", "tmp"))
    os.mkdir(tree, 0o755)
    job["tmp"] = tree

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        copy_tree(job["lower"], tree, 0)
        write_delta(tree, job)
        if job["level"] == "landlock":
            _prepare_landlock(job, tree, temporary)
        if job["level"] == "bwrap":
            if job["seccomp"]:
                job["seccomp_fd"] = _filter_file(job)
            job["wrap"] = _bwrap_command(job, tree)
            job["argv"] = [*job["wrap"], *job["argv"]]
            job["env"] = {}
        if job["is_session"]:
            commands.serve(job, fds, tree, is_pid_1=False)
        else:
            child = start_test_process(job, fds, tree)
            reap_until(child, fds["status"])
    except SystemExit:
        pass  # the supervisor's deadline; it knows
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing may cut this short
        kill_descendants(job["drop_to"] if "claim" in job else 0)  # unclaimed, it is another run's user
        for directory in (tree, temporary):
            shutil.rmtree(directory, ignore_errors=True)
        if "claim" in job:
            os.unlink(job["claim"])


def _prepare_landlock(job: Job, tree: str, temporary: str) -> None:
    """Choose the run's user and what it may reach; as root, leave the read-only files to root."""
    os.mkdir(temporary, 0o700)
    job["tmp"] = temporary
    job["env"] = {**job["env"], "HOME": temporary, "TMPDIR": temporary}
    sources = [source for source, _ in job["binds"]]
    job["landlock"] = {"read": [*_SYSTEM, *sources], "write": [tree, temporary, "/dev/null"]}
    if not job["drop_to"]:
        for path in job["readonly"]:  # against mistakes only: its owner can undo it
            target = f"{tree}/{path}"
            if os.path.isfile(target) and not os.path.islink(target):
                os.chmod(target, 0o444)
        job["pids"] += _num_tasks_of(os.geteuid())
        return
    uid = job["drop_to"] = _claim_uid(job)
    os.chown(temporary, uid, uid)
    kept = {f"{tree}/{path}" for path in job["readonly"]}
    kept |= {os.path.dirname(path) for path in kept} - {tree}
    for directory, _, names in os.walk(tree):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            if path not in kept:
                os.lchown(path, uid, uid)


def _claim_uid(job: Job) -> int:
    """A user that has no process, and no other run of this server; a file claims it until the run ends."""
    for number in range(NUM_UIDS):
        uid = int(job["drop_to"]) + 1 + (os.getpid() + number) % NUM_UIDS
        claim = f"{job['mount_point']}/uid-{uid}"
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if _num_tasks_of(uid):  # another server's run, or none of ours at all: all that it has would be killed
            os.unlink(claim)
            continue
        job["claim"] = claim
        return uid
    raise OSError("every user of the sandbox has processes already")


def _num_tasks_of(uid: int) -> int:
    """Threads of a user now: RLIMIT_NPROC counts them all."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue  # it has ended
    return count


def _filter_file(job: Job) -> int:
    """The seccomp program in an unnamed file, which bubblewrap inherits."""
    path = f"{job['mount_point']}/filter-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    os.write(fd, seccomp.build_filter(platform.machine()))
    os.set_inheritable(fd, True)
    return fd


def _bwrap_command(job: Job, tree: str) -> list[str]:
    command = [job["bwrap"], "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    command += ["--tmpfs", "/tmp"]  # before the binds: an interpreter may lie there
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    for source, target in (("/usr", "/usr"), *job["binds"]):
        command += ["--ro-bind", source, target]
    command += ["--proc", "/proc", "--dev", "/dev", "--bind", tree, TESTBED, "--chdir", TESTBED]
    for path in job["readonly"]:
        command += ["--ro-bind-try", f"{tree}/{path}", f"{TESTBED}/{path}"]
    for name, value in job["env"].items():
        command += ["--setenv", name, value]
    if job["seccomp_fd"] >= 0:
        command += ["--seccomp", str(job["seccomp_fd"])]
    return [*command, "--"]


def kill_descendants(uid: int = 0) -> None:
    """Kill what was re-parented to this subreaper, and every process of the run's own user, until nothing is left."""
    while True:
        if uid:
            _kill_all_of(uid)
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            os.waitpid(-1, 0)  # one at a time: each death may bring new children
        except ChildProcessError:
            return


def _kill_all_of(uid: int) -> None:
    """Kill at once what forks faster than it can be listed."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)  # all that this user may signal, which is all that is its own
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
