"""What a scripted container is made of: its ``run`` argv read back, the records that follow, and its programs.

A call's behaviour is written in the call itself, as steps between semicolons: ``sleep 5; echo hello; exit 3``. They are
listed at ``run_steps``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio
from anyio.lowlevel import checkpoint

from executor.engine.protocol import ImageInfo
from executor.sandbox.seccomp import WITNESS_ERRNO
from executor.sandbox.verify_inside import INSIDE_FILES

SWITCHES = frozenset({"--rm", "-i", "--read-only", "-d", "--init", "--no-healthcheck"})


@dataclass(slots=True)
class RunWords:
    """A ``run`` argv, taken apart: every flag's values, the image, and the container's own argv."""

    flags: dict[str, list[str]]
    image: str
    argv: tuple[str, ...]

    @classmethod
    def parse(cls, args: Sequence[str]) -> RunWords:
        assert args[0] == "run"
        flags: dict[str, list[str]] = defaultdict(list)
        at = 1
        while args[at].startswith("-"):
            if args[at] in SWITCHES:
                flags[args[at]].append("")
                at += 1
            else:
                flags[args[at]].append(args[at + 1])
                at += 2
        return cls(flags, args[at], tuple(args[at + 1 :]))

    def one(self, flag: str, default: str = "") -> str:
        return self.flags[flag][0] if flag in self.flags else default

    @property
    def name(self) -> str:
        return self.one("--name")

    @property
    def labels(self) -> dict[str, str]:
        return dict(label.split("=", 1) for label in self.flags.get("--label", []))

    @property
    def staging(self) -> str:
        for spec in self.flags.get("--mount", []):
            return spec.split('"source=')[1].split('"')[0]
        return ""


def inspect_record(words: RunWords, image: ImageInfo, container: str, *, running: bool) -> dict[str, Any]:
    """The record that a faithful engine keeps of a container started by these words."""
    memory = int(words.one("--memory", "0m")[:-1]) << 20
    ulimits = []
    for spec in words.flags.get("--ulimit", []):
        key, _, value = spec.partition("=")
        soft, _, hard = value.partition(":")
        ulimits.append({"Name": key, "Soft": int(soft), "Hard": int(hard or soft)})
    mounts = [{"Type": "tmpfs", "Source": "", "Destination": "/tmp", "RW": True}]
    if words.staging:
        mounts.append({"Type": "bind", "Source": words.staging, "Destination": "/tool", "RW": False})
    return {
        "Id": container,
        "Name": "/" + words.name,
        "Image": image.id,
        "State": {"Running": running},
        "Mounts": mounts,
        "Config": {
            "Labels": words.labels,
            "User": words.one("--user"),
            "Env": [*image.env, *words.flags.get("--env", [])],
        },
        "HostConfig": {
            "NetworkMode": words.one("--network"),
            "ReadonlyRootfs": "--read-only" in words.flags,
            "Privileged": False,
            "CapAdd": None,
            "CapDrop": words.flags.get("--cap-drop"),
            "SecurityOpt": words.flags.get("--security-opt"),
            "PidsLimit": int(words.one("--pids-limit", "0")),
            "Tmpfs": {spec.split(":")[0]: spec for spec in words.flags.get("--tmpfs", [])},
            "Memory": memory,
            "MemorySwap": int(words.one("--memory-swap", "0m")[:-1]) << 20,
            "NanoCpus": round(float(words.one("--cpus", "0")) * 1e9),
            "Ulimits": ulimits,
            "PidMode": "",
            "UTSMode": "",
            "IpcMode": "private",
            "LogConfig": {"Type": words.one("--log-driver")},
            "Runtime": words.one("--runtime", "runc"),
        },
    }


def inside_files(words: RunWords, user: str) -> dict[str, str]:
    """What the probe's files hold inside a faithful container."""
    uid, _, gid = user.partition(":")
    caps = "".join(f"{key}:\t{0:016x}\n" for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    tmpfs = dict(option.split("=", 1) for option in words.one("--tmpfs").split(",") if "=" in option)
    owner = "".join(f",{key}={tmpfs[key]}" for key in ("uid", "gid") if key in tmpfs)
    size = int(tmpfs["size"][:-1]) * 1024
    texts = dict.fromkeys(INSIDE_FILES, "")
    return texts | {
        "/proc/self/status": f"Name:\tcat\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{gid}\t{gid}\t{gid}\t{gid}\n"
        f"{caps}NoNewPrivs:\t1\nSeccomp:\t2\n",
        "/proc/self/mountinfo": "1 0 0:1 / / ro,relatime - overlay overlay ro\n"
        f"2 1 0:2 / /tmp rw,nosuid,noexec - tmpfs tmpfs rw,size={size}k{owner}\n3 1 0:3 / /tool ro - ext4 /dev/x rw\n",
        "/proc/net/dev": "Inter-|   Receive\n face |bytes\n    lo: 0 0 0\n",
        "/sys/fs/cgroup/pids.max": words.one("--pids-limit") + "\n",
        "/sys/fs/cgroup/memory.max": f"{int(words.one('--memory', '0m')[:-1]) << 20}\n",
        "/tool/nonce": (Path(words.staging) / "nonce").read_text("ascii"),
    }


def probe_output(words: RunWords, user: str, argv: Sequence[str]) -> bytes:
    """What ``cat`` of the probe's files prints."""
    texts = inside_files(words, user)
    return "".join(texts[file] for file in argv[1:]).encode()


def hello_of(words: RunWords, user: str, inside: Callable[[bytes], bytes]) -> dict[str, Any]:
    """The facts of a runner in a faithful container, its files as ``inside`` changes them."""
    files = {file: inside(text.encode()).decode() for file, text in inside_files(words, user).items()}
    nonce = files.pop("/tool/nonce").strip()
    return {
        "files": files, "nonce": nonce, "undumpable": True, "subreaper": True, "alone": True, "python": "3.11.2",
        "problem": "", "witness": WITNESS_ERRNO,
    }  # fmt: skip


class Pipe:
    """Bytes in memory with an end; what is written after the end is lost."""

    def __init__(self) -> None:
        self.buffer, self.closed, self._news, self._read = bytearray(), False, anyio.Event(), anyio.Event()

    async def put(self, data: bytes) -> None:
        """As ``write``; for programs, whose output may have to wait."""
        self.write(data)

    async def drained(self) -> None:
        """Wait until something was read."""
        await self._read.wait()

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.buffer += data
            self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def read(self, size: int = 65_536) -> bytes:
        """What there is, at most ``size`` bytes; ``b""`` at the end. Always a checkpoint."""
        await checkpoint()
        while not self.buffer and not self.closed:
            await self._news.wait()
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        self._read.set()
        self._read = anyio.Event()
        return data

    async def exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = await self.read(size - len(data))
            if not chunk:
                break
            data += chunk
        return bytes(data)

    async def rest(self) -> bytes:
        data = bytearray()
        while chunk := await self.read():
            data += chunk
        return bytes(data)


class ScriptedChannel:
    """An attached client in memory; what it has started outlives it. A ``stuck`` one takes no more stdin."""

    def __init__(self) -> None:
        self.stuck = False
        self.stdin, self.stdout, self.stderr = Pipe(), Pipe(), Pipe()
        self._code: int | None = None
        self._ended = anyio.Event()

    def send_at_once(self, data: bytes) -> bool:
        if self.stuck or self.stdin.closed:
            return False
        self.stdin.write(data)
        return True

    async def send(self, data: bytes) -> None:
        await checkpoint()
        if self.stuck:
            await anyio.sleep_forever()
        if self.stdin.closed:
            raise BrokenPipeError("the engine client's stdin is closed")
        self.stdin.write(data)

    async def close_stdin(self) -> None:
        await checkpoint()
        self.stdin.close()

    async def receive_stdout(self) -> bytes:
        return await self.stdout.read()

    async def receive_stderr(self) -> bytes:
        return await self.stderr.read()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._code is not None
        return self._code

    @property
    def ended(self) -> bool:
        return self._code is not None

    def kill(self) -> None:
        self.end(-9)

    def end(self, code: int, message: str = "") -> None:
        """The client ends by itself, with a last message of the engine's on stderr."""
        if self._code is None:
            self.stderr.write(message.encode())
            self._code = code
            for pipe in (self.stdin, self.stdout, self.stderr):
                pipe.close()
            self._ended.set()


@dataclass(slots=True)
class Asked:
    """A call as it arrived inside: its steps, its environment and what is left of stdin."""

    steps: str
    env: dict[str, str] = field(default_factory=dict)


async def read_field(stdin: Pipe) -> bytes | None:
    """One length and as many bytes; ``None`` where they are cut off."""
    head = await stdin.exactly(4)
    size = int.from_bytes(head, "big")
    data = await stdin.exactly(size)
    return data if len(head) == 4 and len(data) == size else None


async def read_request(stdin: Pipe) -> Asked:
    """Read the fields of ``executor/inside/plain.py`` as it does; where they are cut off it exits with 125."""
    fields = [await read_field(stdin) for _ in range(3)]
    if None in fields:
        return Asked("exit 125")
    what, env, body = ((data or b"").decode().split("\0") for data in fields)
    entries = dict(entry.partition("=")[::2] for entry in env if entry)
    return Asked(" ".join(body) if what[1] == "argv" else "\0".join(body), entries)


Special = Callable[[str, str], Awaitable[None]]


class Writable(Protocol):
    """Where a program writes."""

    async def put(self, data: bytes) -> None: ...


class Streams(Protocol):
    """A program's three streams."""

    @property
    def stdin(self) -> Pipe: ...
    @property
    def stdout(self) -> Writable: ...
    @property
    def stderr(self) -> Writable: ...


async def run_steps(asked: Asked, channel: Streams, special: Special) -> int:
    """Carry out a call's steps and return its exit status.

    ``sleep SECONDS``, ``echo TEXT``, ``err TEXT``, ``exit STATUS``, ``cat`` (stdin to stdout), ``env NAME``,
    ``flood BYTES``, ``hang``. Everything else is the engine's: ``special(word, argument)``.
    """
    for step in asked.steps.split(";"):
        word, _, rest = step.strip().partition(" ")
        match word:
            case "sleep":
                await anyio.sleep(float(rest))
            case "echo":
                await channel.stdout.put(rest.encode() + b"\n")
            case "err":
                await channel.stderr.put(rest.encode() + b"\n")
            case "exit":
                return int(rest)
            case "cat":
                await channel.stdout.put(await channel.stdin.rest())
            case "env":
                await channel.stdout.put(asked.env.get(rest, "(unset)").encode() + b"\n")
            case "flood":
                await channel.stdout.put(b"x" * int(rest))
            case "hang":
                await anyio.sleep_forever()
            case _:
                await special(word, rest)
    return 0
