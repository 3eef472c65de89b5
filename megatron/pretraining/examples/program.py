"""Copies recipes, scripts, Slurm templates and examples of the package."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from moc.cli_output import Parser, ToolError, escapes_output, print_lines, refused

FILES = Path(__file__).parent / "files"
"""Has the files at their places in the repository."""

_TRAIN = ("pretrain_gpt_moe.py", "scripts/common.sh", "scripts/train.sh", "scripts/torchrun.py", "scripts/recipes/*")
_QUICKSTART = (
    *("pretrain_gpt_moe.py", "scripts/common.sh", "scripts/quickstart.sh"),
    *("tools/train_tokenizer.py", "tools/preprocess_data.py", "tools/plot_loss.py"),
)


@dataclass(frozen=True)
class Example:
    """Files that are copied together.

    Attributes:
        summary: one line.
        patterns: of their paths in :data:`FILES`.
    """

    summary: str
    patterns: tuple[str, ...]

    def paths(self) -> list[str]:
        """The paths of the files, relative to :data:`FILES`."""
        return sorted(str(path.relative_to(FILES)) for pattern in self.patterns for path in FILES.glob(pattern))


def examples() -> dict[str, Example]:
    """All examples by name; each recipe is one."""
    scripts = {
        "pretrain": Example("pretrain_gpt_moe.py, which torchrun and mocrun start", ("pretrain_gpt_moe.py",)),
        "quickstart": Example("scripts/quickstart.sh: trains on a CPU, loses a worker, resumes", _QUICKSTART),
        "train": Example("scripts/train.sh: starts a training by the name of a recipe; all recipes", _TRAIN),
        "slurm": Example(
            "scripts/slurm: templates for Slurm; train.sh and all recipes",
            (*_TRAIN, "scripts/slurm/*", "tools/clean_memory.py"),
        ),
        "tools": Example("the programs of tools/, which are also commands such as moc-convert", ("tools/*.py",)),
        "torch_loop": Example("a training loop of plain PyTorch, protected by moc.torch", ("examples/torch_loop.py",)),
        "hugging_face_trainer": Example(
            "the Trainer of Hugging Face transformers, protected by moc.transformers",
            ("examples/hugging_face_trainer.py",),
        ),
        "accelerate_loop": Example(
            "a loop of Hugging Face accelerate, protected by moc.accelerate", ("examples/accelerate_loop.py",)
        ),
        "torchtitan_trainer": Example(
            "a training of torchtitan, protected by moc.torchtitan", ("examples/torchtitan_trainer.py",)
        ),
        "lightning_trainer": Example(
            "a training of Lightning, protected by moc.lightning", ("examples/lightning_trainer.py",)
        ),
        "pure_torch": Example("an engine of plain PyTorch under mocrun", ("examples/pure_torch.py",)),
        "spot_trace": Example("a trace of 48 nodes for moc-simulate", ("examples/spot_trace.txt",)),
    }
    for recipe in sorted(FILES.glob("scripts/recipes/*.yaml")):
        first, _, _ = recipe.read_text(encoding="utf-8").partition("\n")
        scripts[recipe.stem] = Example(first.removeprefix("# "), (f"scripts/recipes/{recipe.name}",))
    return scripts


def build_parser(names: list[str]) -> argparse.ArgumentParser:
    """The command line parser."""
    parser = Parser(description="List recipes, scripts, Slurm templates and examples, or copy one of them.")
    parser.add_argument("name", nargs="?", choices=names, metavar="NAME", help="the example; without it, list all")
    parser.add_argument(
        "directory",
        nargs="?",
        default=".",
        metavar="DIRECTORY",
        help="directory for the files, which have the same paths in it as in the repository (default: %(default)s)",
    )
    return parser


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0, or 1 on an error."""
    known = examples()
    args = build_parser([*known]).parse_args(argv)
    if args.name is None:
        width = max(map(len, known))
        print_lines(*(f"{name:{width}}  {example.summary}" for name, example in known.items()))
        return 0
    try:
        copy(known[args.name], Path(args.directory))
    except (ToolError, OSError) as error:
        return refused("copy_examples", error, args.directory)
    return 0


def copy(example: Example, directory: Path) -> None:
    """Copies the files of an example, and prints their paths.

    Raises:
        ToolError: one of the files exists; nothing is copied.
    """
    paths = example.paths()
    for path in paths:
        if os.path.lexists(directory / path):
            raise ToolError(
                f"{directory / path} exists. Fix: name another directory, or move the file away", code="output-exists"
            )
    for path in paths:
        source, target = FILES / path, directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as file:
            file.write(source.read_bytes())
        shutil.copymode(source, target)
        print_lines(target)
