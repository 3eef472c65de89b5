"""Codes of flags of the launcher itself."""

from __future__ import annotations

from pathlib import Path

from tests.codes.case import Case, writes

SCRIPT = writes(script__py="")
SEVERAL = "--nnodes 2 --rdzv-endpoint 127.0.0.1:0"


def launcher(words: str, named: str, status: int = 2, make=SCRIPT, **variables: str) -> Case:
    """A command line of the launcher, for a script."""
    return Case("mocrun", f"{words} script.py", status, named, make, variables)


def controller(words: str, named: str, status: int = 1) -> Case:
    """A controller that is started by itself."""
    return Case("controller", f"--nnodes 1 --nproc-per-node 1 {words}", status, named, None, {"MOC_TOKEN": "0" * 64})


def token_file(text: str = "0" * 64, mode: int = 0o600):
    """Writes a script and a file with a token."""

    def make(root: Path) -> None:
        SCRIPT(root)
        (root / "token").write_text(text)
        (root / "token").chmod(mode)

    return make


CASES = {
    "address-malformed": launcher("--rdzv-endpoint a:99999", "--rdzv-endpoint"),
    "flag-invalid": launcher("--nproc-per-node two", "--nproc-per-node"),
    "hang-timeout-malformed": launcher("--hang-timeout step", "--hang-timeout"),
    "network-interface-missing": launcher("--network-interface nosuch0", "--network-interface"),
    "node-rank-out-of-range": launcher("--node-rank 1 --rdzv-endpoint a:1", "--node-rank"),
    "program-missing": launcher("", "script.py", make=None),
    "rendezvous-exceeds-nodes": launcher("--rdzv-endpoint a:1,b:1", "--rdzv-endpoint"),
    "program-not-python": launcher("", "script.py", make=writes(script__py="this is no program\n")),
    "rendezvous-missing": launcher("--nnodes 2", "--rdzv-endpoint"),
    "address-exposed": controller("--listen 0.0.0.0:0", "0.0.0.0:0"),
    "token-missing": launcher(SEVERAL, "MOC_TOKEN", 70),
    "token-malformed": launcher(SEVERAL, "MOC_TOKEN", 70, MOC_TOKEN="secret"),
    "token-file-unreadable": launcher(SEVERAL, "/no/token", 70, MOC_TOKEN_FILE="/no/token"),
    "token-file-exposed": launcher(SEVERAL, "token", 70, make=token_file(mode=0o644), MOC_TOKEN_FILE="token"),
    "output-not-writable": launcher("--worker-log-dir script.py/x", "--worker-log-dir", 70),
    "address-not-of-machine": launcher("--rdzv-endpoint 192.0.2.1:29500", "192.0.2.1", 70),
}
