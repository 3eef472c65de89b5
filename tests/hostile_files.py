"""Files of each type as a stranger may send them, up to 1 MB, and the functions that read them.

As a program, it reads each file of a directory in a process of its own with a limit on its CPU time and memory, and
prints how each has ended.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core
from megatron.pretraining.checkpoint.state import read_state  # noqa: E402
from megatron.pretraining.checkpoint.unpickling import check_metadata  # noqa: E402
from megatron.pretraining.convert.hugging_face.directory import FORMAT, check_hashes  # noqa: E402
from megatron.pretraining.convert.hugging_face.families import family_of  # noqa: E402
from megatron.pretraining.convert.hugging_face.files import read_directory, read_json  # noqa: E402
from moc.files import tree  # noqa: E402
from moc.files.events import read_events  # noqa: E402
from moc.inspect.checkpoint import SNAPSHOT, Checkpoint, read_regions  # noqa: E402
from moc.inspect.coverage import coverage_problems, missing_operators  # noqa: E402
from moc.report.figures import report  # noqa: E402
from moc.report.loss import read_run  # noqa: E402
from moc.simulate.profile import read_profile  # noqa: E402
from moc.store import dense_files  # noqa: E402
from moc.store.boxes import INDEX  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402

MOST = 1_000_000  # bytes of a file
CPU_S, MEMORY = 4, 200 << 20  # guards; allocators reserve more addresses than they use
MOST_MB = 100  # of memory that a file takes
STATE = dict(
    iteration=3, consumed_samples=12, skipped_iterations=0, optimizer="adam", optimizer_step=3, params_dtype="bf16",
    fp8=None, main_params_dtype="fp32", moments=None, grad_scaler={"scale": [1.0], "growth_tracker": 0,
    "hysteresis_tracker": 1}, sample_order={"seed": 1}, job="job",
    shape={"num_layers": 2, "num_experts": 4, "moe_layer_freq": [0, 1]},
    scheduler=dict(num_steps=12, max_lr=1e-3, min_lr=0.0, lr_warmup_steps=1, lr_decay_steps=100,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_style="constant", wd_incr_steps=100),
)  # fmt: skip
CONFIG = dict(
    model_type="qwen3_moe", vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=32, num_experts_per_tok=2, num_experts=4,
    rms_norm_eps=1e-6, intermediate_size=32, moe_intermediate_size=8, decoder_sparse_step=1, mlp_only_layers=[0],
    norm_topk_prob=True, tie_word_embeddings=False, rope_theta=10000.0, hidden_act="silu", sliding_window=None,
    router_aux_loss_coef=0.01, attention_dropout=0.0, rope_scaling=None,
)  # fmt: skip
CONVERSION = {"format": FORMAT, "source": {}, "tensors": {}, "files": {"x": {"bytes": 1, "xxh3_128": "0" * 32}}}
EVENTS = [
    {"type": "start", "time": 10.0, "iteration": 0, "world_size": 4, "startup_s": {"import": 2.0}},
    *({"type": "iteration", "time": 10.0 + n, "iteration": n, "loss": 1.0, "grad_norm": 1.0, "tokens": 10,
       "elapsed_s": 1.0, "hhi": 0.5} for n in range(1, 9)),
    {"type": "snapshot", "time": 18.5, "iteration": 8, "tier": "disk", "bytes": 9, "copy_s": 0.1, "hash_s": 0.1},
    {"type": "persist", "time": 18.6, "iteration": 8, "bytes": 9, "write_s": 0.1, "publish_s": 0.1},
    {"type": "generation", "time": 19.0, "reason": "lost", "noticed_s": 0.1, "met_s": 0.2},
    {"type": "resume", "time": 19.5, "tier": "memory", "seconds": 0.2, "kept": 3, "stages": [0]},
    {"type": "replay", "time": 19.6, "iteration": 8, "seconds": 0.1, "frozen": 0, "exact": True, "loss": 1.0},
    {"type": "start", "time": 19.7, "iteration": 7, "world_size": 4, "startup_s": {"import": 0.1}},
    {"type": "iteration", "time": 20.7, "iteration": 8, "loss": 1.0, "tokens": 10, "elapsed_s": 1.0},
    {"type": "lost", "time": 20.8, "iteration": 8, "plt": 0.1, "raised_by": 0.1, "by_layer": {"0": 0.1}},
    {"type": "choice", "time": 20.9, "iteration": 8, "reason": "since", "k_snapshot": 2},
    {"type": "evaluation", "time": 21.0, "iteration": 8, "split": "valid", "loss": 1.0, "perplexity": 2.0},
    {"type": "exit", "time": 21.5, "iteration": 8, "reason": "done", "code": 0},
]  # fmt: skip


def file_of(header: Any, data: int = 64) -> bytes:
    """A safetensors file with a header, and some bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def regions(boxes: list[tuple[list[int], list[int], list[int]]]) -> bytes:
    """A region file of bytes, given global shape, offset and shape of each box."""
    index, header, end = {}, {}, 0
    for number, (whole, offset, shape) in enumerate(boxes):
        size = 1
        for count in shape:
            size *= count
        index[str(number)] = ["w", "master", whole, offset]
        header[str(number)] = {"dtype": "U8", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(index, separators=(",", ":"))
    return file_of({"__metadata__": {INDEX: text}, **header}, min(end, 1 << 20))


def weights(count: int = 2) -> bytes:
    """A file of tensors as transformers has it."""
    one = {f"w{n}": {"dtype": "F32", "shape": [2], "data_offsets": [8 * n, 8 * n + 8]} for n in range(count)}
    return file_of({"__metadata__": {"format": "pt"}, **one}, 8 * count)


def lines(events: list[Any]) -> bytes:
    """A log of events."""
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def _read_events(path: Path) -> None:
    read_events(path)
    for read in (read_profile, lambda path: report("run", read_events(path)), read_run):
        try:
            read(path)
        except ValueError:
            pass


def _read_regions(path: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size}}
    checkpoint = Checkpoint(path.parent, files, format=SNAPSHOT)
    boxes, problems = read_regions(checkpoint)
    coverage_problems(checkpoint, boxes)
    if problems:
        raise CheckpointError(problems[0])


