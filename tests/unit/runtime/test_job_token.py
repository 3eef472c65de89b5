"""The job's token: where it comes from, and which files are not trusted."""

import os

import pytest

from moc.runtime.protocol import TOKEN_FILE_VARIABLE, make_token, make_token_file, token_from_environment
from tests.cases import each_row
from tests.errors import raises


def test_token_file_is_private_and_precedes_variable(tmp_path):
    path = tmp_path / "token"
    old = os.umask(0)
    try:
        token = make_token_file(path)
    finally:
        os.umask(old)
    assert len(token) == 32 and path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == token.hex() + "\n"
    # the file goes before the variable
    assert token_from_environment({"MOC_TOKEN_FILE": str(path), "MOC_TOKEN": "00" * 32}) == token


def test_token_file_is_never_replaced(tmp_path):
    path = tmp_path / "token"
    token = make_token_file(path)
    with raises("token-file-exists"):
        make_token_file(path)
    assert token_from_environment({"MOC_TOKEN_FILE": str(path)}) == token


def test_token_is_read_from_variable_without_file():
    token = make_token()
    assert token_from_environment({"MOC_TOKEN": token.hex().upper(), "MOC_TOKEN_FILE": ""}) == token
    assert make_token() != token


def test_missing_token_is_an_error():
    with raises("token-missing", "MOC_TOKEN_FILE"):
        token_from_environment({})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_token_file_of_other_user_is_refused(tmp_path):
    make_token_file(path := tmp_path / "token")
    os.chown(path, 1001, 1001)
    with raises("token-file-exposed"):
        token_from_environment({TOKEN_FILE_VARIABLE: str(path)})


@each_row("mode", [0o640, 0o604, 0o620, 0o610])
def test_token_file_accessible_to_others_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    make_token_file(path)
    path.chmod(mode)
    with raises("token-file-exposed", "chmod 600"):
        token_from_environment({"MOC_TOKEN_FILE": str(path)})


@each_row("text", ["", "secret", "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 5000])
def test_malformed_token_is_refused_and_not_shown(tmp_path, text):
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(text)
    with raises("token-malformed", "64 hex digits") as caught:
        token_from_environment({"MOC_TOKEN_FILE": str(path)})
    assert not text or text not in str(caught.value)
    if text:
        with raises("token-malformed", "MOC_TOKEN"):
            token_from_environment({"MOC_TOKEN": text})


def test_unreadable_token_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with raises("token-file-unreadable"):
        token_from_environment({"MOC_TOKEN_FILE": str(tmp_path / "pipe")})
    with raises("token-file-unreadable", "No such file"):
        token_from_environment({"MOC_TOKEN_FILE": str(tmp_path / "missing")})
