"""What the workloads that are written in Python share."""

import hashlib
import socket
import subprocess
import sys
import time


def size():
    """MiB of data, and how much work in per cent of what is ordinary."""
    return int(sys.argv[1]), int(sys.argv[2])


def say(line):
    print(line, flush=True)


def wrong(what):
    say(f"RESULT WRONG {what}")
    sys.exit(1)


def value(key, version, length):
    """Bytes that follow from key and version, and no two pages of which are alike."""
    return hashlib.shake_128(f"{key} {version}".encode()).digest(length)


def run(*words):
    """Runs a program, whose output is shown; its failure is the workload's."""
    sys.stdout.flush()
    if subprocess.run(words).returncode != 0:
        wrong(f"{words[0]} failed")


def connect(to):
    """To a TCP port, or to the path of a socket."""
    if isinstance(to, int):
        return socket.create_connection(("127.0.0.1", to))
    line = socket.socket(socket.AF_UNIX)
    line.connect(to)
    return line


def server(words, to):
    """Starts a server, and returns it once it listens."""
    process = subprocess.Popen(words)
    for _ in range(1200):
        try:
            connect(to).close()
            return process
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.1)
    wrong(f"{words[0]} does not listen")


class Line:
    """A connection that is spoken to in lines and counted bytes."""

    def __init__(self, to):
        self.socket = connect(to)
        self.file = self.socket.makefile("rb", buffering=1 << 16)

    def send(self, *parts):
        self.socket.sendall(b"".join(parts))

    def line(self):
        return self.file.readline().rstrip(b"\r\n")

    def bytes(self, length):
        found = self.file.read(length)
        self.file.read(2)
        return found


class Sum:
    """A checksum of all that it is given."""

    def __init__(self):
        self.hash = hashlib.blake2b(digest_size=16)

    def add(self, what):
        self.hash.update(what if isinstance(what, (bytes, memoryview)) else str(what).encode())

    def __str__(self):
        return self.hash.hexdigest()
