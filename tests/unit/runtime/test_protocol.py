"""Channels: every message arrives as it was sent, and whatever is not one is refused (docs/reference/wire.md)."""

import math
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.runtime import protocol
from moc.runtime.protocol import HEADER_LIMIT, Channel, Message, PeerGoneError, WireError
from tests.cases import each_row
from tests.errors import raises
from tests.unit.runtime.peers import OTHER_TOKEN, TOKEN, frame, open_pair, shake_hands

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
MESSAGES = st.builds(
    lambda header, kind, body: Message({**header, "kind": kind}, body),
    st.dictionaries(st.text(), VALUES),
    st.text(),
    st.binary(max_size=300),
)


def cut(data, sizes):
    """The bytes in pieces of these sizes, over and over."""
    position, index = 0, 0
    while position < len(data):
        yield data[position : position + sizes[index % len(sizes)]]
        position, index = position + sizes[index % len(sizes)], index + 1


@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(1, 200), min_size=1, max_size=5), st.booleans())
@settings(deadline=None, max_examples=50)
def test_messages_arrive_from_any_stream_fragments(messages, sizes, from_client):
    sender, receiver = open_pair()[:: 1 if from_client else -1]
    stream = b"".join(b"".join(sender.send(message)) for message in messages)
    arrived = [message for piece in cut(stream, sizes) for message in receiver.receive(piece)]
    assert arrived == messages
    assert [message.kind for message in arrived] == [message.header["kind"] for message in messages]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.booleans())
@settings(deadline=None)
def test_handshake_accepts_fragments_and_immediate_message(sizes, client_late):
    late, early = (Channel(TOKEN, role) for role in (("client", "server") if client_late else ("server", "client")))
    early.receive(late.handshake_bytes())
    opening = early.handshake_bytes()  # hello and proof in one
    late.receive(opening[:50])
    early.receive(late.handshake_bytes())
    arrived = [message for piece in cut(opening[50:] + frame(early, 7), sizes) for message in late.receive(piece)]
    assert [message.header["number"] for message in arrived] == [7]


def test_large_bodies_arrive_read_only():
    sender, receiver = open_pair(body_limit=4 << 20)
    body = memoryview(bytearray(range(256)) * (12 << 10)).cast("I")
    stream = b"".join([*sender.send(Message({"kind": "first"}, body)), frame(sender, 1, b"x" * 9), frame(sender, 2)])
    arrived = [message for piece in cut(stream, [256 << 10]) for message in receiver.receive(piece)]
    assert [bytes(message.body) for message in arrived] == [body.tobytes(), b"x" * 9, b""]
    assert all(message.body.readonly and message.body.format == "B" for message in arrived)


def test_body_is_sent_without_copy():
    sender, _ = open_pair()
    body = bytearray(b"before")
    buffers = sender.send(Message({"kind": "test"}, body))
    body[:] = b"after!"
    assert b"after!" in b"".join(buffers)


def test_header_with_nan_infinity_and_tuple_is_decoded():
    sender, receiver = open_pair()
    header = {"kind": "loss", "loss": math.nan, "norm": math.inf, "ranks": (0, 1)}
    [message] = receiver.receive(b"".join(sender.send(Message(header))))
    assert math.isnan(message.header["loss"]) and message.header["norm"] == math.inf
    assert message.header["ranks"] == [0, 1]


def test_both_ends_require_token():
    client, server = Channel(TOKEN, "client"), Channel(OTHER_TOKEN, "server")
    hellos = client.handshake_bytes(), server.handshake_bytes()
    client.receive(hellos[1])
    server.receive(hellos[0])
    proofs = client.handshake_bytes(), server.handshake_bytes()
    for channel, proof in ((client, proofs[1]), (server, proofs[0])):
        with raises("token-mismatch"):
            channel.receive(proof)
        assert not channel.is_open
        with raises("token-mismatch", "the connection is over"):
            channel.send(Message({"kind": "test"}))


