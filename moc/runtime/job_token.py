"""Creates and reads the job token, a shared secret with which a job's processes authenticate each other."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from moc.errors import UserError

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
