"""What collectives have computed reaches the host by functions that check whether it is valid."""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
READS = ("cpu", "item", "numpy", "synchronize", "tolist")  # methods that read a device, or wait for it
APART = ("convert", "data", "planning")  # programs, and parts, that use no collective
ALLOWED = {  # by file, the values that it reads, and why their validity needs no check there
    "megatron/pretraining/checkpoint/contents.py": "v",  # of the scheduler: plain numbers
    "megatron/pretraining/elastic/moe_layer.py": "arriving.sum(axis=1), flow.sends.sum(axis=0), "
    "numpy.flatnonzero(row), waiting.wait()",
    "megatron/pretraining/elastic/replicas.py": "steps",  # synchronize_group() precedes it
    "megatron/pretraining/elastic/state_transfer.py": "steps",  # as in replicas.py
    "megatron/pretraining/engine/optimizer.py": "scale",  # of no collective
    "megatron/pretraining/process/cpu.py": "tensor",  # on the CPU
    "moc/logs/log.py": "copy_event, self._stream",  # logs of an iteration count once it is committed
    "megatron/pretraining/entry/program.py": "torch.cuda",  # --train-sync-interval, after the commit
    "moc/runtime/collectives.py": "contribution, data, gathered, lengths",  # in host memory
    "moc/runtime/device.py": "self._event, torch.cuda, values",  # the functions that check
    "moc/runtime/groups.py": "copy_to_host(tensor), pickled",
    # of committed state, or compared only after a gather, which raises if the generation is over
    "moc/session/digests.py": "copied.wait_unchecked(), sums.sum(0), sums[1].result().sum(0), sums[1].result()[0]",
    "moc/snapshot/device_copy.py": "event, mark",  # a snapshot is of a committed iteration, and finalized later
    # of a survivor's committed state, and compared after a gather
    "moc/state/digests.py": "values",
    "moc/state/replicated.py": "torch.stack(on_device)",  # counts of committed updates
    "moc/state/module_bytes.py": "read, read.cpu(), values, values.cpu()",  # loaded from a snapshot
    "moc/torch/engine.py": "copy_to_host(gradient_counts)",
    "moc/torch/data.py": "local, value.detach()",  # state of users' objects, of a committed iteration
    "moc/store/shard_file.py": "tensor.contiguous(), tensor.values.detach()",  # files
}


def reads_of(path: Path) -> set[str]:
    """The values that a file reads by the methods, without views of them."""
    tree = ast.parse(path.read_text())
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    if not any("torch" in one for one in imports):
        return set()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return {
        ast.unparse(_base(call.func.value))
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in READS
        and (call.func.attr[0] == "s" or not call.args)
    }


def _base(value: ast.expr) -> ast.expr:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "view":
        value = value.func.value
    return value


def test_device_reads_of_each_file_match_table():
    files = [path for part in ("moc", "megatron/pretraining") for path in (REPOSITORY / part).rglob("*.py")]
    found = {str(path.relative_to(REPOSITORY)): reads_of(path) for path in files if not {*APART} & {*path.parts}}
    assert {name: ", ".join(sorted(reads)) for name, reads in found.items() if reads} == ALLOWED
