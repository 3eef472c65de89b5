"""Reports on one or more runs, side by side, from their events.jsonl."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from moc.errors import code_of
from moc.files.event_log import events_file, read_events
from moc.output import Parser, escapes_output, refused, replacing
from moc.report.figures import ReportError, compute_report
from moc.report.presentation import draw_report, print_reports

EPILOG = """\
examples:
  python tools/report.py log/
  python tools/report.py full/log sparse/log --plot report.png --json report.json

ETTR is the share of useful work in the wall clock: committed iterations, each at the median duration of undisturbed
ones. The lines below it are the parts of the wall clock; docs/how-to/read-a-run.md explains them."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line parser."""
    parser = Parser(
        description="Say what a run was like: time, faults and recoveries, snapshots, experts, choices.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("events", nargs="+", metavar="EVENTS", help="events.jsonl files, or directories with one")
    parser.add_argument("--json", metavar="FILE", help="write all figures, and every recovery, to FILE")
    parser.add_argument("--plot", metavar="PNG", help="draw progress, parts of the wall clock and skewness")
    return parser


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0, or 1 on an error."""
    args = build_parser().parse_args(argv)
    path = ""
    try:
        runs, events = [], []
        for path in dict.fromkeys(args.events):
            events.append(read_events(path))
            try:
                runs.append(compute_report(str(events_file(path).parent), events[-1]))
            except ValueError as error:
                raise ReportError(f"{events_file(path)}: {error}", code=code_of(error)) from None
        print_reports(runs)
        if args.json:
            path = args.json
            with replacing(path) as name:
                Path(name).write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=2) + "\n")
        if args.plot:
            path = args.plot
            draw_report(path, runs, events)
    except (ValueError, OSError) as error:
        return refused("report", error, path)
    return 0
