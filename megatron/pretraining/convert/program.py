"""Converts checkpoints between Format v1, dense ones that stock Megatron-LM reads, and transformers."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.pretraining.convert.hugging_face import HUGGING_FACE, is_hugging_face
from moc.cli_output import Parser, escapes_output, human, print_lines, progress, refused
from moc.errors import code_of
from moc.inspect.checkpoint import SNAPSHOT, format_of, is_checkpoint, read_checkpoint, select_checkpoint
from moc.policy import is_window_policy
from moc.store import dense_files
from moc.store.errors import CheckpointError

TORCH_DIST = "torch_dist"

EPILOG = """\
examples:
  python tools/convert_checkpoint.py snapshots checkpoints                  # Format v1 to dense
  python tools/convert_checkpoint.py checkpoints snapshots --writers 8      # dense to Format v1, in 8 files
  python tools/convert_checkpoint.py snapshots/iter_0000100 recut --to snapshot --writers 2
  python tools/convert_checkpoint.py snapshots checkpoints -- --config run.yaml  # a window of sparse snapshots
  python tools/convert_checkpoint.py checkpoints mixtral --to hf --family mixtral --verify
  python tools/convert_checkpoint.py mixtral checkpoints                    # from transformers: iter_0000000

snapshot    Format v1 (docs/reference/format.md), as the policies save it
torch_dist  dense: weights in megatron-core's torch_dist, which stock Megatron-LM reads in any layout, and the
            optimizer state, schedule and position that --load needs to continue bit for bit.  Checkpoints of --save
            can be converted, too; optimizer state of a script of Megatron-LM must not be dp_reshardable
hf          a directory of transformers with safetensors, config.json and the tokenizer; it has weights only.  OUTPUT
            is this directory.  Families are mixtral, qwen2_moe, qwen3_moe, glm4_moe and olmoe.  An hf directory is
            converted to a dense checkpoint of iteration 0, with model.yaml for --config in the same directory

To convert a checkpoint that does not record its model to hf, give the flags of the run after --.

A window of --ckpt-policy sparse is converted in the same way as a run resumes from it (docs/how-to/convert.md):
pretrain_gpt_moe.py replays its iterations.  This requires the data, the number of processes of the run (or
--nproc-per-node), and the flags of the run after --; flags for saving, loading, logging and evaluation are ignored.
In the layout of the run the result is bit-identical to its state; in another layout it differs by rounding.  If the
losses differ from the losses of the run, nothing is written.

Both formats are independent of a parallel layout.  Tensors are converted one by one: memory holds some of them, and
one file of weights, for any size of the model.

In the pickle .metadata of torch_dist, only the types that describe tensors are read: no code in a checkpoint runs.  A
directory without our manifest is refused unless --trust is given; then only its weights are converted.

