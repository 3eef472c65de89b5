"""Files of each type as a stranger may send them, up to 1 MB, and the functions that read them.

As a program, it reads the hostile files of every type, each in a process of its own with a limit on its CPU time and
memory, and prints as JSON how each has ended.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import random
import resource
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core
from torch.distributed.checkpoint.state_dict_saver import save as torch_save  # noqa: E402

from megatron.pretraining.checkpoint.state import read_state  # noqa: E402
from megatron.pretraining.checkpoint.unpickling import check_metadata  # noqa: E402
from megatron.pretraining.checkpoint.writer import _read_report  # noqa: E402
from megatron.pretraining.config import ds_config  # noqa: E402
from megatron.pretraining.convert.hugging_face.conversions import FORMAT, check_conversion_hashes  # noqa: E402
from megatron.pretraining.convert.hugging_face.families import family_of  # noqa: E402
from megatron.pretraining.convert.hugging_face.files import read_directory, read_json  # noqa: E402
from megatron.pretraining.entry.offline import config_of_words  # noqa: E402
from megatron.pretraining.planning.selective_choice import read_routing  # noqa: E402
from moc.cli_output import ToolError  # noqa: E402
from moc.elastic.plan import Plan, PlanSettings  # noqa: E402
from moc.elastic.plan import make_plan as make_plan  # noqa: E402
from moc.events import EventLog  # noqa: E402
from moc.files import decode, safe_directory  # noqa: E402
from moc.files.event_log import read_events  # noqa: E402
from moc.files.safe_directory import SafeDirectory  # noqa: E402
from moc.inspect.checkpoint import SNAPSHOT, Checkpoint, read_all_boxes, read_checkpoint  # noqa: E402
from moc.inspect.coverage import coverage_problems, missing_operators  # noqa: E402
from moc.recovery.inventory import summary  # noqa: E402
from moc.report.figures import compute_report  # noqa: E402
from moc.report.loss import read_loss_curve  # noqa: E402
from moc.simulate.failures import read_trace  # noqa: E402
from moc.simulate.profile import read_profile  # noqa: E402
from moc.state import module_bytes  # noqa: E402
from moc.store import dense_files, storage, store  # noqa: E402
from moc.store import manifest as manifests  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402
from moc.store.header import INDEX_KEY  # noqa: E402
from moc.store.ownership import Holder  # noqa: E402
from moc.store.storage import LocalStorage  # noqa: E402
from tests.mutations import changed, encoded, signed  # noqa: E402

MOST = 1_000_000  # bytes of a file
CPU_S, MEMORY = 4, 200 << 20  # guards; allocators reserve more addresses than they use
MOST_MB = 100  # of memory that a file takes
STATE: dict[str, Any] = dict(
    iteration=3, consumed_samples=12, skipped_iterations=0, optimizer="adam", optimizer_step=3, params_dtype="bf16",
    fp8=None, main_params_dtype="fp32", moments=None, grad_scaler={"scale": [1.0], "growth_tracker": 0,
    "hysteresis_tracker": 1}, sample_order={"seed": 1}, job="job",
    shape={"num_layers": 2, "num_experts": 4, "moe_layer_freq": [0, 1]},
    scheduler=dict(num_steps=12, max_lr=1e-3, min_lr=0.0, lr_warmup_steps=1, lr_decay_steps=100,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_style="constant", wd_incr_steps=100),
)  # fmt: skip
CONFIG: dict[str, Any] = dict(
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
    return file_of({"__metadata__": {INDEX_KEY: text}, **header}, min(end, 1 << 20))


def weights(count: int = 2) -> bytes:
    """A file of tensors as transformers has it."""
    one = {f"w{n}": {"dtype": "F32", "shape": [2], "data_offsets": [8 * n, 8 * n + 8]} for n in range(count)}
    return file_of({"__metadata__": {"format": "pt"}, **one}, 8 * count)


def lines(events: list[Any]) -> bytes:
    """A log of events."""
    return b"".join(encoded(event).encode() + b"\n" for event in events)


def snapshot() -> dict[str, Any]:
    """A valid manifest of a snapshot."""
    entry = manifests.FileEntry(100, 50, "0" * 32)
    operators = {
        "layers.0.mlp": manifests.OperatorEntry("full", 3, {"master": 4, "exp_avg": 4}),
        "layers.0.expert.1": manifests.OperatorEntry("compute", None, {"param": 4}),
    }
    record = dict(
        iteration=3, loss=1.5, grad_norm=0.5, loss_scale=1.0, skipped=False, tokens=64, learning_rate=1e-3, samples=4,
        zeros=None, params_norm=2.0, stop=False, auxiliary={"load": 0.1},
    )  # fmt: skip
    state = STATE | dict(record=record, alike={"2": ["layers.0.mlp"]}, copied=["layers.0.mlp"])
    made = manifests.Manifest(
        3, "full", 1, {"rank_00000.safetensors": entry}, operators, {"dp": 1}, state, "0" * 16, "job", (1, 2)
    )
    return json.loads(made.to_json())


def _report_of(events: list[dict[str, Any]], path: Path) -> None:
    compute_report(str(path.parent), events)


def _read_log(path: Path) -> None:
    read_events(path)
    log = EventLog(path.parent)
    log.newest("iteration")
    log.close()


def _read_regions(path: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size}}
    checkpoint = Checkpoint(path.parent, files, format=SNAPSHOT)
    boxes, problems = read_all_boxes(checkpoint)
    coverage_problems(checkpoint, boxes)
    if problems:
        raise CheckpointError(problems[0])


def _read_state(path: Path) -> None:
    missing_operators((), read_state(path.parent)["shape"])


def _read_config(path: Path) -> None:
    config = read_json(path, safe_directory.MAX_SMALL_FILE_BYTES)
    family_of(config).flags_of(config)


def _read_dense(path: Path) -> None:
    manifest = dense_files.read_manifest(path.parent)
    assert manifest is not None
    read_checkpoint(path.parent)
    dense_files.find_damage(path.parent, manifest["files"])


def _read_snapshot(path: Path) -> None:
    manifest = manifests.Manifest.from_json(
        SafeDirectory(path.parent).read(path.name, safe_directory.MAX_MANIFEST_BYTES), path.name
    )
    json.dumps([summary(manifest)])
    assert manifest.nbytes >= 0 and manifest.to_json()
    read_checkpoint(path.parent)


def _read_run(path: Path) -> None:
    _valid(store._read_record(LocalStorage(path.parent)) is not None)


def _read_lease(path: Path) -> None:
    storage.lease_remaining_s(path.parent)
    _valid(storage._lease_length_s(path.parent) != storage.DEFAULT_LEASE_S)


def _read_dense_report(path: Path) -> None:
    error = _read_report(path.parent, 0).error
    _valid(error is None or "cannot be read" not in error)


def _valid(read: bool) -> None:
    """Raises as other readers do, after one that ignores a damaged file."""
    if not read:
        raise ValueError("it was ignored")


def _read_module_state(path: Path) -> None:
    source = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    module_bytes.unpack(source, {"counts": torch.zeros(4), "calls": 0})


def _read_routing(path: Path) -> None:
    try:
        read_routing(str(path))
    except ToolError as error:
        raise ValueError(str(error)) from None


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


def _within(
    plain: dict[str, Any], fields: dict[str, list[Any]], write: Callable[[dict[str, Any]], str] = json.dumps
) -> Iterator[bytes]:
    yield from _any_json()
    for name, values in fields.items():
        for value in values:
            yield write({**plain, name: value}).encode()[: MOST + 999]


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


def _trace() -> Iterator[bytes]:
    yield from _any_json()
    for line in (b"1,add,a\n", b"1,remove,a\n", b"2026-01-01,10:00:00,3\n", b'1,add,"', b",\n", b'"\n', b"1\n"):
        yield line * (MOST // len(line))
    yield b"".join(b"%d,add,a\n" % number for number in range(70_000, 0, -1))
    yield b"9" * 4000 + b",add,a\n"
    yield b"9" * 900_000 + b",add,a\n"


def _flags() -> Iterator[bytes]:
    yield from _any_json()
    most = safe_directory.MAX_CONFIG_BYTES
    yield from (
        part * (most // len(part)) for part in (b"a: 1\n", b"- ", b"? ", b"&a ", b"[", b"{", b"!!", b"a:\n ", b"*a\n")
    )
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else '1'}]" for n in range(40)]
    yield "\n".join(levels).encode()
    yield b"num_layers: " + b"9" * 60_000
    yield b"? " + b"[" * 30_000


def _routing() -> Iterator[bytes]:
    yield from (b"", b"PK", b"\0" * MOST, _archive(b""), _archive(b"\x93NUMPY"))
    for shape in ((1 << 22, 1, 1), (60_000, 8, 16), (12, 1, 4), (0, 1, 1), (7_900_000,)):
        for dtype in ("u1", "i8", "f8", "U1"):
            if numpy.dtype(dtype).itemsize * numpy.prod(shape) <= safe_directory.MAX_MANIFEST_BYTES:
                yield _archive(_array(numpy.zeros(shape, dtype)), zipfile.ZIP_DEFLATED)
    for shape in ((900_000, 1, 1), (12, 75_000, 1), (12, 1, 75_000), (60_000, 1, 2)):
        for dtype in ("u1", "i8"):
            if numpy.dtype(dtype).itemsize * numpy.prod(shape) < MOST:
                yield _archive(_array(numpy.ones(shape, dtype)))
    yield _archive(b"\x93NUMPY\x01\x00" + b"\xff\xff" + b"{" * 70_000)


def _array(values: numpy.ndarray) -> bytes:
    stream = io.BytesIO()
    numpy.save(stream, values)
    return stream.getvalue()


def _archive(array: bytes, how: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", how) as archive:
        archive.writestr("tokens.npy", array)
    return stream.getvalue()


def _module_state(header: Any) -> bytes:
    return file_of(header if isinstance(header, bytes) else encoded(header).encode(), 256)


def _module_states() -> Iterator[bytes]:
    yield from map(_module_state, _any_json())
    for value in (*BIG, {"list": [{"tensor": 0}] * 80_000}, {"dict": [[1, 2]] * 80_000}, {"bytes": "00" * 400_000}):
        yield _module_state({"values": {"a": value}, "tensors": [["float32", [4], 0, "cpu"]]})
    for shape in ([1] * 80_000, [1 << 62] * 60, [0, 1 << 62, 1 << 62]):
        yield _module_state({"values": {"a": {"tensor": 0}}, "tensors": [["float32", shape, 0, "cpu"]]})


def _bytes_changed(rng: random.Random, whole: bytes) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])


def _changed_events(rng: random.Random) -> bytes:
    events: list[Any] = list(EVENTS)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(events))
        events[place] = changed(rng, events[place])
    return lines(events)


def _changed_regions(rng: random.Random) -> bytes:
    header = header_of(regions([([4, 4], [0, 0], [2, 4]), ([4, 4], [2, 0], [2, 4])]))
    return file_of(encoded(changed_index(rng, header)).encode(), 16)


def header_of(whole: bytes) -> dict[str, Any]:
    """The header of a safetensors file."""
    return json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])


def changed_index(rng: random.Random, header: dict[str, Any]) -> Any:
    """A header of a region file in which the index, the entries or both have changes."""
    index = json.loads(header["__metadata__"][INDEX_KEY])
    index = encoded(changed(rng, index)) if rng.random() < 0.6 else json.dumps(index)
    header = {**header, "__metadata__": {INDEX_KEY: index}}
    return changed(rng, header) if rng.random() < 0.6 else header


def _changed_trace(rng: random.Random) -> bytes:
    rows = rng.choice([
        ["0,add,a", "0,add,b", "500,remove,a", "900,add,c"],
        ["2026-01-01,10:00:00,3", "2026-01-01,10:01:00,4", "2026-01-01,10:05:00,2"],
    ])  # fmt: skip
    cells = [changed(rng, row.split(",")) if rng.random() < 0.4 else row.split(",") for row in rows]
    text = "\n".join(",".join(map(str, row)) if isinstance(row, list) else str(row) for row in cells)
    return text.encode("utf-8", "surrogatepass")


def _json_changed(plain: Any, write: Callable[[Any], str] = encoded) -> Callable[[random.Random], bytes]:
    return lambda rng: write(changed(rng, plain)).encode()


FLAGS = dict(
    train_iters=9,
    micro_batch_size=1,
    mock_data=True,
    tokenizer_type="NullTokenizer",
    vocab_size=99,
    seq_length=16,
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_experts=4,
    lr=1e-3,
    moe={"moe_router_topk": 2},
)
DS_CONFIG = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
}  # fmt: skip
DENSE = {"format": dense_files.FORMAT, "iteration": 3, "files": {"x": {"bytes": 1, "xxh3_128": "0" * 32}}}
HOLDER = {"job": "a-job", "run": "0" * 16, "term": [0, 3], "host": "host", "pid": 7, "before": ["another"]}
RUN = {"run": "0" * 16, "address": "/data", "made": 1.5}
REPORT = {
    "name": "rank_00000.safetensors", "job": "a-job", "term": [0, 3],
    "file": {"bytes": 9, "header_bytes": 8, "header_xxh3_128": "0" * 32},
    "operators": {"embedding": {"detail": "full", "step": 3, "elements": {"master": 4}}},
}  # fmt: skip
PLAN = make_plan(range(4), {0: [4, 3, 2, 1, 1, 1], 2: [1, 1, 9, 1, 1, 1]}, PlanSettings(3)).to_json()
MODULE_STATE = {
    "values": {"counts": {"tensor": 0}, "calls": 3, "pairs": {"dict": [[1, {"tuple": [1, {"bytes": "00"}]}]]},
               "last": {"deque": [1, 2], "maxlen": 4}, "mean": {"array": 1}, "turn": {"complex": [1.0, 2.0]}},
    "tensors": [["float32", [4], 0, "cpu"], ["float64", [2, 2], 16, "cpu"]],
}  # fmt: skip
WEIGHT_INDEX = {"metadata": {"total_size": 8}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
_OTHER_WEIGHTS = [*BIG, {"a": "/etc/passwd"}, {str(n): f"{n}" for n in range(50_000)}]


@functools.cache
def metadata_file() -> bytes:
    """``.metadata`` of a checkpoint of two tensors, as torch writes it."""
    with tempfile.TemporaryDirectory() as directory:
        tensors = {"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16)}
        torch_save(tensors, checkpoint_id=directory, no_dist=True)
        return Path(directory, ".metadata").read_bytes()


@dataclass(frozen=True)
class FileType:
    """Files of one type.

    Attributes:
        name: file name.
        read: reads a file; raises CheckpointError, ValueError or OSError if it is damaged.
        mutated: makes a valid file with some changes.
        examples: makes hostile files of up to 1 MB.
        beside: another file that the reader needs.
    """

    name: str
    read: Callable[[Path], object]
    mutated: Callable[[random.Random], bytes]
    examples: Callable[[], Iterator[bytes]]
    beside: Callable[[], dict[str, bytes]] = dict

    def in_directory(self, directory: Path) -> Path:
        """Makes a directory for the file; returns the path of the file."""
        directory.mkdir(exist_ok=True)
        for name, content in self.beside().items():
            (directory / name).write_bytes(content)
        return directory / self.name


def _events_type(read: Callable[[Path], object]) -> FileType:
    return FileType("events.jsonl", read, _changed_events, _events)


def _json_type(
    name: str,
    read: Callable[[Path], object],
    plain: dict[str, Any],
    examples: Callable[[], Iterator[bytes]] | None = None,
    beside: Callable[[], dict[str, bytes]] = dict,
) -> FileType:
    return FileType(
        name, read, _json_changed(plain), examples or (lambda: _within(plain, dict.fromkeys(plain, BIG))), beside
    )


def _signed_type(name: str, read: Callable[[Path], object], plain: dict[str, Any]) -> FileType:
    return FileType(
        name, read, _json_changed(plain, _signed), lambda: _within(plain, dict.fromkeys(plain, BIG), _signed)
    )


def _signed(value: Any) -> str:
    return signed(value) if isinstance(value, dict) else encoded(value)


TYPES: dict[str, FileType] = {
    "manifest.json, snapshot": _signed_type("manifest.json", _read_snapshot, snapshot()),
    "manifest.json, dense": _json_type("manifest.json", _read_dense, DENSE),
    ".rank_00000.json, snapshot": _json_type(
        ".rank_00000.json",
        lambda path: manifests.RankReport.from_json(
            SafeDirectory(path.parent).read(path.name, safe_directory.MAX_MANIFEST_BYTES).decode()
        ),
        REPORT,
    ),
    ".rank_00000.json, dense": _json_type(
        ".rank_00000.json", _read_dense_report, {"files": DENSE["files"], "error": None}
    ),
    ".fence": _signed_type(
        ".fence",
        lambda path: Holder.from_json(SafeDirectory(path.parent).read(path.name, safe_directory.MAX_SMALL_FILE_BYTES)),
        HOLDER,
    ),
    ".run.json": _signed_type(".run.json", _read_run, RUN),
    ".lease": _signed_type(".lease", _read_lease, {"seconds": 12.5}),
    "latest_checkpointed_iteration.txt": FileType(
        "latest_checkpointed_iteration.txt",
        lambda path: dense_files.latest_iteration(path.parent),
        lambda rng: str(changed(rng, ["3"])[:1]).strip("[]'").encode("utf-8", "surrogatepass"),
        _any_json,
    ),
    "training_state.json": _json_type(
        "training_state.json",
        _read_state,
        STATE,
        lambda: _within(
            STATE,
            {
                "shape": [{**STATE["shape"], name: value} for name in STATE["shape"] for value in BIG],
                "scheduler": BIG,
                "sample_order": BIG,
                "optimizer": BIG,
                "iteration": BIG,
            },
        ),
    ),
    "rank_00000.safetensors": FileType("rank_00000.safetensors", _read_regions, _changed_regions, _regions),
    "module state": FileType(
        "module_state",
        _read_module_state,
        _json_changed(MODULE_STATE, lambda value: _module_state(value).decode("latin-1")),
        _module_states,
    ),
    "elastic plan": _json_type(
        "plan.json", lambda path: Plan.from_json(decode.require_object(decode.parse(path.read_bytes()), "it")), PLAN
    ),
    "events.jsonl, newest": _events_type(_read_log),
    "events.jsonl, report": _events_type(lambda path: _report_of(read_events(path), path)),
    "events.jsonl, profile": _events_type(read_profile),
    "events.jsonl, loss": _events_type(read_loss_curve),
    "conversion.json": _json_type(
        "conversion.json",
        lambda path: check_conversion_hashes(path.parent, lambda count: None),
        CONVERSION,
        lambda: _within(
            CONVERSION,
            {"files": [*BIG, {"/etc/passwd": CONVERSION["files"]["x"]}, {"../x": {}}, {"x": [[]] * 200_000}]},
        ),
    ),
    "config.json": _json_type("config.json", _read_config, CONFIG),
    "model.safetensors.index.json": _json_type(
        "model.safetensors.index.json",
        lambda path: read_directory(path.parent),
        WEIGHT_INDEX,
        lambda: _within({"weight_map": {}}, {"weight_map": _OTHER_WEIGHTS}),
        lambda: {"model-00001-of-00001.safetensors": weights(1)},
    ),
    "model.safetensors": FileType(
        "model.safetensors",
        lambda path: read_directory(path.parent),
        lambda rng: file_of(encoded(changed(rng, header_of(weights()))).encode(), 16),
        _weights,
    ),
    ".metadata": FileType(
        ".metadata",
        lambda path: check_metadata(path.parent),
        lambda rng: _bytes_changed(rng, metadata_file()),
        _metadata,
    ),
    "metadata.json": _json_type(
        "metadata.json",
        lambda path: check_metadata(path.parent),
        BACKEND,
        beside=lambda: {".metadata": metadata_file()},
    ),
    "--config": FileType(
        "flags.yaml", lambda path: config_of_words(["--config", str(path)]), _json_changed(FLAGS), _flags
    ),
    "--deepspeed-config": _json_type("ds.json", lambda path: ds_config.settings_in(str(path)), DS_CONFIG),
    "--trace": FileType("trace.csv", read_trace, _changed_trace, _trace),
    "--routing": FileType(
        "routing.npz",
        _read_routing,
        lambda rng: _bytes_changed(rng, _archive(_array(numpy.ones((12, 2, 4), "i4")))),
        _routing,
    ),
}
"""Files of unknown origin, by type: all that programs of this package decode (``docs/reference/security.md``)."""


def outcome(read: Callable[[Path], object], path: Path) -> str:
    """Reads a file: ``read``, ``refused``, or the traceback of an exception that no reader may raise."""
    try:
        read(path)
    except (CheckpointError, ValueError, OSError) as error:
        most = max(map(len, [*str(error).splitlines(), ""]))  # a line for each problem of flags
        return "refused" if most < 1000 else f"{most} characters of an error"
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


def measured(name: str, directory: str) -> list[tuple[str, int, str, float, float]]:
    """Reads hostile files of a type in a directory.

    Returns:
        For each file, its begin, size, outcome, CPU seconds, and additional MB of memory.
    """
    kind = TYPES[name]
    path, outcomes = kind.in_directory(Path(directory)), []
    for content in kind.examples():
        path.write_bytes(content)
        outcomes.append((content[:60].decode("latin-1"), len(content), *guarded(kind.read, path)))
    return outcomes


if __name__ == "__main__":
    print(json.dumps({name: measured(name, tempfile.mkdtemp(dir=sys.argv[1])) for name in TYPES}))
