"""Serves metrics and page of a job over HTTP, as a child process of the launcher or from an event file.

It follows the event file and reads the states that the launcher sends, and takes nothing from workers.  It answers only
GET.  Unless its address is on loopback, readers need a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import sys
import time
import urllib.parse
from pathlib import Path

from moc.cli_output import Parser, ToolError, escapes_output, log_to_stderr, number, refused
from moc.errors import cause_of, warning
from moc.files.event_log import EVENTS_FILE, events_file
from moc.files.safe_directory import remove_owned
from moc.monitor import page
from moc.monitor.process import EventHook, Monitor
from moc.monitor.summary import summarize
from moc.runtime.child_processes import PARENT
from moc.runtime.connections import is_loopback, listening_socket
from moc.runtime.environment import EVENTS_LINK
from moc.runtime.monitor_process import CANNOT_SERVE, END_S, PAGE_FILE, TOKEN_VARIABLE

_log = logging.getLogger("moc")

UPDATE_S = 0.5
"""Seconds between two updates of a page."""

MOST_READERS = 50
"""Most open pages of one monitor; more are refused."""

_ANY = "0.0.0.0", "::"  # addresses of all interfaces, which other machines cannot name
_LINE_BYTES = 1 << 26  # of a state that the launcher sends
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def is_known_host(header: str, address: str) -> bool:
    """Whether a ``Host`` header names this machine; another name may be a web page that rebinds its own to us."""
    host = header.rpartition("]")[0].lstrip("[") if header.startswith("[") else header.partition(":")[0]
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return host.lower().rstrip(".") in ("localhost", address.lower(), *_names_of_machine())


@functools.cache  # a slow name server must not delay each request
def _names_of_machine() -> tuple[str, ...]:
    name = socket.gethostname().lower()
    return name, name.partition(".")[0], socket.getfqdn().lower()


def is_authorized(token: str, header: str, cookie: str, query: str) -> bool:
    """Whether a reader has the token: as ``Authorization: Bearer``, in the address of the page, or as a cookie."""
    presented_token = header.removeprefix("Bearer ") if header.startswith("Bearer ") else query or cookie
    return hmac.compare_digest(*(text.encode(errors="surrogatepass") for text in (presented_token, token)))


def make_app(monitor: Monitor, address: str, token: str, serves_page: bool):
    """Returns the web application: the page, or the metrics."""
    from aiohttp import web

    cookie = f"moc_token_{hashlib.sha256(token.encode(errors='surrogatepass')).hexdigest()[:16]}"  # ports share cookies

    @web.middleware
    async def guard(request: web.Request, handler) -> web.StreamResponse:
        if not is_known_host(request.headers.get("Host", ""), address):
            raise web.HTTPMisdirectedRequest(text="the Host header does not name this machine\n")
        query = request.query.get("token", "")
        credentials = request.headers.get("Authorization", ""), request.cookies.get(cookie, ""), query
        if token and not is_authorized(token, *credentials):
            raise web.HTTPUnauthorized(text="a token is needed\n", headers={"WWW-Authenticate": "Bearer"})
        response = await handler(request)
        if token and query and not response.prepared:
            response.set_cookie(cookie, token, httponly=True, samesite="Strict")
        return response

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(_HEADERS)
        response.headers.pop("Server", None)

    handlers = _page_handlers(monitor) if serves_page else _metrics_handlers(monitor)
    app = web.Application(middlewares=[guard], client_max_size=1)
    app.on_response_prepare.append(add_headers)
    app.add_routes([web.get(path, handler) for path, handler in handlers.items()])
    return app


def _metrics_handlers(monitor: Monitor) -> dict:
    from aiohttp import web

    from moc.monitor.metrics import render_metrics

    async def metrics(request: web.Request) -> web.Response:
        body = render_metrics(monitor.run.state, monitor.job, time.time(), monitor.hook.results)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    return {"/metrics": metrics}


def _page_handlers(monitor: Monitor) -> dict:
    from aiohttp import web

    readers: set[asyncio.Task | None] = set()
    rendered_at, update = 0.0, ""

    def current_update() -> str:
        """Returns the update, which all readers share."""
        nonlocal rendered_at, update
        if time.monotonic() - rendered_at > UPDATE_S / 2:
            content = page.render_content(monitor.run.state, monitor.job, time.time())
            rendered_at, update = time.monotonic(), f"data: {json.dumps(content)}\n\n"
        return update

    async def document(request: web.Request) -> web.Response:
        text = page.render_page(monitor.run.state, monitor.job, time.time())
        return web.Response(text=text, content_type="text/html")

    async def script(request: web.Request) -> web.Response:
        return web.Response(text=page.SCRIPT, content_type="text/javascript")

    async def style(request: web.Request) -> web.Response:
        return web.Response(text=page.STYLE, content_type="text/css")

    async def content(request: web.Request) -> web.Response:
        return web.json_response(dataclasses.asdict(summarize(monitor.run.state, monitor.job, time.time())))

    async def updates(request: web.Request) -> web.StreamResponse:
        if len(readers) >= MOST_READERS:
            raise web.HTTPServiceUnavailable(text="too many pages are open\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        readers.add(reader := asyncio.current_task())
        try:
            await response.prepare(request)
            sent = ""
            while not monitor.has_ended:
                if (text := current_update()) != sent:
                    await response.write(text.encode())
                    sent = text
                await asyncio.sleep(UPDATE_S)
        except ConnectionResetError:
            pass  # the page was closed
        finally:
            readers.discard(reader)
        return response

    return {"/": document, "/page.js": script, "/page.css": style, "/state": content, "/updates": updates}


async def _serve(arguments: argparse.Namespace, monitor: Monitor, token: str) -> list:
    """Opens the ports; returns the runners of opened ports, and reports the others."""
    runners, alternatives = [], "another port" if arguments.of_job else "another port or --address"
    alternatives += " or --monitor-address" if arguments.directory is not None else ""
    consequence = ", and training continues without it" if arguments.of_job else ""
    for name, port in (("metrics", arguments.metrics_port), ("dashboard", arguments.dashboard_port)):
        if port is None:
            continue
        host = arguments.address.strip("[]")
        flag = f"--{name}-port {port}"
        try:
            from aiohttp import web

            runner = web.AppRunner(make_app(monitor, host, token, name == "dashboard"), access_log=None)
            await runner.setup()
            listener = listening_socket(_url(host, port).removeprefix("http://"), True)
            await web.SockSite(runner, listener, shutdown_timeout=1.0).start()
        except ImportError as error:
            _log.warning(
                "%s",
                warning(
                    f"{flag} needs the package {error.name}, which is missing. Fix: pip install aiohttp "
                    "prometheus-client",
                    code="package-missing",
                ),
            )
            continue
        except (OSError, ValueError) as error:
            _log.warning(
                "%s",
                warning(
                    f"{flag} cannot be served at {host}{consequence} ({cause_of(error)}). Fix: choose {alternatives}",
                    code="monitor-port-unusable",
                ),
            )
            continue
        runners.append(runner)
        port, query = listener.getsockname()[1], f"?{urllib.parse.urlencode({'token': token})}" if token else ""
        if name == "dashboard" and arguments.directory is not None:
            with contextlib.suppress(OSError):  # the terminal view does not find the page then
                (arguments.directory / PAGE_FILE).write_text(f"{_url(host, port)}/{query}")
        url = _url(socket.gethostname() if host in _ANY else host, port)
        shown_path = "metrics" if name == "metrics" else query if arguments.prints_token else ""
        _log.warning("%s: %s/%s", name, url, shown_path)
    return runners


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def run(arguments: argparse.Namespace) -> int:
    """Runs the monitor until the launcher closes the pipe on standard input; returns the exit code.

    Without a launcher, it runs until it is interrupted.
    """
    token = "" if is_loopback(arguments.address) else os.environ.pop(TOKEN_VARIABLE, "")
    if not token and not is_loopback(arguments.address):
        token, arguments.prints_token = secrets.token_urlsafe(24), True
    link, source = arguments.directory, arguments.source
    find_file = (lambda: events_file(source)) if link is None else lambda: Path(os.readlink(link / EVENTS_LINK))
    monitor = Monitor(find_file, EventHook(arguments.on_event, arguments.since))
    runners = await _serve(arguments, monitor, token)
    if not runners and arguments.on_event is None:
        return CANNOT_SERVE
    tasks = [asyncio.create_task(monitor.follow_events()), asyncio.create_task(monitor.run_hook())]
    if link is not None:
        reader = asyncio.StreamReader(_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await monitor.read_launcher(reader)
        await asyncio.wait(tasks, timeout=END_S)
    else:
        expected = source_path if (source_path := Path(source)).suffix == ".jsonl" else source_path / EVENTS_FILE
        if not expected.exists():
            _log.warning("waiting for %s, which does not exist yet", expected)
        await asyncio.gather(*tasks)
    for runner in runners:
        await runner.cleanup()
    return 0


_port = number(int, 0, 65535)
EPILOG = """\
example: python tools/monitor.py log/ --dashboard-port 8265 --metrics-port 9464

