"""The strict seccomp profile in force: what it refuses in each kind of container, and what tools still do under it.

Each refused call is tried once. Where it was allowed, some of them took what the whole kernel has only once.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import anyio
import pytest

from executor.engine.paths import engine_paths
from executor.errors import ProfileMismatch
from executor.result import CallResult
from executor.sandbox import profile, verify
from executor.sandbox.request import Call
from executor.sandbox.seccomp import allowed, beyond, strict_profile
from tests.engine.conftest import Room

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the host's side is not what is tested here


HIGH = 0x100000000
# name: (number on x86_64, number on aarch64, arguments, the error)
REFUSED: dict[str, tuple[int | None, int, tuple[int, ...], str]] = {
    "a socket filter": (54, 208, (-1, 1, 26, 0, 0), "EPERM"),
    "a socket filter, with bits that the kernel drops": (54, 208, (-1, HIGH + 1, HIGH + 26, 0, 0), "EPERM"),
    "a reuseport filter": (54, 208, (-1, 1, 51, 0, 0), "EPERM"),
    "an eBPF filter": (54, 208, (-1, 1, 50, 0, 0), "EPERM"),
    "a reuseport eBPF filter": (54, 208, (-1, 1, 52, 0, 0), "EPERM"),
    "an upper layer protocol": (54, 208, (-1, 6, 31, 0, 0), "EPERM"),
    "seccomp": (317, 277, (2, 0, 0), "EPERM"),
    "PR_SET_SECCOMP": (157, 167, (22, 2, 0), "EPERM"),
    "PR_SET_SECCOMP, with bits that the kernel drops": (157, 167, (HIGH + 22, 2, 0), "EPERM"),
    "PR_SET_PTRACER": (157, 167, (0x59616D61, -1), "EPERM"),
    "PR_SCHED_CORE": (157, 167, (62, 0, 0, 0, 0), "EPERM"),
    "bpf": (321, 280, (0, 0, 0), "EPERM"),
    "vsock": (41, 198, (40, 1, 0), "EPERM"),
    "vsock, with bits that the kernel drops": (41, 198, (HIGH + 40, 1, 0), "EPERM"),
    "packet": (41, 198, (17, 3, 0), "EPERM"),
    "alg": (41, 198, (38, 5, 0), "EPERM"),
    "xdp": (41, 198, (44, 3, 0), "EPERM"),
    "bluetooth": (41, 198, (31, 3, 0), "EPERM"),
    "can": (41, 198, (29, 3, 1), "EPERM"),
    "tipc": (41, 198, (30, 2, 0), "EPERM"),
    "sctp": (41, 198, (2, 1, 132), "EPERM"),
    "dccp": (41, 198, (2, 6, 0), "EPERM"),
    "mptcp": (41, 198, (2, 1, 262), "EPERM"),
    "netlink of another kind": (41, 198, (16, 3, 9), "EPERM"),
    "a pair of vsocks": (53, 199, (40, 1, 0, 0), "EPERM"),
    "io_setup": (206, 0, (1, 0), "EPERM"),
    "io_submit": (209, 2, (0, 0, 0), "EPERM"),
    "io_uring_setup": (425, 425, (1, 0), "EPERM"),
    "io_uring_enter": (426, 426, (-1, 0, 0, 0, 0), "EPERM"),
    "io_uring_register": (427, 427, (-1, 0, 0, 0), "EPERM"),
    "PTRACE_TRACEME": (101, 117, (0, 0, 0, 0), "EPERM"),
    "PTRACE_SEIZE": (101, 117, (0x4206, 1, 0, 0), "EPERM"),
    "process_vm_readv": (310, 270, (1, 0, 0, 0, 0, 0), "EPERM"),
    "process_vm_writev": (311, 271, (1, 0, 0, 0, 0, 0), "EPERM"),
    "kcmp": (312, 272, (1, 1, 0, 0, 0), "EPERM"),
    "pidfd_getfd": (438, 438, (-1, 0, 0), "EPERM"),
    "userfaultfd": (323, 282, (0,), "EPERM"),
    "perf_event_open": (298, 241, (0, 0, -1, -1, 0), "EPERM"),
    "keyctl": (250, 219, (0, -3, 0), "EPERM"),
    "add_key": (248, 217, (0, 0, 0, 0, -3), "EPERM"),
    "request_key": (249, 218, (0, 0, 0, 0), "EPERM"),
    "mount": (165, 40, (0, 0, 0, 0, 0), "EPERM"),
    "umount": (166, 39, (0, 0), "EPERM"),
    "fsopen": (430, 430, (0, 0), "EPERM"),
    "open_tree": (428, 428, (-1, 0, 0), "EPERM"),
    "move_mount": (429, 429, (-1, 0, -1, 0, 0), "EPERM"),
    "mount_setattr": (442, 442, (-1, 0, 0, 0, 0), "EPERM"),
    "unshare": (272, 97, (0x10000000,), "EPERM"),
    "setns": (308, 268, (-1, 0), "EPERM"),
    "clone into a user namespace": (56, 220, (0x10000000 | 17, 0, 0, 0, 0), "EPERM"),
    "clone3": (435, 435, (0, 0), "ENOSYS"),
    "execveat of a descriptor": (322, 281, (-1, 0, 0, 0, 0x1000), "ENOSYS"),
    "name_to_handle_at": (303, 264, (-1, 0, 0, 0, 0), "EPERM"),
    "open_by_handle_at": (304, 265, (-1, 0, 0), "EPERM"),
    "vmsplice": (278, 75, (-1, 0, 0, 0), "EPERM"),
    "memfd_secret": (447, 447, (0,), "EPERM"),
    "sched_setattr": (314, 274, (0, 0, 0), "EPERM"),
    "ioprio_set": (251, 30, (1, 0, 0), "EPERM"),
    "sync": (162, 81, (), "EPERM"),
    "a line discipline": (16, 29, (-1, 0x5423, 0), "EPERM"),
    "a line discipline, with bits that the kernel drops": (16, 29, (-1, HIGH + 0x5423, 0), "EPERM"),
    "input into a terminal": (16, 29, (-1, 0x5412, 0), "EPERM"),
    "the console": (16, 29, (-1, 0x541C, 0), "EPERM"),
    "huge pages": (9, 222, (0, 1 << 21, 3, 0x40022, -1, 0), "EPERM"),
    "a file of huge pages": (319, 279, (0, 4), "EPERM"),
    "a segment of huge pages": (29, 194, (0, 1 << 21, 0o4600 | 0o1000), "EPERM"),
    "syslog": (103, 116, (3, 0, 0), "EPERM"),
    "personality": (135, 92, (0x0040000,), "EPERM"),
    "modify_ldt": (154, None, (0, 0, 0), "EPERM"),  # type: ignore[dict-item]
    "remap_file_pages": (216, 234, (0, 0, 0, 0, 0), "EPERM"),
}
TRY = """
import ctypes, errno, json, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
found = {}
for name, number, arguments in json.load(sys.stdin):
    ctypes.set_errno(0)
    answer = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    found[name] = errno.errorcode.get(ctypes.get_errno(), "none") if answer == -1 else "allowed"
