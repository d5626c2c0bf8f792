"""A program of some 160 bytes that recognises the strict seccomp profile in images without Python.

It calls ``getpriority`` as ``executor.sandbox.seccomp`` describes, and exits with the error number that it got.
"""

from __future__ import annotations

import struct
from pathlib import Path

from executor.sandbox.seccomp import WITNESS_WHICH

_LOAD_AT = 0x400000
_HEADERS = 64 + 56
_MACHINES = {
    # mov edi, WHICH; xor esi, esi; mov eax, 140; syscall; neg eax; mov edi, eax; mov eax, 231; syscall
    "amd64": (62, b"\xbf%b\x31\xf6\xb8\x8c\x00\x00\x00\x0f\x05\xf7\xd8\x89\xc7\xb8\xe7\x00\x00\x00\x0f\x05"),
    # ldr w0, WHICH; mov w1, 0; mov w8, 141; svc 0; neg w0, w0; mov w8, 94; svc 0; WHICH
    "arm64": (
        183,
        struct.pack("<7I", 0x180000E0, 0x52800001, 0x528011A8, 0xD4000001, 0x4B0003E0, 0x52800BC8, 0xD4000001) + b"%b",
    ),
}


def program(architecture: str) -> bytes:
    """Return the program, an ELF file, for an ``architecture`` as image manifests name it; ``b""`` for an unknown one."""
    if architecture not in _MACHINES:
        return b""
    machine, code = _MACHINES[architecture]
    text = code.replace(b"%b", struct.pack("<I", WITNESS_WHICH))
    entry, size = _LOAD_AT + _HEADERS, _HEADERS + len(text)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head = struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, _LOAD_AT, _LOAD_AT, size, size, 0x10000)
    return ident + head + load + text


def write(file: Path, architecture: str) -> bool:
    """Write the program to ``file``, executable by all, and return whether there is one for this ``architecture``."""
    text = program(architecture)
    if text:
        file.write_bytes(text)
        file.chmod(0o755)
    return bool(text)