def test_send_to_unauthenticated_peer_is_refused():
    client, server = Channel(TOKEN, "client"), Channel(TOKEN, "server")
    client.receive(server.handshake_bytes())
    with pytest.raises(WireError, match="proved"):
        client.send(Message({"kind": "test"}))


def test_recorded_handshake_is_refused_on_other_connection():
    client, server = Channel(TOKEN, "client"), Channel(TOKEN, "server")
    recorded = client.handshake_bytes()
    client.receive(server.handshake_bytes())
    recorded += client.handshake_bytes()
    again = Channel(TOKEN, "server")
    with pytest.raises(WireError, match="token"):
        again.receive(recorded)


@each_row("role", ["client", "server"])
def test_reflected_handshake_is_refused(role):
    channel = Channel(TOKEN, role)
    with raises("connection-loops"):
        channel.receive(channel.handshake_bytes())


@each_row("role", ["client", "server"])
def test_proof_is_valid_for_one_role_only(role):
    channel, stranger = Channel(TOKEN, role), Channel(OTHER_TOKEN, role)
    channel.handshake_bytes()
    channel.receive(stranger.handshake_bytes())
    with pytest.raises(WireError, match="token"):
        channel.receive(channel.handshake_bytes())


def test_proof_covers_hello():
    client, server = Channel(TOKEN, "client"), Channel(TOKEN, "server")
    hello = bytearray(client.handshake_bytes())
    hello[17] ^= 1  # the lowest bit of the body limit
    client.receive(server.handshake_bytes())
    server.receive(hello)
    with pytest.raises(WireError, match="token"):
        server.receive(client.handshake_bytes())


def test_other_protocol_version_is_named_at_once():
    channel = Channel(TOKEN, "server")
    with raises("release-mismatch", "version 2", "version 1"):
        channel.receive(b"moc-wire\x00\x02")


def test_garbage_is_refused_at_first_byte():
    with raises("peer-foreign"):
        Channel(TOKEN, "server").receive(b"G")


def test_unauthenticated_peer_may_send_only_hello_and_proof():
    channel, wanted = Channel(TOKEN, "server"), 0
    client = Channel(TOKEN, "client")
    for _ in range(2):
        client.receive(channel.handshake_bytes())
        for byte in client.handshake_bytes():
            assert 0 < channel.bytes_wanted <= 82 - wanted
            channel.receive(bytes([byte]))
            wanted += 1
    assert wanted == 82 and channel.is_open and channel.bytes_wanted == protocol.READ_BYTES


@given(st.data())
@settings(deadline=None)
def test_any_flipped_bit_is_refused(data):
    sender, receiver = open_pair()
    stream = bytearray(frame(sender, 0, b"body") + frame(sender, 1))
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    arrived = []
    with pytest.raises(WireError):
        for byte in stream:  # bytewise, so that a message before the bad one is seen
            arrived += receiver.receive(bytes([byte]))
        receiver.handle_end()
    assert [message.header["number"] for message in arrived] in ([], [0])
    with pytest.raises(WireError, match="over"):
        receiver.receive(b"")


@each_row("order", [[0, 0], [1], [1, 0], [0, 2], [0, 1, 1], [0, 1, 0]])
def test_replayed_reordered_and_missing_messages_are_refused(order):
    sender, receiver = open_pair()
    frames = [frame(sender, number) for number in range(3)]
    for number in order[:-1] if order[0] == 0 else []:
        assert receiver.receive(frames[number])
    with raises("message-altered"):
        receiver.receive(frames[order[-1] if order[0] == 0 else order[0]])


def test_message_is_not_accepted_when_replayed():
    sender, receiver = open_pair()
    stranger = open_pair()[1]
    stream = frame(sender)
    for channel in (sender, stranger):
        with pytest.raises(WireError, match="changed, replayed"):
            channel.receive(stream)
    assert receiver.receive(stream)


