"""Counts recorded command lines of other programs that parse and configure, each in a separate process.

    python -m benchmarks.command_lines [--all | --id N ...] RECORDED.json

A command line passes if ``pretrain_gpt_moe.py`` would start training with it: its words are parsed, Megatron-LM
validates them, and no check of this project refuses them.  One H100 and Transformer Engine are simulated.  No process
group is created and no data file is read.  The number of workers is the recorded one, or the smallest valid one.

RECORDED.json is a list of objects with ``argv`` (words), ``source`` (the project), ``world`` (workers, or null),
``files`` (content by path), ``path`` (printed with the result) and ``id``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import math
import os
import sys
import tempfile
import types
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

from packaging.version import Version

from moc.cli_output import Parser, print_lines

_WORDS_OF_LAYOUT = {
    "--tensor-model-parallel-size": "tensor",
    "--pipeline-model-parallel-size": "pipeline",
    "--context-parallel-size": "context",
    "--expert-model-parallel-size": "expert",
    "--moe-expert-parallel-size": "expert",
    "--expert-tensor-parallel-size": "expert_tensor",
}


def main() -> None:
    """Runs all command lines and prints the counts; exits with 1 if a process ended without a result."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("--all", action="store_true", help="print the message of each refused command line")
    parser.add_argument("--id", type=int, nargs="+", help="only these command lines")
    own = parser.parse_args()
    recorded = [one for one in json.loads(own.recorded.read_text()) if not own.id or one["id"] in own.id]
    simulate_device()
    import_module("moc.megatron")
    import_module("megatron.pretraining.entry.gpt")
    simulate_engine()
    accepted, total, lost = collections.Counter(), collections.Counter(), 0
    for one in recorded:
        message = outcome(one)
        total[one["source"]] += 1
        accepted[one["source"]] += message == ""
        lost += message is None
        if own.all or own.id:
            print_lines(f"{one['id']} {one['source']} {one['path']}: {'accepted' if message == '' else message}")
    width = max(map(len, total))
    for source, count in total.most_common():
        print_lines(f"{source:{width}} {accepted[source]:4} of {count:4}  {100 * accepted[source] / count:5.1f} %")
    print_lines(f"{'all':{width}} {accepted.total():4} of {total.total():4}")
    sys.exit(1 if lost else 0)


def simulate_device() -> None:
    """Makes torch and megatron-core find one H100 and Transformer Engine; call it before other imports of Megatron."""
    import torch

    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = (lambda: True), (lambda: 1), (lambda: 0)
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: "NVIDIA H100"
    device = types.SimpleNamespace(
        major=9, minor=0, name="NVIDIA H100", total_memory=80 << 30, multi_processor_count=132
    )
    cuda.get_device_properties = lambda *_: device
    utils: Any = import_module("megatron.core.utils")
    utils._te_version = Version("2.14.0")


def simulate_engine() -> None:
    """Makes checks of options find Transformer Engine and its kernels; call it after all imports of Megatron."""
    engine = types.ModuleType("transformer_engine")
    engine.__spec__ = ModuleSpec("transformer_engine", None)
    sys.modules["transformer_engine"] = engine
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.core.")]:
        for name, kernel in list(vars(module).items()):
            if name.startswith("fused_") and kernel is None:
                setattr(module, name, engine)


def outcome(recorded: dict[str, Any]) -> str | None:
    """Returns the program's message for a command line: empty if it trains, None if it crashes."""
    received, sent = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(received)
        _configure(recorded, sent)
    os.close(sent)
    with open(received, encoding="utf-8", errors="replace") as answer:
        message = answer.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code not in (0, 2) else message


def _configure(recorded: dict[str, Any], answer: int) -> NoReturn:
    argv = list(recorded["argv"])
    os.environ |= {"WORLD_SIZE": str(recorded["world"] or smallest_world(argv)), "RANK": "0", "LOCAL_RANK": "0"}
    errors, code = io.StringIO(), 2
    with tempfile.TemporaryDirectory() as directory:
        for number, (path, content) in enumerate(recorded["files"].items()):
            file = Path(directory, f"{number}-{Path(path).name}")
            file.write_text(content)
            argv = [word.replace(path, str(file)) for word in argv]
        sys.argv = ["pretrain_gpt_moe.py", *argv]
        arguments: Any = import_module("megatron.training.arguments")
        gpt: Any = import_module("megatron.pretraining.entry.gpt")
        arguments.set_global_variables = lambda *_, **__: None  # it would build the tokenizer from a file
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
                gpt.configured()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 2
        except BaseException as error:
            code = 3
            errors.write(f"{type(error).__name__}: {error}")
    os.write(answer, ("" if code == 0 else errors.getvalue() or "no message").encode())
    os._exit(code)


def smallest_world(argv: list[str]) -> int:
    """Returns the smallest number of workers that the layout of a command line allows."""
    sizes = dict.fromkeys(_WORDS_OF_LAYOUT.values(), 1) | {"expert_tensor": 0}
    for word, value in zip(argv, argv[1:], strict=False):
        name, _, joined = word.partition("=")
        if name in _WORDS_OF_LAYOUT and (joined or value).isdigit():
            sizes[_WORDS_OF_LAYOUT[name]] = int(joined or value)
    dense = sizes["tensor"] * sizes["context"]
    experts = sizes["expert"] * (sizes["expert_tensor"] or sizes["tensor"])
    return math.lcm(dense, experts) * sizes["pipeline"]


if __name__ == "__main__":
    main()