def _read_state(path: Path) -> None:
    missing_operators((), read_state(path.parent)["shape"])


def _read_config(path: Path) -> None:
    config = read_json(path, tree.SMALL)
    family_of(config).flags_of(config)


READERS: dict[str, Callable[[Path], object]] = {
    "events.jsonl": _read_events,
    "training_state.json": _read_state,
    "conversion.json": lambda path: check_hashes(path.parent, lambda count: None),
    "config.json": _read_config,
    "model.safetensors.index.json": lambda path: read_directory(path.parent),
    "model.safetensors": lambda path: read_directory(path.parent),
    "rank_00000.safetensors": _read_regions,
    "manifest.json": lambda path: dense_files.read_manifest(path.parent),
    ".metadata": lambda path: check_metadata(path.parent),
}
"""Reads a file of each type; raises CheckpointError, ValueError or OSError if it is damaged."""


def _filled(begin: bytes, part: bytes, end: bytes, between: bytes = b",") -> bytes:
    count = (MOST - len(begin) - len(end)) // (len(part) + len(between))
    return begin + between.join([part] * count) + end


def _any_json() -> Iterator[bytes]:
    yield from (b"", b"\0" * MOST, b" " * MOST, b"[" * MOST, b'{"a":' * (MOST // 5), b"\xff" * MOST, b"1" * MOST)
    yield _filled(b"[", b"[]", b"]")
    yield _filled(b"[", b'{"":0}', b"]")
    yield _filled(b"{", b'"a":1', b"}")
    yield b'"' + b"\\u0000" * (MOST // 6 - 1) + b'"'
    yield b"{" + b",".join(b'"%d":{}' % number for number in range(MOST // 11)) + b"}"
    yield b"1e" + b"9" * (MOST - 2)


def _within(plain: dict, fields: dict[str, list[Any]]) -> Iterator[bytes]:
    yield from _any_json()
    for name, values in fields.items():
        for value in values:
            yield json.dumps({**plain, name: value}).encode()[: MOST + 999]


BIG = [10**9, 10**18, 10**4000, -1, 1e308, [1] * 300_000, "x" * 900_000, {"a": [[]] * 200_000}]


def _events() -> Iterator[bytes]:
    yield from _any_json()
    yield b"\n" * MOST
    yield b"{\n" * (MOST // 2)
    yield b'{"type":"x"}\n' * (MOST // 13)
    for kind in ("start", "exit", "resume", "lost", "choice", "generation", "stall"):
        one = {"type": kind, "time": 1, "iteration": 9, "tier": "live", "seconds": 1, "raised_by": 0, "reason": "",
               "noticed_s": 1, "met_s": 1}  # fmt: skip
        pair = lines([one, {"type": "iteration", "time": 2, "iteration": 9, "elapsed_s": 1, "tokens": 1}])
        begin = lines([{"type": "generation", "time": 0, "reason": "", "noticed_s": 1, "met_s": 1}])
        yield begin + pair * (MOST // len(pair) - 1)
        yield begin + lines([one]) * (MOST // len(lines([one])) - 2) + pair
    yield lines([{"type": "start", "time": n, "iteration": n} for n in range(20_000)] + EVENTS)
    yield lines([{**EVENTS[1], "iteration": n} for n in range(3000)] + [{**EVENTS[0], "iteration": 0}] * 3000)


def _regions() -> Iterator[bytes]:
    yield from map(file_of, _any_json())
    yield b"\xff" * 8 + b"{}"
    ones, zeros = [1] * 80_000, [0] * 80_000
    yield regions([(ones, zeros, ones)])
    yield regions([([1 << 62] * 64, [0] * 64, [1] * 64)])
    yield regions([([64, 64], [0, 0], [64, 64])] * 1000)
    yield regions([([64, 64], [0, 0], [1, 1])] * 7000)
    yield regions([([9000, 9000], [n, n], [7000 - n, 1]) for n in range(7000)])  # all reach the end of an axis
    yield regions([([9000, 9000], [n, n], [1, 1]) for n in range(7000)])
    yield regions([([100, 100, 100], [n % 19, n // 19 % 19, n // 361], [1, 1, 1]) for n in range(6000)])


def _weights() -> Iterator[bytes]:
    yield from map(file_of, _any_json())
    yield weights(15_000)[:MOST]
    one = {"dtype": "F32", "shape": [1000, 16], "data_offsets": [0, 64_000]}
    yield file_of({f"w{n}": one for n in range(10_000)}, 64_000)
    yield file_of({"w": {"dtype": "F32", "shape": [1] * 80_000, "data_offsets": [0, 4]}}, 4)
    yield file_of({"w": {"dtype": "F32", "shape": [1 << 62] * 60, "data_offsets": [0, 4]}}, 4)


def _metadata() -> Iterator[bytes]:
    doubled: Any = ()
    for _ in range(60):
        doubled = (doubled, doubled)
    yield b""
    yield b"\0" * MOST
    yield b"N" * (MOST - 1) + b"."
    yield b"\x80\x04" + b"N0" * (MOST // 2 - 2) + b"N."
    yield b"\x80\x04N" + b"\x94" * (MOST - 4) + b"."
    yield pickle.dumps({"a": 1})
    yield pickle.dumps([doubled])[:-1] + b"0}" + b"."
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dump(doubled)
    yield stream.getvalue()[:-1] + b"}h\x00Ns."  # as the key of a dict
    yield (
        b"\x80\x04}("
        + b"".join(b"\x8a\x0a" + ((2**61 - 1) * n).to_bytes(10, "little") + b"N" for n in range(70_000))
        + b"u."
    )
    yield b"\x80\x04" + b"]" * 400_000 + b"a" * 399_999 + b"."
    yield b"\x80\x04(" * (MOST // 3)


_KEYS = ("num_experts", "num_hidden_layers", "mlp_only_layers", "model_type", "rope_scaling", "num_attention_heads")
EXAMPLES: dict[str, Callable[[], Iterator[bytes]]] = {
    "events.jsonl": _events,
    "training_state.json": lambda: _within(
        STATE,
        {
            "shape": [{**STATE["shape"], name: value} for name in STATE["shape"] for value in BIG],
            "scheduler": BIG, "sample_order": BIG, "optimizer": BIG, "iteration": BIG,
        },
    ),
    "conversion.json": lambda: _within(
        CONVERSION, {"files": [*BIG, {"/etc/passwd": CONVERSION["files"]["x"]}, {"../x": {}}, {"x": [[]] * 200_000}]}
    ),
    "config.json": lambda: _within(CONFIG, dict.fromkeys(_KEYS, BIG)),
    "model.safetensors.index.json": lambda: _within(
        {"weight_map": {}}, {"weight_map": [*BIG, {"a": "/etc/passwd"}, {str(n): f"{n}" for n in range(50_000)}]}
    ),
    "model.safetensors": _weights,
    "rank_00000.safetensors": _regions,
    "manifest.json": lambda: _within(
        {"format": dense_files.FORMAT, "iteration": 3, "files": {}}, {"files": BIG, "iteration": BIG, "format": BIG}
    ),
    ".metadata": _metadata,
}  # fmt: skip
"""Hostile files of each type."""


def outcome(read: Callable[[Path], object], path: Path) -> str:
    """Reads a file: ``read``, ``refused``, or the traceback of an exception that no reader may raise."""
    try:
        read(path)
    except (CheckpointError, ValueError, OSError) as error:
        return "refused" if len(str(error)) < 2000 else f"{len(str(error))} characters of an error"
    except BaseException:
        return traceback.format_exc()
    return "read"


def _resident(field: str) -> float:
    """Resident memory of this process in MB, now (``VmRSS``) or at most (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def guarded(read: Callable[[Path], object], path: Path) -> tuple[str, float, float]:
    """As :func:`outcome`, in a process with limits.

    Returns:
        The outcome, or the signal that ended it; its CPU seconds; its additional memory at most, in MB.
    """
    receives, sends = os.pipe()
    child = os.fork()
    if child == 0:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began = _resident("VmRSS"), time.process_time()
        said = outcome(read, path)
        seconds = time.process_time() - began
        os.write(sends, json.dumps([said[-4000:], seconds, _resident("VmHWM") - before]).encode())
        os._exit(0)
    os.close(sends)
    with open(receives, "rb") as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    return tuple(json.loads(said)) if said else (f"ended by signal {os.WTERMSIG(status)}", CPU_S, 0.0)


def main(name: str, directory: str) -> None:
    """Reads hostile files of a type, each under this name in a directory, and prints the outcomes as JSON."""
    path, outcomes = Path(directory, name), []
    for content in EXAMPLES[name]():
        path.write_bytes(content)
        outcomes.append((content[:60].decode("latin-1"), len(content), *guarded(READERS[name], path)))
    print(json.dumps(outcomes))


def fuzzed(name: str, rng: random.Random, changed: Callable[[random.Random, Any], Any]) -> bytes:
    """A valid file of a type with some changes."""
    if name == "events.jsonl":
        events: Any = list(EVENTS)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(events))
            events[place] = changed(rng, events[place])
        return lines(events)
    if name == "rank_00000.safetensors":
        whole = regions([([4, 4], [0, 0], [2, 4]), ([4, 4], [2, 0], [2, 4])])
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        index = changed(rng, json.loads(header["__metadata__"][INDEX]))
        return file_of(changed(rng, {**header, "__metadata__": {INDEX: json.dumps(index)}}), 16)
    if name == "model.safetensors":
        whole = weights()
        length = int.from_bytes(whole[:8], "little")
        return file_of(changed(rng, json.loads(whole[8 : 8 + length])), 16)
    index = {"metadata": {"total_size": 8}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    plain = {"training_state.json": STATE, "conversion.json": CONVERSION, "config.json": CONFIG}.get(name, index)
    return json.dumps(changed(rng, plain)).encode()


if __name__ == "__main__":
    main(*sys.argv[1:])