exit codes: 0 converted, 1 refused or failed (with one sentence as the reason), 2 error in the command line."""


def build_parser() -> Parser:
    """Builds the command line parser."""
    parser = Parser(
        usage="%(prog)s [options] SOURCE OUTPUT [-- FLAGS]",
        description="Convert a checkpoint.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a directory of checkpoints, one iter_* in it, or one of hf"
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the directory to write an iter_* into")
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="checkpoint of iteration N instead of the tracker's or the newest"
    )
    parser.add_argument(
        "--to", choices=(SNAPSHOT, TORCH_DIST, HUGGING_FACE), help="format to write (default: the other one)"
    )
    parser.add_argument(
        "--writers",
        type=int,
        metavar="N",
        help="number of files of equal size to divide the tensors into (default: as in SOURCE)",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of the model's computation, if the checkpoint does not record it; with hf, dtype to write",
    )
    parser.add_argument("--no-optim", action="store_true", help="convert only the weights")
    parser.add_argument(
        "--max-file-size",
        type=int,
        metavar="MB",
        help="size of a file of weights (default: 1024 in torch_dist, one file is held in memory; 5000 in hf)",
    )
    parser.add_argument(
        "--allow-stale",
        action="store_true",
        help="take experts that a partial checkpoint (pec, selective) lacks from older ones in its directory",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="with FLAGS: processes that replay a window (default: number of processes of the run)",
    )
    parser.add_argument(
        "--family",
        metavar="F",
        help="with --to hf: model family of transformers (default: the family, if only one fits)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="with hf: read what was written again, and compare all bits"
    )
    parser.add_argument(
        "--check-logits",
        action="store_true",
        help="with hf: compare the logits of both models, which must fit into memory, on random tokens; takes "
        "transformers",
    )
    parser.add_argument(
        "--trust", action="store_true", help="read torch_dist without a manifest of this program: see below"
    )
    return parser


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status."""
    parser = build_parser()
    arguments, flags = _split(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(arguments)
    args.flags = flags
    if not args.source.is_dir():
        parser.error(
            f"{args.source} is not a directory. Fix: pass a directory with checkpoints, or one checkpoint",
            code="not-a-directory",
        )
    if is_checkpoint(args.source) and args.iteration is not None:
        parser.error(
            f"{args.source} is one checkpoint, so --iteration has no effect. Fix: give the directory that it "
            "is in, or drop --iteration",
            code="directory-is-one-checkpoint",
        )
    for flag in ("writers", "max_file_size", "nproc_per_node"):
        if (value := getattr(args, flag)) is not None and value < 1:
            parser.error(
                f"--{flag.replace('_', '-')} cannot be {value}. Fix: pass 1 or more", code="value-out-of-range"
            )
    hugging_face = args.to == HUGGING_FACE or is_hugging_face(args.source)
    if not hugging_face and (args.verify or args.check_logits):
        parser.error(
            "--verify and --check-logits are for --to hf, and for a source from Hugging Face. Fix: drop them",
            code="flag-needs-another",
        )
    if args.family and args.to != HUGGING_FACE:
        parser.error(
            "--family is for --to hf; config.json names the family of a source from Hugging Face. Fix: drop --family",
            code="flag-needs-another",
        )
    if args.nproc_per_node is not None and not flags:
        parser.error(
            "--nproc-per-node needs the flags of a run. Fix: give them behind --, or drop it",
            code="flag-needs-another",
        )
    try:
        written = convert_checkpoint(args)
    except CheckpointError as error:
        return refused("convert_checkpoint", error)
    except OSError as error:
        failed = CheckpointError(
            f"{args.source} could not be converted into {args.output} ({error}), and nothing was published. Fix: make "
            "room or repair the disk, and retry",
            code=code_of(error),
        )
        return refused("convert_checkpoint", failed)
    print_lines(f"wrote {written}: {human(_size(written))}")
    return 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits the command line into the tool's arguments and the flags of a run."""
    arguments = argv[: argv.index("--")] if "--" in argv else argv
    return arguments, argv[len(arguments) + 1 :]


def convert_checkpoint(args: argparse.Namespace) -> Path:
    """Converts the checkpoint that the command line names, and returns its directory; ``flags`` are the run's.

    Raises:
        CheckpointError: the checkpoint cannot be converted.
    """
    if is_hugging_face(args.source):
        from megatron.pretraining.convert.hugging_face.conversions import import_directory

        return import_directory(args)
    if args.to == HUGGING_FACE:
        return _export(args)
    if args.flags:
        with _replayed_window(args) as directory:
            return _convert(directory, args.to or TORCH_DIST, args)
    directory = args.source if is_checkpoint(args.source) else select_checkpoint(args.source, args.iteration)
    return _convert(directory, args.to or (TORCH_DIST if format_of(directory) == SNAPSHOT else SNAPSHOT), args)


def _export(args: argparse.Namespace) -> Path:
    from megatron.pretraining.convert.hugging_face.conversions import export

    if args.flags and _is_window(args):
        with _replayed_window(args) as directory:
            return export(directory, args, replayed=True)
    return export(args.source if is_checkpoint(args.source) else select_checkpoint(args.source, args.iteration), args)


def _is_window(args: argparse.Namespace) -> bool:
    directory = args.source if is_checkpoint(args.source) else select_checkpoint(args.source, args.iteration)
    return is_window_policy(read_checkpoint(directory).policy or "")


@contextlib.contextmanager
def _replayed_window(args: argparse.Namespace) -> Iterator[Path]:
    """Yields a temporary dense checkpoint of the state at the end of a window, by replay."""
    from megatron.pretraining.convert.contents import iteration_of, refuse_to_replace
    from megatron.pretraining.convert.window import replay_window, window_in

    root, iteration = args.source.resolve(), args.iteration
    if is_checkpoint(args.source):
        root, iteration = root.parent, iteration_of(root)
    window = window_in(root, iteration)
    is_final = args.to == HUGGING_FACE  # the output is the result itself, not a directory of results
    refuse_to_replace(args.output if is_final else dense_files.checkpoint_path(args.output, window.end.iteration))
    scratch_parent = args.output.absolute().parent if is_final else args.output
    scratch_parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".window-", dir=scratch_parent) as scratch:
        directory, remark = replay_window(window, args.flags, args.nproc_per_node, Path(scratch))
        if remark:
            print_lines(remark, error=True)
        yield directory


def _convert(directory: Path, target: str, args: argparse.Namespace) -> Path:
    from megatron.pretraining.convert.contents import DTYPES, MASTER, check_complete, describe_unverified
    from megatron.pretraining.convert.dense import DenseContents, write_dense
    from megatron.pretraining.convert.snapshot import contents_of, write_snapshot

    with progress(_size(directory), "verifying") as advance:
        contents = contents_of(directory, args.allow_stale, args.trust, target == TORCH_DIST, advance)
    remark = describe_unverified(contents, directory)
    dense = contents if isinstance(contents, DenseContents) else None
    dtype = DTYPES.get(_dtype(contents.facts.state.get("params_dtype"), args.dtype) or "")
    if args.no_optim:
        contents = contents.weights(dtype)
    if dense is not None:
        check_complete(contents)
    nbytes = sum(tensor.nbytes for tensor in contents.tensors)
    masters = sum(tensor.nbytes for tensor in contents.tensors if tensor.slot == MASTER)
    writers = args.writers or contents.facts.writers
    compared = 0 if dense is None else masters
    rounded = masters // 4 * dtype.itemsize if dtype and target == TORCH_DIST else 0  # weights, in addition to masters
    with progress(nbytes + compared + rounded, "converting") as advance:
        if dense is not None and masters:
            dense.check_masters(advance)
        if target == SNAPSHOT:
            written = write_snapshot(contents, args.output, writers, advance)
        else:
            file_bytes = (args.max_file_size or 1024) * 10**6
            written = write_dense(contents, args.output, writers, dtype, file_bytes, advance)
    if remark:
        print_lines(remark, error=True)
    return written


def _dtype(saved: str | None, flag: str | None) -> str | None:
    if saved and flag and saved != flag:
        raise CheckpointError(
            f"the model of the checkpoint computes with {saved}. Fix: drop --dtype {flag}",
            code="dtype-conflict",
        )
    return saved or flag


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
