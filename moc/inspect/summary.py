"""Shows the contents of a checkpoint: position, model, and bytes of weights and optimizer state, by operator."""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moc.cli_output import Parser, console, escapes_output, human, print_json, print_lines, refused
from moc.inspect.checkpoint import (
    SNAPSHOT,
    Checkpoint,
    StoredBox,
    is_checkpoint,
    read_all_boxes,
    read_checkpoint,
    select_checkpoint,
)
from moc.inspect.coverage import PARAM, SLOTS, coverage_problems, is_by_operator, operator_or_other
from moc.inspect.older_versions import Age, chain_problems, describe_older_experts, gradient_bases, stored_expert_ages
from moc.store.errors import CheckpointError
from moc.store.manifest import OperatorEntry

_KINDS = ("embedding", "attention", "mlp", "router", "expert", "output", "other")
_NUMBER = re.compile(r"(\d+)")
_WIDE = 160  # columns without a terminal

EPILOG = """\
examples:
  python tools/inspect_checkpoint.py checkpoints
  python tools/inspect_checkpoint.py checkpoints --iteration 100 --by operator
  python tools/inspect_checkpoint.py checkpoints/iter_0000100 --by file --json

Checkpoints are dense (written by --save) or in Format v1 (written by a policy; docs/reference/format.md).

An operator is a part of the model that is saved as a unit: the embedding, a layer's attention, its router, one of its
experts, its mlp (dense or shared expert, with the norm before it), and the output.  Sizes are in powers of 1000.
Only headers are read; tools/verify_checkpoint.py compares the content of files with their hashes."""


