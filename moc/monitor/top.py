"""Shows a job in a terminal: from the page of its monitor, or from its event file."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moc.cli_output import Parser, ToolError, console, escapes_output, number, refused
from moc.files.decode import decode, escape_line
from moc.files.event_log import EVENTS_FILE, EventsError, events_file
from moc.files.safe_directory import SafeDirectory
from moc.monitor.job_view import JobView
from moc.monitor.process import FollowedRun
from moc.monitor.summary import MOST_ROWS, JobSummary, summarize
from moc.report.wall_clock import PHASES
from moc.runtime.monitor_process import DIRECTORY_PREFIX, PAGE_FILE, TOKEN_VARIABLE

if TYPE_CHECKING:
    from rich.console import Console

_TIMEOUT_S = 10.0
_ALL_COLUMNS = 120  # columns of a terminal that shows all columns of all tables
_PATIENCE_S = 15.0  # for a monitor that is started again
_MAX_ANSWER_BYTES, _MAX_URL_BYTES = 1 << 22, 1 << 10  # of an answer, and of the file with a URL

EPILOG = """\
examples:
  python tools/top.py                           # your job on this machine
  python tools/top.py --job 4f7ddfac20eef8ae    # if there are several
  python tools/top.py http://127.0.0.1:9000
  python tools/top.py log/                      # from events.jsonl, without a monitor

MOC_MONITOR_TOKEN is sent to a page that needs a token, unless its URL ends with one."""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy must not receive the token


def find_page(job: str | None) -> str:
    """Returns the URL of a job's page on this machine, of this user.

    Args:
        job: id of the launch; None if there is only one.

    Raises:
        ToolError: there is no such page, or there are several.
    """
    pages, jobs = [], []
    for file in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*/{PAGE_FILE}"):
        with contextlib.suppress(OSError, ToolError):
            if file.parent.lstat().st_uid == os.geteuid():  # others could ask for our token
                url = SafeDirectory(file.parent).read(file.name, _MAX_URL_BYTES).decode()
                jobs.append(_fetch_summary(url, None).job)
                pages.append(url)
    matching = [url for url, other in zip(pages, jobs, strict=True) if job in (None, other)]
    if len(matching) != 1:
        known_jobs = f"jobs with pages on this machine: {', '.join(jobs) or 'none'}"
        raise ToolError(
            f"the job is not clear ({known_jobs}). Fix: start mocrun with --dashboard-port, and name one by --job, or "
            "its URL",
            code="job-not-found",
        )
    return matching[0]


def source_of(address: str | None, job: str | None) -> Callable[[], JobSummary]:
    """Returns a function that reads the current summary of a job.

    Args:
        address: URL of its page, or path of its event file or of the directory with it; None to search the page.
        job: id of the launch that is expected; None for any.
    """
    address = find_page(job) if address is None else address
    if re.fullmatch(r"[^/\s]+:\d+/?", address) and not Path(address).exists():
        address = f"http://{address}"
    if address.startswith(("http://", "https://")):
        return lambda: _fetch_summary(address, job)
    path, run = events_file(address), FollowedRun()
    path.stat()  # a mistake in the path is not a run without events

    def read() -> JobSummary:
        while run.poll(path):
            pass
        if run.skipped and not run.events:
            raise EventsError(f"{path}: no line is an event. Fix: give an {EVENTS_FILE}")
        return summarize(run.state, JobView(), time.time())

    return read


def _fetch_summary(url: str, job: str | None) -> JobSummary:
    url, _, query = url.partition("?")
    token = urllib.parse.parse_qs(query).get("token", [os.environ.get(TOKEN_VARIABLE, "")])[0]
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/state", headers=headers)
        with _opener.open(request, timeout=_TIMEOUT_S) as answer:
            summary = decode(answer.read(_MAX_ANSWER_BYTES), JobSummary)
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        raise ToolError(
            f"{url} does not answer as the page of a job ({cause}). Fix: start mocrun with --dashboard-port, or name "
            "the job's page or --log-dir",
            code="monitor-unreachable",
        ) from None
    if job is not None and summary.job != job:
        raise ToolError(
            f"{url} is the page of job {summary.job}, not of {job}. Fix: name the page of that job", code="job-differs"
        )
    return summary


def render(summary: JobSummary, rows: int, width: int):
    """Returns the content of a terminal of ``width`` columns, with at most ``rows`` rows of each table.

    A narrow terminal has no room for the phases of recoveries.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [(f"{summary.run}  job {summary.job or '-'}  {summary.status}", "bold")]
    for problem in summary.problems:
        lines += [(problem.text, "bold red" if problem.is_critical else "yellow"), (f"  To do: {problem.remedy}", "")]
    lines += [] if summary.problems else [("No problem found", "green")]
    figures = Table(box=None, show_header=False)
    for title, value in summary.figures.items():
        figures.add_row(title, value)
    parts = [*(Text(escape_line(line), style) for line, style in lines), figures]
    for table in summary.tables:
        rich_table = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
        shown = [column for column, title in enumerate(table.titles) if width >= _ALL_COLUMNS or title not in PHASES]
        for column in shown:
            rich_table.add_column(table.titles[column], overflow="fold")
        for row in table.rows[:rows]:
            rich_table.add_row(*(row[column] for column in shown))
        parts.append(rich_table)
    return Group(*parts)


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line parser."""
    parser = Parser(
        description="Show a running job in the terminal.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source_help = (
        "page of the job, its events.jsonl, or the directory with it (default: the page of your job on this machine)"
    )
    parser.add_argument("source", nargs="?", metavar="URL", help=source_help)
    parser.add_argument("--job", metavar="ID", help="id of the launch, as its page shows it")
    parser.add_argument("--once", action="store_true", help="print the state once, also if the output is no terminal")
    rows, interval = number(int, 1, MOST_ROWS), number(float, 0.1, 3600)
    parser.add_argument("--rows", type=rows, default=10, help="most rows of each table (default: 10)")
    parser.add_argument("--interval", type=interval, default=1.0, help="seconds between two updates (default: 1)")
    return parser


def _show(read: Callable[[], JobSummary], screen: Console, rows: int, interval_s: float) -> None:
    """Shows a job until it has ended, and leaves its last state on the terminal."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    summary, read_at = read(), time.monotonic()
    try:
        with Live(render(summary, rows, screen.width), console=screen, screen=True, auto_refresh=False) as live:
            while summary.status != "ended":
                time.sleep(interval_s)
                try:
                    summary, read_at, note = read(), time.monotonic(), []
                except ToolError:
                    if time.monotonic() - read_at > _PATIENCE_S:
                        raise
                    note = [Text("No answer: this state is old", "bold red")]
                live.update(Group(*note, render(summary, rows, screen.width)), refresh=True)
    finally:
        screen.print(render(summary, rows, screen.width))


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool until it is interrupted; returns the exit status: 0, or 1 on an error."""
    args = build_parser().parse_args(argv)
    try:
        read, screen = source_of(args.source, args.job), console(width=160)
        if args.once or not screen.is_terminal or screen.is_dumb_terminal:
            screen.print(render(read(), args.rows, screen.width))
        else:
            _show(read, screen, args.rows, args.interval)
        return 0
    except KeyboardInterrupt:
        return 0
    except (ValueError, OSError, ToolError) as error:
        return refused("top", error, args.source or "")