mocrun has the same flags, and shows also the members of the job and the workers of its node."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line parser; hidden flags are the launcher's."""
    flags = Parser(
        description="Serve page and metrics of a job without mocrun, or of one that has ended, from its events.jsonl.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("source", nargs="?", default=".", metavar="EVENTS", help="events.jsonl, or its directory")
    flags.add_argument("--metrics-port", type=_port, help="port of Prometheus metrics; 0 for any")
    flags.add_argument("--dashboard-port", type=_port, help="port of the page; 0 for any")
    flags.add_argument("--address", default="127.0.0.1", help="address of both (default: 127.0.0.1)")
    flags.add_argument("--on-event", metavar="CMD", help="shell command to run with each new event")
    flags.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    flags.add_argument("--since", type=float, default=time.time(), help=argparse.SUPPRESS)
    flags.add_argument("--prints-token", action="store_true", help=argparse.SUPPRESS)
    return flags


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the monitor as a separate process; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    if arguments.metrics_port is arguments.dashboard_port is arguments.on_event is None:
        return refused(
            "monitor",
            ToolError(
                "there is nothing to do. Fix: give --dashboard-port, --metrics-port or --on-event", code="nothing-to-do"
            ),
        )
    arguments.of_job = PARENT in os.environ
    launcher = int(os.environ.pop(PARENT, os.getppid()))
    os.nice(10)
    log_to_stderr(program="mocrun" if arguments.of_job else "monitor")
    try:
        return asyncio.run(run(arguments))
    except KeyboardInterrupt:
        return 0
    finally:
        if arguments.directory is not None and os.getppid() != launcher:  # it was killed, and cannot clean up
            with contextlib.suppress(OSError):
                remove_owned(arguments.directory)


if __name__ == "__main__":
    sys.exit(main())