print(json.dumps(found))
"""


def tries() -> bytes:
    column = 0 if platform.machine() == "x86_64" else 1
    rows = [(name, row[column], row[2]) for name, row in REFUSED.items() if row[column] is not None]
    return json.dumps(rows).encode()


def assert_refused(done: CallResult) -> None:
    assert (done.exit_code, done.stderr) == (0, b"")
    found = json.loads(done.stdout)
    assert len(found) >= len(REFUSED) - 1
    assert {name: error for name, error in found.items() if error != REFUSED[name][3]} == {}


async def test_what_reaches_for_the_kernel_is_refused_in_a_session(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        assert_refused(await box.call(Call(code=TRY, stdin=tries())))


async def test_what_reaches_for_the_kernel_is_refused_in_a_program_of_a_session(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        assert_refused(await box.call(Call(argv=("python3", "-I", "-c", TRY), stdin=tries())))


async def test_what_reaches_for_the_kernel_is_refused_in_a_cold_call(real_engine: Room) -> None:
    assert_refused(await real_engine.cold(Call(code=TRY, stdin=tries())))


async def test_what_reaches_for_the_kernel_is_refused_in_a_plain_exec(real_engine: Room) -> None:
    async with real_engine.sandbox(python=None) as box:
        assert box.python
        assert_refused(await box.call(Call(code=TRY, stdin=tries())))


FOREIGN_ABI = """
import ctypes, mmap, os
def dies_of(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def x32():
    ctypes.CDLL(None).syscall(0x40000000 | 39)
def i386():
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
print(dies_of(x32), dies_of(i386))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have no such ABIs")
async def test_calls_of_another_abi_end_the_process(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        done = await box.call(Call(code=FOREIGN_ABI))
        assert (done.stdout, done.stderr) == (b"-31 -31\n", b"")  # SIGSYS


# --- it is in force, or nothing runs -------------------------------------------------------------------------------------


@pytest.fixture
def loosened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that keeps the strict profile in its record and enforces another one."""
    loose = dict(strict_profile())
    loose["syscalls"] = [rule for rule in loose["syscalls"] if rule["names"] != ["getpriority"]]
    loose["syscalls"].append({"names": ["getpriority"], "action": "SCMP_ACT_ALLOW"})
    file = tmp_path / "loose.json"
    file.write_text(json.dumps(loose))
    monkeypatch.setattr(profile, "STRICT_PROFILE", file)
    monkeypatch.setattr(verify, "strict_profile", lambda: loose)


@pytest.mark.usefixtures("loosened")
async def test_sandbox_without_the_strict_profile_in_force_is_refused(real_engine: Room) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with real_engine.armed():
            pass
    assert caught.group_contains(ProfileMismatch, match="strict seccomp profile in force: asked 76, found '22'")
    with pytest.raises(ProfileMismatch, match="strict seccomp profile in force: asked 76, found '22'"):
        async with real_engine.sandbox(python=None):
            pass


@pytest.mark.usefixtures("loosened")
async def test_cold_call_without_the_strict_profile_in_force_never_begins(real_engine: Room) -> None:
    with pytest.raises(ProfileMismatch, match="strict seccomp profile is not in force") as caught:
        await real_engine.cold(Call(code="print('ran')"))
    assert not caught.value.started


@pytest.mark.parametrize("seccomp", ["engine", "path"])
async def test_profile_that_the_operator_chose_is_what_runs(real_engine: Room, seccomp: str, tmp_path: Path) -> None:
    code = "import os\ntry:\n    os.getpriority(0x454D4250, 0)\nexcept OSError as error:\n    print(error.errno)"
    if seccomp == "path":
        asked = {"index": 0, "op": "SCMP_CMP_EQ", "value": 0x454D4250}
        rule = {"names": ["getpriority"], "action": "SCMP_ACT_ERRNO", "errnoRet": 111, "args": [asked]}
        own = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}
        file = tmp_path / "own.json"
        file.write_text(json.dumps(own))
        seccomp = str(file)
    expected = b"22\n" if seccomp == "engine" else b"111\n"
    async with real_engine.armed(profile={"seccomp": seccomp}) as box:
        assert (await box.call(Call(code=code))).stdout == expected
    assert (await real_engine.cold(Call(code=code), seccomp=seccomp)).stdout == expected


async def test_nothing_is_allowed_that_this_engine_refuses(real_engine: Room) -> None:
    """The kept list is of one engine; here is the one that runs, where its containers' configuration can be read."""
    async with real_engine.armed(profile={"seccomp": "engine"}) as box:
        if not real_engine.info.private:
            return
        tasks = engine_paths().exec_root / "containerd/daemon/io.containerd.runtime.v2.task/moby"
        default = json.loads(await anyio.Path(tasks / box.container / "config.json").read_text())["linux"]["seccomp"]
        assert "read" in allowed(default)
        assert beyond(strict_profile(), default) == []


# --- what tools do ------------------------------------------------------------------------------------------------------

WORKS = {
    "processes": """
import multiprocessing, concurrent.futures, subprocess, threading, os, signal
def square(n):
    return n * n
for kind in ("fork",):
    with multiprocessing.get_context(kind).Pool(2) as pool:
        assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
queue = multiprocessing.Queue(); queue.put(1); assert queue.get() == 1
with multiprocessing.shared_memory.SharedMemory(create=True, size=64) if hasattr(multiprocessing, "shared_memory") else open("/dev/null") as _:
    pass
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(square, range(5))) == [0, 1, 4, 9, 16]
assert subprocess.run(["sh", "-c", "echo a | tr a b"], capture_output=True, text=True).stdout == "b\\n"
assert os.posix_spawn("/bin/true", ["true"], {}) > 0
fd = os.pidfd_open(os.getpid()); signal.pidfd_send_signal(fd, 0)
child = os.fork()
if child == 0:
    os.execve(os.open("/bin/true", os.O_RDONLY), ["true"], {})
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    "asyncio": """
import asyncio, signal, os
async def main():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await process.communicate(b"x"))[0] == b"x"
    async def serve(reader, writer):
        writer.write(await reader.read(3)); writer.close()
    for family in ({"host": "127.0.0.1"}, {"host": "::1"}):
        try:
            server = await asyncio.start_server(serve, port=0, **family)
        except OSError as error:
            assert error.errno == 99  # a kernel without IPv6
            continue
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(b"abc"); assert await reader.read() == b"abc"
        server.close()
    unix = await asyncio.start_unix_server(serve, "/tmp/s")
    reader, writer = await asyncio.open_unix_connection("/tmp/s")
    writer.write(b"abc"); assert await reader.read() == b"abc"
    assert await asyncio.to_thread(lambda: 5) == 5
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
    os.kill(os.getpid(), signal.SIGUSR1)
asyncio.run(main())
""",
    "sockets": """
import socket, ssl, select
assert socket.if_nameindex()[0][1] == "lo"
assert socket.getaddrinfo("127.0.0.1", 80)
with socket.socketpair()[0] as one:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
    udp.bind(("127.0.0.1", 0)); udp.settimeout(5); udp.sendto(b"x", udp.getsockname()); assert udp.recv(1) == b"x"
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); udp.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 3)
with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
    client = socket.create_connection(server.getsockname(), timeout=5)
    for level, option in ((socket.IPPROTO_TCP, socket.TCP_NODELAY), (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                          (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)):
        client.setsockopt(level, option, 1)
a, b, context = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.create_default_context()
try:
    context.wrap_bio(a, b, server_hostname="x").do_handshake()
except ssl.SSLWantReadError:
    pass
assert len(b.read()) > 100
with select.epoll() as poll:
    poll.register(0)
""",
    "files": """
import os, sqlite3, mmap, fcntl, tempfile, shutil, pty, ctypes
with sqlite3.connect("/tmp/x.db") as db:
    db.execute("pragma journal_mode=wal"); db.execute("create table t(a)"); db.execute("insert into t values(1)")
os.mkfifo("/tmp/fifo"); os.symlink("a", "/tmp/link"); os.link("/tmp/x.db", "/tmp/hard"); os.setxattr
with open("/tmp/m", "w+b") as file:
    file.truncate(4096); fcntl.lockf(file, fcntl.LOCK_EX)
    with mmap.mmap(file.fileno(), 4096) as memory:
        memory[:2] = b"hi"; memory.flush()
    os.fsync(file.fileno()); os.posix_fallocate(file.fileno(), 0, 8192)
shutil.copy("/tmp/m", "/tmp/n"); os.sync(); os.sendfile
master, slave = pty.openpty(); os.write(slave, b"x"); assert os.read(master, 1) == b"x"
fd = os.memfd_create("x"); os.write(fd, b"1")
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init(); assert libc.inotify_add_watch(watch, b"/tmp", 2) > 0
timer = libc.timerfd_create(1, 0); assert timer > 0
assert os.eventfd(0) > 0
""",
    "identity": """
import os, getpass, signal, resource, threading, ctypes, time
assert getpass.getuser() == "sandbox"
os.setuid(os.getuid()); os.setpriority(os.PRIO_PROCESS, 0, 5); assert os.getpriority(os.PRIO_PROCESS, 0) == 5
os.sched_setaffinity(0, os.sched_getaffinity(0)); os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
ctypes.CDLL(None).prctl(15, b"name", 0, 0, 0); assert open("/proc/self/comm").read() == "name\\n"
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()
""",
}


@pytest.mark.parametrize("what", WORKS)
async def test_what_a_tool_rightly_does_still_works(real_engine: Room, what: str) -> None:
    async with real_engine.armed() as box:
        for call in (Call(code=WORKS[what]), Call(argv=("python3", "-I", "-c", WORKS[what]))):
            done = await box.call(call)
            assert (done.exit_code, done.stdout, done.stderr) == (0, b"", b"")
            await box.call(Call(argv=("sh", "-c", "rm -rf /tmp/*")))
    done = await real_engine.cold(Call(code=WORKS[what]))
    assert (done.exit_code, done.stdout, done.stderr) == (0, b"", b"")