def test_truncated_stream_differs_from_closed_stream():
    sender, receiver = open_pair()
    stream = frame(sender) + frame(sender)
    receiver.receive(stream[: len(stream) // 2])
    with pytest.raises(PeerGoneError) as between:
        receiver.handle_end()
    assert "middle" not in str(between.value)
    assert receiver.send(Message({"kind": "test"}))  # it may still listen
    receiver.receive(stream[len(stream) // 2 : -1])
    with pytest.raises(PeerGoneError, match="middle"):
        receiver.handle_end()
    with pytest.raises(WireError):
        receiver.receive(stream[-1:])


def test_end_during_handshake_suggests_token_mismatch():
    with raises("token-mismatch"):
        Channel(TOKEN, "client").handle_end()


@each_row(
    "header, body, words",
    [
        (HEADER_LIMIT + 1, 0, "a header of 1048577 bytes, over the limit of 1048576"),
        (2**32 - 1, 0, "a header of 4294967295 bytes"),
        (20, (1 << 20) + 1, "a body of 1048577 bytes, over the limit of 1048576"),
        (20, 2**64 - 1, "a body of 18446744073709551615 bytes"),
    ],
)
def test_oversized_message_is_refused_from_its_length_prefix(header, body, words):
    _, receiver = open_pair(body_limit=1 << 20)
    with pytest.raises(WireError, match=words):
        receiver.receive(struct.pack(">IQ", header, body))


def test_claimed_size_allocates_nothing_before_bytes_arrive():
    _, receiver = open_pair(body_limit=1 << 40)
    tracemalloc.start()
    try:
        assert receiver.receive(struct.pack(">IQ", HEADER_LIMIT, 1 << 40)) == []
        receiver.receive(bytes(1000))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_sender_refuses_body_over_receiver_limit():
    client, server = Channel(TOKEN, "client", 10), Channel(TOKEN, "server", 20, "rank 3")
    shake_hands(client, server)
    with pytest.raises(ValueError, match="^snapshot: rank 3 .*10 bytes.*11"):
        server.send(Message({"kind": "snapshot"}, bytes(11)))
    assert client.receive(b"".join(server.send(Message({"kind": "snapshot"}, bytes(10)))))  # nothing has happened
    assert server.receive(b"".join(client.send(Message({"kind": "snapshot"}, bytes(20)))))


def nested(depth):
    value = {"kind": "test"}
    for _ in range(depth):
        value = {"kind": "test", "deeper": value}
    return value


@each_row(
    "header, words",
    [
        ({}, "a string named kind"),
        ({"kind": 1}, "a string named kind"),
        ([], "a string named kind"),
        ({"kind": "test", "text": "x" * HEADER_LIMIT}, "is over the limit of 1048576: put data in the body"),
        (nested(100_000), "nested too deeply"),
        ({"kind": "test", "bytes": b""}, "not JSON serializable"),
    ],
    ids=["empty", "number", "list", "large", "deep", "bytes"],
)
def test_invalid_message_is_not_sent_and_channel_stays_usable(header, words):
    sender, receiver = open_pair()
    with pytest.raises((ValueError, TypeError), match=words):
        sender.send(Message(header))
    with pytest.raises(TypeError):
        sender.send(Message({"kind": "test"}, "text"))
    assert receiver.receive(frame(sender))


@each_row(
    "header, words",
    [
        (b"[1]", "not a dict"),
        (b'{"kind": 3}', "not a dict with a string named kind"),
        (b"\xff\xfe", "utf-8"),
        ('{"kind": "test"}'.encode("utf-16"), "utf-8"),
        (b"", "Expecting value"),
        (b'{"kind": "test", "a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"kind": "test", "a": ' + b"1" * 100_000 + b"}", "digits"),
    ],
    ids=["list", "number", "binary", "utf-16", "empty", "deep", "long"],
)
def test_bad_header_from_authenticated_peer_is_refused(header, words, monkeypatch):
    sender, receiver = open_pair()
    monkeypatch.setattr(protocol, "encode_header", lambda _: header)
    with pytest.raises(WireError, match=f"^message 0 .*{words}"):
        receiver.receive(frame(sender))


def test_channel_requires_valid_token_and_role():
    with pytest.raises(ValueError, match="32 bytes"):
        Channel(b"abc", "client")
    with pytest.raises(ValueError, match="agent"):
        Channel(TOKEN, "agent")
