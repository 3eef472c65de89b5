"""Messages between the processes of a job, and the token that authenticates them; pure protocol, without I/O.

A message has a JSON header and raw bytes, never a pickle.  ``docs/reference/wire.md`` has the layout.  :class:`Channel`
turns bytes into messages and back, and never blocks.  Sockets are in ``connections.py`` (threads) and
``async_connections.py`` (asyncio).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moc.errors import UserError, code_of
from moc.files.decode import parse

TOKEN_BYTES = 32
TOKEN_FILE_VARIABLE, TOKEN_VARIABLE = "MOC_TOKEN_FILE", "MOC_TOKEN"

_HEX = re.compile(rf"[0-9a-fA-F]{{{2 * TOKEN_BYTES}}}")
_MAX_FILE_BYTES = 4 * TOKEN_BYTES  # maximum bytes read from a file


class TokenError(UserError, RuntimeError):
    """The token is missing or unusable; the message names the source and the remedy."""


def make_token() -> bytes:
    """Returns 32 random bytes from the operating system."""
    return secrets.token_bytes(TOKEN_BYTES)


def make_token_file(path: Path | str) -> bytes:
    """Writes a new token, in hex, to a new file that only its owner can read; returns its 32 bytes.

    Raises:
        TokenError: the file exists already.
    """
    token = make_token()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise TokenError(
            f"the token file {path} exists already. Fix: use it, or remove it first",
            code="token-file-exists",
        ) from None
    with open(descriptor, "w") as file:
        file.write(token.hex() + "\n")
    return token


def token_from_environment(environment: Mapping[str, str] = os.environ) -> bytes:
    """Returns the job's token from the file in ``MOC_TOKEN_FILE``, or from ``MOC_TOKEN``; both have 64 hex digits.

    Raises:
        TokenError: neither variable is set, the file is unreadable, accessible to others or another user's, or the
            token is malformed.
    """
    if path := environment.get(TOKEN_FILE_VARIABLE):
        return _parse_token(_read_token_file(path), f"the file {path} ({TOKEN_FILE_VARIABLE})")
    if text := environment.get(TOKEN_VARIABLE):
        return _parse_token(text, TOKEN_VARIABLE)
    raise TokenError(
        f"this job has no token. Fix: set {TOKEN_FILE_VARIABLE} to a file with one, or {TOKEN_VARIABLE} to 64 hex "
        "digits",
        code="token-missing",
    )


def _read_token_file(path: str) -> str:
    try:
        # O_NONBLOCK: opening a FIFO must not block
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise TokenError(
            f"the token file {path} ({TOKEN_FILE_VARIABLE}) cannot be read: {error.strerror}. Fix: name a file that "
            "this user can read",
            code="token-file-unreadable",
        ) from None
    try:
        status = os.fstat(descriptor)
        mode = status.st_mode
        if not stat.S_ISREG(mode):
            raise TokenError(
                f"the token file {path} ({TOKEN_FILE_VARIABLE}) is not a regular file. Fix: name a regular file",
                code="token-file-unreadable",
            )
        if status.st_uid != os.geteuid():
            raise TokenError(
                f"the token file {path} belongs to another user, who knows it. Fix: make one of your own",
                code="token-file-exposed",
            )
        if mode & 0o077:
            raise TokenError(
                f"others than its owner have access to the token file {path}. Fix: chmod 600 it",
                code="token-file-exposed",
            )
        return os.read(descriptor, _MAX_FILE_BYTES).decode("ascii", "replace")
    finally:
        os.close(descriptor)


def _parse_token(text: str, source: str) -> bytes:
    if not _HEX.fullmatch(text.strip()):  # even a malformed token is a secret: not in the message
        raise TokenError(
            f"{source} does not hold a token, which is {2 * TOKEN_BYTES} hex digits. Fix: set 64 hex digits",
            code="token-malformed",
        )
    return bytes.fromhex(text.strip())


HEADER_LIMIT = 1 << 20
"""Maximum bytes of a message's JSON header."""


class WireError(UserError, RuntimeError):
    """The peer violated the protocol, or does not use it; the connection is unusable."""

    code = "wire-protocol-violated"
    remedy = "install the same release on all nodes; report the message as an issue if they have the same"


