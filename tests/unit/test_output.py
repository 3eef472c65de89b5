"""Only moc/cli_output.py prints, and what it prints contains no foreign control characters."""

import ast
import contextlib
import io
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from moc import cli_output
from moc.errors import codes_in
from moc.files.decode import escape_line
from tests.cases import each_row
from tests.errors import only_code

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    path for part in ("moc", "megatron/pretraining", "tools") for path in (ROOT / part).rglob("*.py")
)  # fmt: skip
HOSTILE = "a\x1b[2J\x07\x08\r\x7f\x85\x9b31m\u202e\u2028\udcff\nb"
PRINTS = {"traceback.print_exc", "traceback.print_exception", "logging.basicConfig", "Console", "rich.print", "pprint"}
STREAMS = {"sys.stdout", "sys.stderr"}


def test_reader_that_ends_is_no_error():
    code = (
        "import sys\nfrom moc.cli_output import escapes_output, print_lines\n"
        "@escapes_output\ndef main():\n    while True: print_lines('x' * 1000)\n"
        "sys.exit(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    assert (process.communicate()[1], process.returncode) == (b"", 1)


def is_clean(text: str) -> bool:
    return all(one.isprintable() or one in "\n\t" for one in text)


def prints(node: ast.AST) -> bool:
    """Whether a call prints by itself; ``print`` into a file of the program's own does not."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if name == "print":
        return {ast.unparse(one.value) for one in node.keywords if one.arg == "file"} <= STREAMS
    return name in PRINTS or name in {f"{stream}.write" for stream in STREAMS}


@each_row("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_cli_output_prints(path):
    found = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if prints(node)]
    assert found == [] or path == ROOT / "moc/cli_output.py"


@each_row("path", sorted((ROOT / "tools").glob("*.py")), ids=lambda path: path.stem)
def test_every_tool_escapes_library_output(path):
    module = next(
        n.module
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.ImportFrom) and n.module != "pathlib"
    )
    (main,) = (
        node
        for node in ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    assert "escapes_output" in map(ast.unparse, main.decorator_list)


def test_printed_line_stays_one_line(capsys):
    cli_output.print_lines(HOSTILE, "second")
    cli_output.print_lines(HOSTILE, error=True)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [escape_line(HOSTILE), "second"] and printed.err.count("\n") == 1
    assert is_clean(printed.out + printed.err)


def test_printed_json_can_be_parsed(capsys):
    cli_output.print_json({HOSTILE: [HOSTILE]})
    printed = capsys.readouterr().out
    assert is_clean(printed) and json.loads(printed) == {HOSTILE: [HOSTILE]}


def test_newline_in_name_adds_no_table_row(capsys):
    from rich.table import Table

    def height(cell: str) -> int:
        table = Table("name", "size")
        table.add_row(cell, "1")
        cli_output.console(width=160).print(table)
        printed = capsys.readouterr().out
        assert is_clean(printed)
        return printed.count("\n")

    assert height(HOSTILE) == height("a")


def test_table_keeps_its_colours_on_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    @cli_output.escapes_output
    def main() -> None:
        cli_output.console().print(HOSTILE, style="red")

    main()
    assert sys.stdout.getvalue().startswith("\x1b[31m") and "\x1b[2J" not in sys.stdout.getvalue()


def test_library_output_is_escaped_until_program_returns(capsys):
    @cli_output.escapes_output
    def main(ends: bool) -> None:
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        sys.stdout.writelines([HOSTILE])
        if not ends:
            raise ValueError(HOSTILE)

    before = sys.stdout, sys.stderr
    main(True)
    assert (sys.stdout, sys.stderr) == before
    with pytest.raises(ValueError):
        main(False)
    print(HOSTILE, file=sys.stderr)  # as the interpreter prints the traceback
    sys.stdout, sys.stderr = before
    printed = capsys.readouterr()
    assert is_clean(printed.out + printed.err) and printed.err.count("\n") == 6


def test_command_line_error_is_one_line(capsys):
    with pytest.raises(SystemExit):
        cli_output.Parser("tool").error(HOSTILE)
    assert only_code(capsys.readouterr().err.splitlines()[-1]) == "flag-invalid"


@each_row(
    "words, codes, suggested",
    [
        ("--nproc-per-nod 2 x", ["flag-unknown"], "--nproc-per-node"),
        ("--nproc 2 x", ["flag-unknown"], "--nproc-per-node"),
        ("--nprc-per-node=2", ["flag-unknown", "flag-invalid"], "--nproc-per-node"),
        ("--wandb-project x y", ["flag-unknown"], None),
        ("--nproc-per-node 2 x y", ["value-without-flag"], None),
    ],
)
def test_a_misspelled_flag_is_refused_with_the_one_that_is_meant(words, codes, suggested, capsys):
    parser = cli_output.Parser("tool", usage="tool")
    parser.add_argument("--nproc-per-node", "--nproc_per_node")
    parser.add_argument("script")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words.split())
    output = capsys.readouterr().err
    assert ended.value.code == 2 and codes_in(output) == codes
    assert suggested in output if suggested else "--nproc" not in output


def test_no_parser_of_the_project_accepts_abbreviations():
    for directory in ("moc", "megatron", "tools", "benchmarks", "examples"):
        for file in (ROOT / directory).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser"):
                    given = {one.arg: ast.unparse(one.value) for one in node.keywords}
                    assert given.get("allow_abbrev") == "False", file


def test_log_record_is_one_line(capsys):
    log = logging.getLogger("moc.test_output")
    root = logging.getLogger()
    kept, root.handlers = root.handlers, []
    try:
        cli_output.log_to_stderr()
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            log.warning("%s", HOSTILE)
            log.warning("failed", exc_info=True)
    finally:
        root.handlers = kept
    printed = capsys.readouterr().err
    assert is_clean(printed) and printed.splitlines()[0] == f"mocrun: {escape_line(HOSTILE)}"


def test_traceback_is_escaped(capsys):
    cli_output.print_traceback(ValueError(HOSTILE))
    assert is_clean(capsys.readouterr().err)


def test_output_of_a_job_that_cannot_be_written_is_dropped(monkeypatch):
    """A full disk below the console ends no worker; a tool's own output that is lost is an error."""
    streams = [open("/dev/full", "w", buffering=1) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    cli_output.print_lines("a line", error=True)
    cli_output.print_lines("a line", flush=True)
    cli_output.print_traceback(ValueError())
    with pytest.raises(OSError):
        cli_output.print_lines("a line")
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


@each_row("linked", [False, True])
def test_non_regular_file_is_not_replaced(tmp_path, linked):
    """As root, a program could otherwise replace /dev/null."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    if linked:
        path = tmp_path / "link"
        path.symlink_to("pipe")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError), cli_output.replacing(path):
        raise AssertionError("it would be written")
    assert sorted(os.listdir(tmp_path)) == before and stat.S_ISFIFO(path.stat().st_mode)


def test_numbers_out_of_range_are_refused():
    parser = cli_output.Parser()
    parser.add_argument("--hours", type=cli_output.number(float, 1, 9))
    assert parser.parse_args(["--hours", "2.5"]).hours == 2.5
    for wrong in ("nan", "inf", "0", "9.1", "two"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--hours", wrong])
