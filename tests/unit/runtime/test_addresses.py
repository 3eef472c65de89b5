"""Addresses: what is one, and where a process listens only if it is told to."""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from moc.runtime.connections import (
    format_address,
    interface_address,
    interface_name,
    listening_socket,
    resolve,
    set_tcp_options,
    short_socket_address,
)
from tests.cases import each_row
from tests.errors import raises
from tests.unit.runtime.peers import fill


@each_row("address", ["", "host", ":80", "host:", "host:-1", "host:http", "host:65536", "127.0.0.1:٣"])
def test_invalid_address_is_refused(address):
    with raises("address-invalid"):
        resolve(address)


@each_row("address", ["127.0.0.1:80", "[::1]:80", "unix:/some/where"])
def test_address_round_trips_through_formatting(address):
    assert format_address(*resolve(address)[0]) == address


@each_row("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_non_loopback_interface_requires_permission(address):
    with raises("address-exposed"):
        listening_socket(address, beyond_loopback=False)


def test_permitted_non_loopback_interface_is_bound():
    with listening_socket("0.0.0.0:0", beyond_loopback=True) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


def test_socket_file_is_private_to_owner(tmp_path):
    with listening_socket(f"unix:{tmp_path}/socket", beyond_loopback=False):
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600


def test_socket_file_of_dead_process_is_reused(tmp_path):
    address = f"unix:{tmp_path}/socket"
    listening_socket(address, beyond_loopback=False).close()
    with listening_socket(address, beyond_loopback=False) as sock, socket.socket(socket.AF_UNIX) as peer:
        peer.connect(sock.getsockname())


def test_live_socket_and_other_files_are_not_replaced(tmp_path):
    address = f"unix:{tmp_path}/socket"
    with listening_socket(address, beyond_loopback=False), pytest.raises(OSError, match="in use"):
        listening_socket(address, beyond_loopback=False)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OSError, match="in use"):
        listening_socket(f"unix:{tmp_path}/file", beyond_loopback=False)
    assert (tmp_path / "file").read_text() == "precious" and os.path.exists(tmp_path / "socket")


def test_socket_of_live_process_with_full_queue_is_kept(tmp_path):
    address = f"unix:{tmp_path}/socket"
    with listening_socket(address, beyond_loopback=False) as sock, contextlib.ExitStack() as stack:
        sock.listen(0)
        fill(f"{tmp_path}/socket", stack)
        with pytest.raises(OSError, match="in use"):
            listening_socket(address, beyond_loopback=False)


@each_row("length", [99, 100, 101, 107, 108, 500, 3000])
def test_socket_path_of_any_length_is_usable_and_reusable(tmp_path, length):
    directory = str(tmp_path)
    while (more := length - len(f"{directory}/socket")) > 1:
        directory += "/" + "x" * min(200, more - 1)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    address, before = f"unix:{directory}/socket", descriptors()
    listening_socket(address, beyond_loopback=False).close()
    with listening_socket(address, beyond_loopback=False) as sock, socket.socket(socket.AF_UNIX) as peer:
        assert (directory / "socket").stat().st_mode & 0o777 == 0o600
        with short_socket_address(resolve(address)[0][1]) as where:
            peer.connect(where)
        sock.accept()[0].close()
    assert descriptors() == before


def descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def test_tcp_options_detect_lost_machine():
    with socket.socket() as sock:
        set_tcp_options(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


def test_interface_name_and_address_are_resolved():
    assert interface_name("127.0.0.1") == "lo"
    assert interface_address("lo") == "127.0.0.1"
    assert interface_name("192.0.2.1") is None  # of no machine: RFC 5737
    with raises("network-interface-missing", "nosuch0"):
        interface_address("nosuch0")
