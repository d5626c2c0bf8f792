# mypy: ignore-errors
"""The program that writes, reads or lists one place inside a sandbox; it runs there, as a call like any other.

It runs in the image's own Python (3.8 or newer). Its stdin is one line of JSON, and for a write the file's bytes after it;
its stdout is the answer. What it refuses goes to stderr as JSON, with exit status ``REFUSED``.
"""

import contextlib
import errno
import json
import os
import signal
import stat
import sys

WRITABLE = ("/tmp", "/dev/shm")  # noqa: S108 - inside, these are the places that can be written
READABLE = WRITABLE + ("/tool",)  # noqa: RUF005 - for old interpreters too
REFUSED = 3
DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    pass


def resolve(path, roots):
    """The place that a path means once every link is followed; it must be inside one of the roots."""
    whole = path if path.startswith("/") else f"{WRITABLE[0]}/{path}"
    real = os.path.realpath(whole)
    for root in map(os.path.realpath, roots):
        if real == root or real.startswith(root + "/"):
            return real, real == root
    leads = "is" if real == os.path.normpath(whole) else f"leads to {real},"
    raise Refused("invalid", "", f"it {leads} outside of {', '.join(roots)}")


def open_directory(real, parents=False):
    """Open a resolved directory step by step: a link that somebody puts in its way meanwhile is not followed."""
    fd = os.open("/", DIRECTORY)
    for name in real.split("/"):
        if not name:
            continue
        try:
            below = os.open(name, DIRECTORY, dir_fd=fd)
        except FileNotFoundError:
            if not parents:
                raise
            with contextlib.suppress(FileExistsError):  # made by somebody else meanwhile
                os.mkdir(name, 0o755, dir_fd=fd)
            below = os.open(name, DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    return fd


def require_regular(mode):
    if stat.S_ISDIR(mode):
        raise Refused("failed", "EISDIR", "it is a directory")
    if not stat.S_ISREG(mode):
        raise Refused("failed", "EINVAL", "it is not a regular file")


def write(asked):
    real, is_root = resolve(asked["path"], WRITABLE)
    if is_root:
        require_regular(stat.S_IFDIR)
    place, name = os.path.split(real)
    try:
        directory = open_directory(place, asked["parents"])
    except FileNotFoundError:
        raise Refused("failed", "ENOENT", "its directory does not exist; parents=True makes it") from None
    with contextlib.suppress(FileNotFoundError):
        require_regular(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    # Out of time is out of time, but nothing half written may stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    temporary = f".emberpool-{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, 0o644, dir_fd=directory)
        left = asked["size"]
        while left:
            data = memoryview(sys.stdin.buffer.read(min(left, 1 << 20)))
            if not data:
                raise Refused("failed", "", "its bytes did not all arrive")
            left -= len(data)
            while data:
                data = data[os.write(fd, data) :]
        os.close(fd)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def read(asked):
    real, is_root = resolve(asked["path"], READABLE)
    if is_root:
        require_regular(stat.S_IFDIR)
    place, name = os.path.split(real)
    # Opening a pipe would wait for its other end.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=open_directory(place))
    about = os.fstat(fd)
    require_regular(about.st_mode)
    if about.st_size > asked["max_bytes"]:
        size, most = about.st_size, asked["max_bytes"]
        raise Refused("failed", "EFBIG", f"it is {size} bytes; at most {most} are read (max_bytes)")
    left = about.st_size
    while left:
        data = os.read(fd, min(left, 1 << 20))
        if not data:
            raise Refused("failed", "", "it became shorter while it was read")
        left -= len(data)
        say(1, data)


def entries(asked):
    real, _ = resolve(asked["path"], READABLE)
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=open_directory(real))
    found = []
    with os.scandir(fd) as names:
        for entry in names:
            try:
                about = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # gone meanwhile
            found.append((entry.name, kind_of(about.st_mode), about.st_size, about.st_mtime))
    data = json.dumps(sorted(found)).encode("ascii")
    if len(data) > asked["max_bytes"]:
        size, most = len(data), asked["max_bytes"]
        why = f"its {len(found)} entries take {size} bytes; at most {most} are listed (call.max_output)"
        raise Refused("failed", "EFBIG", why)
    say(1, data)


def kind_of(mode):
    for test, kind in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink")):
        if test(mode):
            return kind
    return "other"


def say(fd, data):
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data) :]


def main():
    asked = json.loads(sys.stdin.buffer.readline())
    try:
        {"write": write, "read": read, "list": entries}[asked["do"]](asked)
    except Refused as error:
        kind, code, message = error.args
    except OSError as error:
        kind, code, message = "failed", errno.errorcode.get(error.errno, ""), os.strerror(error.errno or 0)
        if error.errno == errno.EFBIG:
            import resource  # here alone: no other call pays for it

            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            message = f"it is {asked['size']} bytes; a file may grow to {most} (sandbox.file_size_mb)"
    else:
        return
    say(2, json.dumps({"kind": kind, "code": code, "message": message}).encode("ascii"))
    os._exit(REFUSED)


main()
