"""Attacks the wire with random bytes; ``benchmarks/wire_fuzz.py`` does it to a job that trains, and for longer.

Three kinds of attack, in turns, by a generator of random numbers:

* between: an attacker between two peers of the job changes, drops, doubles, moves and cuts messages;
* stranger: a peer without the token sends data that resemble the handshake;
* server: unauthenticated peers, and peers that break the rules, at a live server, while peers of the job connect.

Every time it is asserted that only a WireError is ever raised, that what arrives is the beginning of what was sent,
that no unauthenticated peer is accepted, and that the server continues, with no more open files than before.
"""

import contextlib
import os
import random
import socket
import struct
import time
from collections import Counter

from moc.runtime.connections import connect, resolve
from moc.runtime.protocol import Channel, Message, WireError
from tests.unit.runtime.peers import OTHER_TOKEN, TOKEN, frame, open_pair, serving

BODY_LIMIT = 1 << 16
SIZES = [0, 1, 2, 10, 300, 5000]
HELLO_BYTES = 50
HANDSHAKE_BYTES = HELLO_BYTES + 32


def pieces(rng, data):
    """The bytes, cut at random."""
    position = 0
    while position < len(data):
        size = rng.choice([1, 7, 50, 1000, len(data)])
        yield bytes(data[position : position + size])
        position += size


def changed(rng, data):
    """The bytes with one thing wrong, or none."""
    data = bytearray(data)
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2)) if data else (0, 0)
    kind = rng.choice(["bit", "byte", "drop", "double", "noise", "swap", "cut", "length", "none"])
    if kind == "bit" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "byte" and data:
        data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "drop":
        del data[at:to]
    elif kind == "double":
        data[at:at] = data[at:to]
    elif kind == "noise":
        data[at:at] = rng.randbytes(rng.choice(SIZES))
    elif kind == "swap":
        data = data[at:to] + data[:at] + data[to:]
    elif kind == "cut":
        del data[at:]
    elif kind == "length":
        data[at : at + 12] = struct.pack(">IQ", rng.choice([0, 1, 2**20, 2**32 - 1]), rng.choice([0, 2**16, 2**63]))
    return bytes(data)


def between(rng):
    sender, receiver = open_pair(BODY_LIMIT)
    sent = [rng.randbytes(rng.choice(SIZES)) for _ in range(rng.randrange(1, 8))]
    frames = [frame(sender, number, body) for number, body in enumerate(sent)]
    if rng.random() < 0.5:
        rng.shuffle(frames)
        frames += rng.sample(frames, rng.randrange(len(frames) + 1))
        del frames[rng.randrange(len(frames)) :]
    stream = b"".join(frames) if rng.random() < 0.5 else changed(rng, b"".join(frames))
    arrived = []
    with contextlib.suppress(WireError):
        for piece in pieces(rng, stream):
            arrived += receiver.receive(piece)
            assert len(receiver._buffer) < (1 << 20) + BODY_LIMIT + len(piece) + 100
        receiver.handle_end()
    assert [message.header["number"] for message in arrived] == list(range(len(arrived)))
    assert [message.body for message in arrived] == sent[: len(arrived)]
    return "between, all" if len(arrived) == len(sent) else "between, refused"


def handshake_like(rng, heard):
    """Messages of a peer that knows this repository, but not the token."""
    hello = struct.pack(
        ">8sHQ32s", b"moc-wire", rng.choice([1, 1, 1, 1, 2, 0]), rng.randrange(2**64), rng.randbytes(32)
    )
    rest = rng.choice([rng.randbytes(32), heard[-32:], heard[18:50], bytes(32), b""])
    return changed(rng, rng.choice([hello + rest, rng.randbytes(rng.choice(SIZES)), heard, hello + rest + heard]))


def stranger(rng):
    channel = Channel(TOKEN, rng.choice(["client", "server"]), BODY_LIMIT)
    heard = channel.handshake_bytes()
    peer = Channel(rng.choice([OTHER_TOKEN, rng.randbytes(32)]), rng.choice(["client", "server"]))
    try:
        if rng.random() < 0.5:  # a real handshake up to the proof, so that there is one to be heard
            channel.receive(peer.handshake_bytes())
            heard += channel.handshake_bytes()
        for piece in pieces(rng, handshake_like(rng, heard)):
            assert 0 < channel.bytes_wanted <= HANDSHAKE_BYTES
            channel.receive(piece)
            heard += channel.handshake_bytes()
        channel.handle_end()
    except WireError:
        pass
    assert not channel.is_open
    return "stranger, refused"


def at_the_server(rng, world):
    attack(rng, world.address, TOKEN)
    if rng.random() < 0.1:
        with connect(world.address, TOKEN, timeout=60) as connection:
            sent = Message({"kind": "test"}, rng.randbytes(rng.choice(SIZES)))
            connection.send(sent)
            assert connection.recv(timeout=60) == sent
        return "server, served"
    return "server, attacked"


def attack(rng, address, token):
    """Connects to a server once, and does what a peer must not do.

    Returns:
        which kind of peer it was.
    """
    family, where = resolve(address)[0]
    kind = rng.choice(["stranger", "breaks the rules"])
    with socket.socket(family, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError, WireError):
        sock.settimeout(60)
        sock.connect(where)
        if kind == "stranger":
            _intrude(rng, sock)
        else:
            _misbehave(rng, sock, token)
        if rng.random() < 0.2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return kind


def _intrude(rng, sock):
    """A peer that does not have the token; it gets to hear a hello and a proof, and nothing else."""
    heard = sock.recv(HELLO_BYTES) if rng.random() < 0.5 else b""
    sock.sendall(handshake_like(rng, heard or rng.randbytes(HELLO_BYTES)))
    if rng.random() < 0.5:
        sock.shutdown(socket.SHUT_WR)
        while said := sock.recv(1 << 16):
            heard += said
    assert len(heard) <= HANDSHAKE_BYTES, f"a stranger was told {len(heard)} bytes"


def _misbehave(rng, sock, token):
    """A peer that has the token, but breaks the rules after the handshake."""
    channel = Channel(token, "client")
    while not channel.is_open:
        sock.sendall(channel.handshake_bytes())
        channel.receive(sock.recv(channel.bytes_wanted))
    channel._peer_body_limit = 1 << 40
    stream = b"".join(frame(channel, number, rng.randbytes(rng.choice(SIZES))) for number in range(3))
    sock.sendall(changed(rng, stream))


def fuzz(seconds, seed):
    """Attacks for this long, at least once in each way.

    Returns:
        how many attacks there were, by kind and outcome.
    """
    rng, counts = random.Random(seed), Counter()
    with serving(body_limit=BODY_LIMIT, handshake_timeout=60.0) as world:
        at_the_server(rng, world)
        before, until = len(os.listdir("/proc/self/fd")), time.monotonic() + seconds
        while time.monotonic() < until or len(counts) < 6:
            chosen = rng.choice([between, stranger, at_the_server])
            counts[chosen(rng, world) if chosen is at_the_server else chosen(rng)] += 1
            while not world.refused.empty():
                world.refused.get()
                counts["server, refused"] += 1
        _settle(before)
    return counts


def _settle(before):
    """Open files go back to as many as there were, as soon as the server has noticed the last peers' end."""
    for _ in range(1200):
        if len(os.listdir("/proc/self/fd")) <= before:
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(os.listdir('/proc/self/fd'))} open files, {before} at the beginning")
