"""The monitor of a node, which serves metrics and page over HTTP; a child process of the launcher.

It follows the event file and reads the states that the launcher sends, and takes nothing from workers.  It answers only
GET.  Unless its address is on loopback, readers need a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import json
import logging
import os
import socket
import sys
import time
from pathlib import Path

from moc.cli_output import Parser, log_to_stderr
from moc.errors import UserError, warning, with_code
from moc.monitor import page
from moc.monitor.process import EventHook, Monitor
from moc.monitor.summary import summarize
from moc.runtime import environment
from moc.runtime.addresses import is_loopback, listening_socket
from moc.runtime.child_processes import attach_to_parent
from moc.runtime.monitor_process import CANNOT_SERVE, TOKEN_VARIABLE

_log = logging.getLogger("moc")

UPDATE_S = 0.5
"""Seconds between two updates of a page."""

MOST_READERS = 50
"""Most open pages of one monitor; more are refused."""

_COOKIE = "moc_token"
_LINE_BYTES = 1 << 26  # of a state that the launcher sends
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def is_known_host(header: str, address: str) -> bool:
    """Whether a ``Host`` header names this machine; another name may be a web page that rebinds its own to us.

    Args:
        header: value of the header.
        address: address of the monitor.
    """
    host = header.rpartition("]")[0].lstrip("[") if header.startswith("[") else header.partition(":")[0]
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    name = socket.gethostname().lower()
    names = "localhost", name, name.partition(".")[0], socket.getfqdn().lower(), address.lower()
    return host.lower().rstrip(".") in names


def is_authorized(token: str, header: str, cookie: str, query: str) -> bool:
    """Whether a reader has the token: as ``Authorization: Bearer``, as a cookie, or in the address of the page."""
    given = header.removeprefix("Bearer ") if header.startswith("Bearer ") else cookie or query
    return hmac.compare_digest(given.encode(), token.encode())


def make_app(monitor: Monitor, address: str, token: str, serves_page: bool):
    """Returns the web application: the page, or the metrics."""
    from aiohttp import web

    @web.middleware
    async def guard(request: web.Request, handler) -> web.StreamResponse:
        if not is_known_host(request.headers.get("Host", ""), address):
            raise web.HTTPMisdirectedRequest(text="the Host header does not name this machine\n")
        query = request.query.get("token", "")
        given = request.headers.get("Authorization", ""), request.cookies.get(_COOKIE, ""), query
        if token and not is_authorized(token, *given):
            raise web.HTTPUnauthorized(text="a token is needed\n", headers={"WWW-Authenticate": "Bearer"})
        response = await handler(request)
        if token and query and not response.prepared:
            response.set_cookie(_COOKIE, token, httponly=True, samesite="Strict")
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
                text = page.render_content(monitor.run.state, monitor.job, time.time())
                if text != sent:
                    await response.write(f"data: {json.dumps(text)}\n\n".encode())
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
    runners = []
    for name, port in (("metrics", arguments.metrics_port), ("dashboard", arguments.dashboard_port)):
        if port is None:
            continue
        host = arguments.address
        flag = f"--{name}-port {port}"
        try:
            from aiohttp import web

            runner = web.AppRunner(make_app(monitor, host, token, name == "dashboard"), access_log=None)
            await runner.setup()
            listener = listening_socket(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", True)
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
                    f"{flag} cannot be served at {host}, and training continues without it ({error}). Fix: choose "
                    "another port or --monitor-address",
                    code="monitor-port-unusable",
                ),
            )
            continue
        runners.append(runner)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        query = f"?token={token}" if arguments.prints_token else ""
        _log.warning("%s: %s", name, f"{url}/metrics" if name == "metrics" else f"{url}/{query}")
    return runners


async def run(arguments: argparse.Namespace) -> int:
    """Runs the monitor until the launcher closes the pipe on standard input; returns the exit code."""
    token = "" if is_loopback(arguments.address) else os.environ.pop(TOKEN_VARIABLE)
    hook = EventHook(arguments.on_event, arguments.since)
    monitor = Monitor(arguments.directory / environment.EVENTS_LINK, hook)
    reader = asyncio.StreamReader(_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    runners = await _serve(arguments, monitor, token)
    if not runners and arguments.on_event is None:
        return CANNOT_SERVE
    tasks = [asyncio.create_task(task) for task in (monitor.read_launcher(reader), monitor.run_hook())]
    await monitor.follow_events()
    tasks[1].cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
    await hook.run_waiting()
    for runner in runners:
        await runner.cleanup()
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags that the launcher passes."""
    flags = Parser("python -m moc.monitor.server", description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--directory", type=Path, required=True)
    flags.add_argument("--node", type=int, required=True)
    flags.add_argument("--address", required=True)
    flags.add_argument("--metrics-port", type=int)
    flags.add_argument("--dashboard-port", type=int)
    flags.add_argument("--on-event")
    flags.add_argument("--since", type=float, required=True)
    flags.add_argument("--prints-token", action="store_true")
    return flags


def main() -> int:
    """Runs the monitor as a separate process; returns the exit code."""
    attach_to_parent()
    os.nice(10)
    log_to_stderr()
    try:
        return asyncio.run(run(parser().parse_args()))
    except UserError as error:
        _log.error("%s", with_code(error))
        return CANNOT_SERVE


if __name__ == "__main__":
    sys.exit(main())