class _Header(dict):
    """A received header; a missing key is the sender's error."""

    def __missing__(self, name: str):
        raise WireError(f"its message {self.get('kind')} has no field {name}")


@dataclass(frozen=True)
class Message:
    """A message between two processes.

    Attributes:
        header: JSON values, with a string ``kind`` among them. As in JSON, keys are strings and tuples arrive as lists;
            infinities and NaN are allowed.
        body: any contiguous buffer, which must not change while it is sent; it arrives as a read-only ``memoryview``.
    """

    header: dict
    body: bytes | bytearray | memoryview = field(default=b"", repr=False)

    @property
    def kind(self) -> str:
        """The kind of the message."""
        return self.header["kind"]


def encode_header(header: dict) -> bytes:
    """Encodes a header as JSON.

    Raises:
        ValueError, TypeError: it is no valid header, is too large, or has values that JSON cannot represent.
    """
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError("the header of a message is a dict with a string named kind")
    try:
        text = json.dumps(header, separators=(",", ":")).encode()
    except RecursionError:
        raise ValueError(f"{header['kind']}: the header is nested too deeply") from None
    if len(text) > HEADER_LIMIT:
        raise ValueError(
            f"{header['kind']}: a header of {len(text)} bytes is over the limit of {HEADER_LIMIT}: put data in the body"
        )
    return text


def decode_header(data: bytes) -> dict:
    """Decodes a header from JSON.

    Raises:
        ValueError: it is malformed.
    """
    header = parse(data)
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError("it is not a dict with a string named kind")
    return _Header(header)


def byte_view(body) -> memoryview:
    """Returns a byte view of any contiguous buffer, without a copy.

    Raises:
        TypeError: it is not a buffer, or not contiguous.
    """
    view = memoryview(body)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view of another shape cannot be cast


def pack_values(kind: str, values: Mapping[str, bytes]) -> Message:
    """Returns a message that carries values of the rendezvous store by key."""
    sizes = [len(value) for value in values.values()]
    return Message({"kind": kind, "keys": list(values), "sizes": sizes}, b"".join(values.values()))


def unpack_values(header: Mapping, body: bytes | bytearray | memoryview) -> dict[str, bytes]:
    """Returns the values by key that a message carries; raises WireError if it is malformed."""
    keys, sizes, data, ends = check_keys(header["keys"]), header["sizes"], bytes(body), [0]
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise WireError(f"the sizes of values are numbers, not {sizes!r}")
    for size in sizes:
        ends.append(ends[-1] + size)
    if len(sizes) != len(keys) or ends[-1] != len(data):
        raise WireError(f"{len(keys)} values have {len(sizes)} sizes, and {len(data)} bytes instead of {ends[-1]}")
    return {key: data[start:stop] for key, start, stop in zip(keys, ends, ends[1:], strict=False)}


def check_key(key: object) -> str:
    """Returns a key of the rendezvous store; raises WireError if it is no text."""
    if not isinstance(key, str):
        raise WireError(f"a key of the store is text, not {key!r}")
    return key


def check_keys(keys: object) -> list[str]:
    """Returns keys of the rendezvous store; raises WireError if they are no list of texts."""
    if not isinstance(keys, list):
        raise WireError(f"the keys of the store are a list, not {keys!r}")
    return [check_key(key) for key in keys]


VERSION = 1
DEFAULT_BODY_LIMIT = 64 << 20
"""Bytes of the largest body that a receiver accepts by default."""
READ_BYTES = 256 << 10
"""Bytes to request per read of messages."""

_MAGIC = b"moc-wire"
_START = struct.Struct(">8sH")  # magic, version: fixed for all versions
_HELLO = struct.Struct(">8sHQ32s")  # magic, version, body limit, nonce
_PREFIX = struct.Struct(">IQ")  # bytes of header and body
_SEQUENCE = struct.Struct(">Q")
_MAC_BYTES = hashlib.sha256().digest_size
_ROLES = ("client", "server")


class PeerGoneError(WireError):
    """The peer is unreachable or has disconnected; reconnecting may help."""

    code = "peer-unreachable"
    remedy = "read the output of the other process, and look at the network"


class _State(enum.Enum):
    HELLO = "the peer's hello is awaited"
    PROOF = "the peer's proof is awaited"
    OPEN = "messages go both ways"
    DEAD = "nothing goes"


