"""Exchange frames with the host: read whole frames, and queue what the pipe does not take at once."""

import os
import select
import time

# Frames, as in executor.sandbox.wire: type (1 byte), sequence number (4), length (4), payload.
CALL, INPUT, INPUT_END, CREDIT, CANCEL, LEAVE, FINISH = 1, 2, 3, 4, 5, 6, 7
HELLO, ARMED, OUT, ERR, TAKEN, DONE, CLEAN, DIRTY, POISONED, CLEANING = 17, 18, 19, 20, 21, 22, 23, 24, 25, 26
HEADER = 9
CHUNK = 65536
MAX_FRAME = 1 << 26
CALL_HEADER = 32  # of a call: timeout and grace in microseconds, bytes of output, credit; 8 bytes each
NO_LIMIT, NO_CODE, OOM_KNOWN = 2**64 - 1, 0xFFFF, 4
BUFFERED = 1 << 18  # bytes that wait for the host before the runner stops reading the call's output
HOLD_SECONDS = 0.002  # a short call's output and its end then leave in one write, and the host wakes up once


def encode(kind, seq, payload=b""):
    """Return a frame's bytes."""
    return bytes((kind,)) + seq.to_bytes(4, "big") + len(payload).to_bytes(4, "big") + payload


class Wire:
    """The stream from the host and the stream to it. ``seq`` numbers the calls; it is 0 before the first."""

    def __init__(self):
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.host_gone = False
        self.seq = 0
        self.input_fd, self.output_fd = 0, 1
        self._held_since = 0.0

    def send(self, kind, payload=b""):
        """Queue a frame, and write what the pipe takes."""
        self.outbox += encode(kind, self.seq, payload)
        self.flush()

    def send_last(self, kind, payload=b""):
        """Queue a frame, and wait until the pipe has taken it."""
        self.send(kind, payload)
        self.flush_all()

    def flush(self):
        """Write what the pipe takes."""
        while self.outbox:
            try:
                count = os.write(self.output_fd, self.outbox)
            except BlockingIOError:
                return
            except OSError:
                self.host_gone = True
                self.outbox.clear()
                return
            del self.outbox[:count]

    def hold(self, kind, payload):
        """Queue a frame of output. It leaves in one write with what follows within ``HOLD_SECONDS``, if anything does."""
        if not self.outbox:
            self._held_since = time.monotonic()
        self.outbox += encode(kind, self.seq, payload)
        if len(self.outbox) > CHUNK:
            self.flush()

    def holding(self, now):
        """Seconds for which the queue may still wait; 0.0 when it should leave, or a write has already been tried."""
        return max(0.0, self._held_since + HOLD_SECONDS - now)

    def flush_all(self):
        """Wait until the pipe has taken everything; at most 30 seconds."""
        deadline = time.monotonic() + 30.0
        while self.outbox and not self.host_gone and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(self.output_fd, select.POLLOUT)
            poll.poll(1000)
            self.flush()

    def read_frames(self):
        """Return all whole frames that have arrived, as (type, sequence number, payload). Notes the end of stdin."""
        while True:
            try:
                data = os.read(self.input_fd, CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.host_gone = True
                break
            self.inbox += data
            if len(data) < CHUNK:
                break
        frames = []
        while len(self.inbox) >= HEADER:
            size = int.from_bytes(self.inbox[5:9], "big")
            if size > MAX_FRAME:
                os._exit(3)
            if len(self.inbox) < HEADER + size:
                break
            seq = int.from_bytes(self.inbox[1:5], "big")
            frames.append((self.inbox[0], seq, bytes(self.inbox[HEADER : HEADER + size])))
            del self.inbox[: HEADER + size]
        return frames