def build_parser() -> Parser:
    """Builds the command line parser."""
    parser = Parser(
        description="Show what a checkpoint holds.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a directory of checkpoints, or one iter_* in it")
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="checkpoint of iteration N instead of the tracker's or the newest"
    )
    parser.add_argument(
        "--by",
        choices=("kind", "operator", "file"),
        default="kind",
        help="rows of the table: kinds of operators, operators, or files (one for each worker) (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    return parser


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0, or 1 if there is no readable checkpoint."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not args.path.is_dir():
        parser.error(
            f"{args.path} is not a directory. Fix: pass a directory with checkpoints, or one checkpoint",
            code="not-a-directory",
        )
    single = is_checkpoint(args.path)
    if single and args.iteration is not None:
        parser.error(
            f"{args.path} is one checkpoint, so --iteration has no effect. Fix: give the directory that it "
            "is in, or drop --iteration",
            code="directory-is-one-checkpoint",
        )
    try:
        checkpoint = read_checkpoint(args.path if single else select_checkpoint(args.path, args.iteration))
    except CheckpointError as error:
        return refused("inspect_checkpoint", error)
    boxes, damaged = read_all_boxes(checkpoint)
    problems = checkpoint.problems + damaged
    if checkpoint.damaged_files.isdisjoint(checkpoint.shard_files):
        problems += coverage_problems(checkpoint, boxes) + chain_problems(checkpoint)
    view = View.create(checkpoint, boxes, args.by)
    if args.json:
        fields = describe(view, boxes, problems) | {"by": args.by, "rows": rows_to_dict(view)}
        print_json(fields)
    else:
        print_view(view, boxes, problems)
    return 0


@dataclass(frozen=True)
class View:
    """View of a checkpoint: totals by kind, operator or file, and the ages of experts."""

    checkpoint: Checkpoint
    by: str
    rows: Mapping[str, Total]
    ages: Mapping[str, Age]

    @classmethod
    def create(cls, checkpoint: Checkpoint, boxes: list[StoredBox], by: str) -> View:
        """Groups boxes; by operator, experts missing in the checkpoint have empty rows."""
        rows, ages_by_expert = group_boxes(boxes, by), stored_expert_ages(checkpoint)
        if by == "operator":
            rows |= {name: Total({name}) for name in ages_by_expert.keys() - rows.keys()}
            rows = {name: rows[name] for name in sorted(rows, key=_operator_position)}
        return cls(checkpoint, by, rows, ages_by_expert)


@dataclass
class Total:
    """Totals over the boxes of one operator, kind or file."""

    operators: set[str] = field(default_factory=set)
    elements: Counter[str] = field(default_factory=Counter)
    """Elements by slot."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes by slot."""

    def add(self, box: StoredBox, operator: str) -> None:
        """Adds a box of an operator."""
        self.operators.add(operator)
        self.elements[box.slot] += box.region.numel
        self.nbytes[box.slot] += box.nbytes

    def include(self, other: Total) -> None:
        """Adds the boxes of another total."""
        self.operators |= other.operators
        self.elements.update(other.elements)
        self.nbytes.update(other.nbytes)

    @property
    def parameters(self) -> int:
        """Parameters with state; each has an element in every slot of its operator's detail."""
        return max(self.elements.values(), default=0)

    @property
    def total(self) -> int:
        """Bytes of all slots."""
        return sum(self.nbytes.values())


def group_boxes(boxes: list[StoredBox], by: str) -> dict[str, Total]:
    """Groups boxes by ``operator``, ``kind`` or ``file``, in the order of the forward pass or of file names."""
    rows: dict[str, Total] = defaultdict(Total)
    for box in boxes:
        operator = operator_or_other(box.name)
        rows[{"operator": operator, "kind": _kind(operator), "file": box.file}[by]].add(box, operator)
    order = {"operator": _operator_position, "kind": _KINDS.index, "file": str}[by]
    return {name: rows[name] for name in sorted(rows, key=order)}


def _kind(operator: str) -> str:
    """Returns the kind of an operator, such as ``expert`` of ``layers.3.expert.5``."""
    return operator.split(".")[2] if operator.startswith("layers.") else operator


def _operator_position(operator: str) -> tuple:
    kind, numbers = _kind(operator), [int(number) for number in _NUMBER.findall(operator)]
    outside = {"embedding": 0, "output": 2, "other": 3}.get(kind, 1)
    return outside, numbers[:1], _KINDS.index(kind), numbers[1:]


def rows_to_dict(view: View) -> list[dict]:
    """Returns the rows, for JSON."""
    by, checkpoint = view.by, view.checkpoint
    row_dicts, chain_bases = [], gradient_bases(checkpoint) if by == "operator" else {}
    for name, row in view.rows.items():
        row_fields = {"name": name, "operators": len(row.operators), "parameters": row.parameters, "bytes": row.total}
        if by == "operator" and (entry := (checkpoint.operators or {}).get(name)):
            row_fields |= {"detail": entry.detail, "updates": entry.step}
        if by == "operator" and name in view.ages:
            row_fields |= asdict(view.ages[name])
        row_fields |= {"base": chain_bases[name]} if name in chain_bases else {}
        row_dicts.append(row_fields | {"slots": dict(row.nbytes)})
    return row_dicts


def describe(view: View, boxes: list[StoredBox], problems: list[str]) -> dict:
    """Returns facts about a checkpoint; sizes are in bytes."""
    checkpoint, state = view.checkpoint, view.checkpoint.state
    fields = {"path": str(checkpoint.directory), "format": checkpoint.format, "iteration": checkpoint.iteration}
    fields |= {name: state.get(name) for name in ("consumed_samples", "skipped_iterations")}
    fields |= {"loss_scale": loss_scale(state)}
    fields |= {name: state.get(name) for name in ("optimizer", "optimizer_step", "shape")}
    saved_files = _files(checkpoint, checkpoint.shard_files) | {
        "tensors": len({b.name for b in boxes}),
        "boxes": len(boxes),
    }
    if checkpoint.format == SNAPSHOT:
        entries = (checkpoint.operators or {}).values()
        details = Counter(entry.detail for entry in entries)
        updates = sorted({entry.step for entry in entries if entry.step is not None})
        fields |= {"policy": checkpoint.policy, "layout": dict(checkpoint.layout), "state": saved_files}
        fields |= {
            "details": dict(details),
            "updates": updates,
            "stale": stale_experts(view.ages, checkpoint.iteration),
        }
        fields |= {"experts": {name: asdict(age) for name, age in view.ages.items()}}
    else:
        fields |= {"weights": _files(checkpoint, checkpoint.weight_files), "optimizer_state": saved_files}
    return fields | {"complete": not problems, "problems": problems}


def stale_experts(ages_by_expert: Mapping[str, Age], iteration: int | None) -> dict[str, int]:
    """Returns, by expert that is older than the checkpoint, the last iteration that its state and gradients reach."""
    older = {name: age.until for name, age in ages_by_expert.items() if age.until != iteration}
    return dict(sorted(older.items(), key=lambda item: item[1]))


def _files(checkpoint: Checkpoint, names: list[str]) -> dict:
    return {"files": len(names), "bytes": checkpoint.bytes_of(names)}


def loss_scale(state: Mapping) -> float | None:
    """Returns the loss scale in training_state.json, for fp16 with an adaptive loss scale."""
    scale = (state.get("grad_scaler") or {}).get("scale")
    return next(iter(scale), None) if isinstance(scale, list) else scale


def print_view(view: View, boxes: list[StoredBox], problems: list[str]) -> None:
    """Prints facts and table as text."""
    fields = describe(view, boxes, problems)
    print_lines(*(f"{name:<16}{text}" for name, text in _lines(fields).items()))
    print_lines(*(f"  {problem}" for problem in problems))
    if view.rows:
        console(width=_WIDE).print(_table(view))


def _lines(fields: dict) -> dict[str, str]:
    position = "{iteration}, {consumed_samples} samples, {skipped_iterations} iterations skipped".format(**fields)
    scale, shape = fields["loss_scale"], fields["shape"] or {}
    sizes = [f"{name} {value}" for name, value in shape.items() if value not in (None, False)]
    if is_by_operator(shape):
        sizes = [f"{len(shape):,} operators"]
    saved_state = _lines_of_snapshot(fields) if fields["format"] == SNAPSHOT else _lines_of_dense(fields)
    count = len(fields["problems"])
    return {
        "checkpoint": fields["path"],
        "iteration": position,
        "loss scale": "none saved" if scale is None else f"{scale:g}",
        "model": ", ".join(sizes) or "unknown",
        **saved_state,
        "complete": f"no, {count} problem{'s' if count > 1 else ''}:" if count else "yes (hashes not compared)",
    }


def _lines_of_dense(fields: dict) -> dict[str, str]:
    weights, optimizer = fields["weights"], fields["optimizer_state"]
    optimizer_text = f"{_format_files(optimizer)}; {fields['optimizer']}, step {fields['optimizer_step']}"
    return {
        "weights": f"{human(weights['bytes'])} in {weights['files']} files",
        "optimizer state": optimizer_text if optimizer["files"] else "not saved",
    }


def _lines_of_snapshot(fields: dict) -> dict[str, str]:
    layout = ", ".join(f"{name} {size}" for name, size in fields["layout"].items())
    details = ", ".join(f"{count:,} {detail}" for detail, count in sorted(fields["details"].items()))
    updates = fields["updates"]
    span = "" if not updates else f"; {fields['optimizer']}, updates {updates[0]}"
    span += f" to {updates[-1]}" if len(updates) > 1 else ""
    return {
        "policy": fields["policy"],
        "layout": layout or "not said",
        "operators": f"{details}{span}" + (f"; {describe_older_experts(fields['stale'])}" if fields["stale"] else ""),
        **_line_of_ages(fields["experts"].values()),
        "state": _format_files(fields["state"]),
    }


def _line_of_ages(experts: Collection[Mapping[str, int]]) -> dict[str, str]:
    if not experts:
        return {}
    ages, chains = [expert["age"] for expert in experts], [expert["until"] - expert["base"] for expert in experts]
    text = f"saved {sum(ages) / len(ages):.3g} iterations ago in the mean, at most {max(ages)}"
    if any(chains):
        text += f"; gradients of {sum(map(bool, chains)):,} follow, of up to {max(chains)} iterations"
    return {"experts": text}


def _format_files(files_of_regions: dict) -> str:
    return "{size} in {files} files, {boxes:,} boxes of {tensors:,} tensors".format(
        size=human(files_of_regions["bytes"]), **files_of_regions
    )


def _table(view: View):
    from rich import box
    from rich.table import Table

    rows, by = view.rows, view.by
    slots = {slot for row in rows.values() for slot in row.nbytes}
    order = [*(slot for keys in SLOTS.values() for slot in keys), PARAM]
    slots = sorted(slots, key=lambda slot: (order.index(slot) if slot in order else len(order), slot))
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    total_bytes = sum(row.total for row in rows.values())
    table.add_column(by, "total", no_wrap=True)
    cells = {} if by == "operator" else {"operators": lambda row: f"{len(row.operators):,}"}
    cells["parameters"] = lambda row: f"{row.parameters:,}"
    cells |= {slot: lambda row, slot=slot: human(row.nbytes.get(slot, 0)) for slot in slots}
    cells |= {"bytes": lambda row: human(row.total), "share": lambda row: f"{100 * row.total / total_bytes:.1f} %"}
    totals, entries = Total(), view.checkpoint.operators if by == "operator" else None
    for row in rows.values():
        totals.include(row)
    for name, cell in cells.items():
        table.add_column(name, cell(totals), justify="right", no_wrap=True)
    operator_columns = (("detail", "updates") if entries else ()) + (
        ("age", "state of") if entries and view.ages else ()
    )
    for name in operator_columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in rows.items():
        operator_cells = _operator_cells((entries or {}).get(name), view.ages.get(name))
        table.add_row(
            name, *(cell(row) for cell in cells.values()), *(operator_cells[: len(operator_columns)] if entries else ())
        )
    return table


def _operator_cells(entry: OperatorEntry | None, age: Age | None) -> tuple[str, ...]:
    """Returns the last cells of an operator's row: detail, updates, age, and iterations of its state and gradients."""
    detail, step = (entry.detail, entry.step) if entry else ("", None)
    return detail, "" if step is None else f"{step:,}", f"{age.age:,}" if age else "", str(age or "")