class Channel:
    """One end of a connection: hello, then proof, then messages.

    Both ends send a hello with a nonce, and prove that they know the token by HMAC-SHA256 over their role and both
    hellos. Token and nonces yield a key for each direction (HKDF, RFC 5869). Every message carries an HMAC-SHA256 over
    its number and all its bytes. Changed, replayed, reordered or missing messages are therefore refused.

    Not thread-safe, except for one thread in :meth:`send` while another is in :meth:`receive` or :meth:`handle_end`.

    Args:
        token: the job's secret, 32 bytes.
        role: ``client`` for the connecting end, ``server`` for the other.
        body_limit: bytes of the largest body that this end accepts; announced to the peer.
        peer: name of the peer, for messages.
    """

    def __init__(self, token: bytes, role: str, body_limit: int = DEFAULT_BODY_LIMIT, peer: str = "the peer"):
        if len(token) != TOKEN_BYTES:
            raise ValueError(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")
        if role not in _ROLES:
            raise ValueError(f"the role of a channel is one of {', '.join(_ROLES)}, not {role}")
        self._token, self._role, self._body_limit, self._peer = token, role, body_limit, peer
        self._state, self._failure = _State.HELLO, WireError()
        self._hello = _HELLO.pack(_MAGIC, VERSION, body_limit, secrets.token_bytes(32))
        self._handshake, self._buffer = self._hello, bytearray()
        self._transcript = self._send_key = self._receive_key = b""
        self._peer_body_limit = self._sent = self._received = 0

    @property
    def is_open(self) -> bool:
        """Whether the peer is authenticated, and messages can be exchanged."""
        return self._state is _State.OPEN

    @property
    def bytes_wanted(self) -> int:
        """Maximum bytes to read next; before authentication, no more than the peer's hello and proof."""
        if self._state is _State.HELLO:
            return _HELLO.size - len(self._buffer)
        return _MAC_BYTES - len(self._buffer) if self._state is _State.PROOF else READ_BYTES

    def handshake_bytes(self) -> bytes:
        """Returns handshake bytes to send now, possibly none. Call it first and after each :meth:`receive`."""
        due, self._handshake = self._handshake, b""
        return due

    def send(self, message: Message) -> list[bytes | memoryview]:
        """Returns the buffers of a message, to be sent in this order and without others between; copies no body.

        Raises:
            WireError: the handshake is incomplete, or the channel is dead.
            ValueError, TypeError: the message is invalid or exceeds the peer's body limit; the channel stays usable.
        """
        self._check_alive()
        if self._state is not _State.OPEN:
            raise WireError(f"nothing can be sent to {self._peer} before it has proved that it knows the job's token")
        header, body = encode_header(message.header), byte_view(message.body)
        if body.nbytes > self._peer_body_limit:
            raise ValueError(
                f"{message.kind}: {self._peer} takes bodies of up to {self._peer_body_limit} bytes, not {body.nbytes}"
            )
        head = _PREFIX.pack(len(header), body.nbytes) + header
        mac = _mac(self._send_key, self._sent, head, body)
        self._sent += 1
        return [head, body, mac]

    def receive(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Takes bytes in any fragmentation, and returns the messages that are now complete.

        Only received bytes are buffered, whatever length is announced.

        Raises:
            WireError: the peer violated the protocol. The channel is dead from now on; messages received with the bad
                bytes are lost.
        """
        self._check_alive()
        self._buffer += data
        if self._state is _State.HELLO:
            self._read_hello()
        if self._state is _State.PROOF:
            self._read_proof()
        messages = []
        while self._state is _State.OPEN and (message := self._read_message()) is not None:
            messages.append(message)
        return messages

    def handle_end(self) -> None:
        """Handles the end of the peer's stream: raises PeerGoneError; between two messages, sending stays possible."""
        self._check_alive()
        if self._state is not _State.OPEN:
            self._fail(
                f"{self._peer} closed the connection before it proved that it knows the job's token. Fix: give both "
                "the same token",
                PeerGoneError,
                code="token-mismatch",
            )
        if self._buffer:
            self._fail(f"{self._peer} closed the connection in the middle of a message", PeerGoneError)
        raise PeerGoneError(f"{self._peer} closed the connection")

    def _read_hello(self) -> None:
        magic = self._buffer[: len(_MAGIC)]
        if not _MAGIC.startswith(magic):
            self._fail(
                f"{self._peer} does not speak the protocol of this job's processes. Fix: correct the address",
                code="peer-foreign",
            )
        if len(self._buffer) >= _START.size:  # a longer hello of another version need not be complete
            version = _START.unpack_from(self._buffer)[1]
            if version != VERSION:
                self._fail(
                    f"{self._peer} speaks version {version} of the wire protocol and this process version {VERSION}. "
                    "Fix: install the same release everywhere",
                    code="release-mismatch",
                )
        if len(self._buffer) < _HELLO.size:
            return
        peer_hello = self._take(_HELLO.size)
        if peer_hello == self._hello:
            self._fail(
                f"{self._peer} sent this process's own hello back. Fix: correct the address",
                code="connection-loops",
            )
        self._peer_body_limit = _HELLO.unpack(peer_hello)[2]
        client, server = (self._hello, peer_hello) if self._role == "client" else (peer_hello, self._hello)
        self._transcript = client + server
        self._handshake += self._proof(self._role)  # after the hello, which may not be sent yet
        self._state = _State.PROOF

    def _read_proof(self) -> None:
        if len(self._buffer) < _MAC_BYTES:
            return
        peer_role = _ROLES[1 - _ROLES.index(self._role)]
        if not hmac.compare_digest(self._take(_MAC_BYTES), self._proof(peer_role)):
            self._fail(
                f"{self._peer} does not know the job's token. Fix: give all processes of a job the same one",
                code="token-mismatch",
            )
        extracted = _hmac(self._transcript, self._token)
        self._send_key = _hmac(extracted, f"messages of the {self._role}".encode() + b"\x01")
        self._receive_key = _hmac(extracted, f"messages of the {peer_role}".encode() + b"\x01")
        self._state = _State.OPEN

    def _read_message(self) -> Message | None:
        if len(self._buffer) < _PREFIX.size:
            return None
        header_bytes, body_bytes = _PREFIX.unpack_from(self._buffer)
        if header_bytes > HEADER_LIMIT:
            self._fail(f"{self._peer} sent a header of {header_bytes} bytes, over the limit of {HEADER_LIMIT}")
        if body_bytes > self._body_limit:
            self._fail(f"{self._peer} sent a body of {body_bytes} bytes, over the limit of {self._body_limit}")
        body_at = _PREFIX.size + header_bytes
        mac_at = body_at + body_bytes
        if len(self._buffer) < mac_at + _MAC_BYTES:
            return None
        frame = self._take_frame(mac_at + _MAC_BYTES)
        if not hmac.compare_digest(frame[mac_at:], _mac(self._receive_key, self._received, frame[:mac_at])):
            self._fail(
                f"message {self._received} from {self._peer} was changed, replayed, reordered or cut on its way. Fix: "
                "look at the network",
                code="message-altered",
            )
        self._received += 1
        try:
            return Message(decode_header(bytes(frame[_PREFIX.size : body_at])), frame[body_at:mac_at])
        except ValueError as error:
            self._fail(f"message {self._received - 1} from {self._peer} has a bad header: {error}")

    def _proof(self, role: str) -> bytes:
        return _hmac(self._token, f"proof of the {role}: ".encode() + self._transcript)

    def _take_frame(self, count: int) -> memoryview:
        if count < READ_BYTES:
            return memoryview(self._take(count))
        # hand over the buffer, since copying it takes longer than the MAC; the remainder is the shorter part
        frame = self._buffer
        self._buffer = frame[count:]
        return memoryview(frame).toreadonly()[:count]

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _check_alive(self) -> None:
        if self._state is _State.DEAD:
            raise WireError(f"the connection is over: {self._failure}", code=code_of(self._failure))

    def _fail(self, message: str, kind: type[WireError] = WireError, code: str | None = None) -> None:
        self._state, self._failure = _State.DEAD, kind(message, code=code)
        self._buffer, self._handshake = bytearray(), b""
        raise self._failure


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _mac(key: bytes, sequence: int, *parts: bytes | memoryview) -> bytes:
    # processors have SHA-256 instructions: 1.7 to 2 times as fast as blake2b (docs/reference/wire.md)
    mac = hmac.new(key, _SEQUENCE.pack(sequence), "sha256")
    for part in parts:
        mac.update(part)
    return mac.digest()
