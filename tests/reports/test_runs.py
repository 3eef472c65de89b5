"""A start continues its own run, or is refused: no save replaces a checkpoint of another run."""

from __future__ import annotations

import argparse
import json
import os
import re

import pytest

from megatron.pretraining.checkpoint import lineage
from moc.store import dense_files
from moc.store.errors import CheckpointError
from tests.cases import each_row
from tests.unit.store.test_dense_files import Killed, die_at

ORIGINS = {"a": "--load {}/A", "f": "--load {}/A --finetune", "p": "--pretrained-checkpoint {}/P"}
ORIGINS |= {"k": "--load {}/A --ckpt-step 2", "n": "--load {}/B --no-load-optim"}
"""By letter, the origin of a checkpoint."""

# A directory is a list of checkpoints and its tracker file.  4: of this program; 4a, 4f, ...: of a run of that origin;
# 4j: of this launch; 4r: of the run of the snapshots; 4s: of Megatron-LM; 4h: incomplete; 4d: damaged.
# @4: a tracker file; @4<: one older than the checkpoints after it.
SCENARIOS = [
    # what is there, flags, what happens
    ("", "--save B", "nothing"),
    ("", "--load B --save B", "nothing"),
    ("", "--load B --save B --exit-on-missing-checkpoint", "checkpoint-missing"),
    ("B: 2 4 @4", "--load B --save B", "B 4"),
    ("B: 2 4 @4", "--load B --save B --exit-on-missing-checkpoint", "B 4"),
    ("B: 2 4 @4", "--load B", "B 4"),
    ("B: 2 4 @4", "--save B", "save-of-another-run"),
    ("B: 2s 4s @4", "--save B", "save-of-another-run"),
    ("B: 4h", "--save B", "nothing"),
    ("B: 4d", "--save B", "nothing"),
    ("B: 2 4j @4", "--save B", "save-of-another-run"),
    ("B: 2j 4j @4", "--save B", "B 4 own"),
    # the tracker file
    ("B: 2 4", "--load B --save B", "B 4"),
    ("B: 2 4", "--load B --save B --exit-on-missing-checkpoint", "B 4"),
    ("B: 2 4", "--load B --save C", "B 4"),
    ("B: 2 4 @2<", "--load B --save B", "B 4"),
    ("B: 2 4 @2", "--load B --save B", "save-of-another-run"),
    ("B: 2 4 @2", "--load B --save C", "B 2"),
    ("B: 2 4d @4", "--load B --save B", "B 4"),
    ("B: 2 @4", "--load B --save B", "checkpoint-missing"),
    ("B: 2 4 @x", "--load B --save B", "tracker-invalid"),
    ("B: 2 4 @x", "--load B --ckpt-step 2", "B 2"),
    ("B: 2s 4s @4", "--load B --save B", "B 4"),
    ("B: 2s 4s", "--load B --save B", "tracker-missing"),
    ("B: 2s 4s", "--load B", "tracker-missing"),
    ("B: 2s 4h @2<", "--load B --save B", "B 2"),
    ("B: 2s 4s @2<", "--load B --save B", "B 2"),
    ("B: 2s 4s @2", "--load B --save B", "save-of-another-run"),
    ("B: 2h", "--load B --save B", "nothing"),
    # --load elsewhere
    ("A: 4 @4", "--load A --save B", "A 4"),
    ("A: 4 @4; B: 6a 8a @8", "--load A --save B", "B 8 own"),
    ("A: 4 @4; B: 6a 8a @6<", "--load A --save B", "B 8 own"),
    ("A: 4 @4; B: 6a 8a", "--load A --save B", "B 8 own"),
    ("A: 4 12 @12; B: 6a 8a @8", "--load A --save B", "B 8 own"),
    ("A: 4 @4; B: 6 8 @8", "--load A --save B", "save-of-another-run"),
    ("A: 4 @4; B: 2 @2", "--load A --save B", "save-of-another-run"),
    ("A: 4 @4; B: 6a 8a @6", "--load A --save B", "save-of-another-run"),
    ("A: 4s @4; B: 6s 8s @8", "--load A --save B", "save-of-another-run"),
    ("A: 4 @4; B: 6a 8s @8", "--load A --save B", "save-of-another-run"),
    ("A: 4 @4; B: 6a 8a @8", "--load B --save B", "B 8"),
    ("B: 6a 8a @8", "--load A --save B", "B 8 own"),
    # --ckpt-step
    ("B: 2 4 @4", "--load B --save B --ckpt-step 2", "save-of-another-run"),
    ("B: 2 4 @4", "--load B --save C --ckpt-step 2", "B 2"),
    ("B: 2 4d @4", "--load B --save B --ckpt-step 2", "B 2"),
    ("B: 2 @4", "--load B --save B --ckpt-step 4", "checkpoint-missing"),
    ("B: 0 4 @4", "--load B --save C --ckpt-step 0", "B 0"),
    ("B: 0s", "--load B --ckpt-step 0", "B 0"),
    ("A: 2 4 @4; B: 6a @6", "--load A --save B --ckpt-step 2", "save-of-another-run"),
    ("A: 2 4 @4; B: 4k @4", "--load A --save B --ckpt-step 2", "B 4 own"),
    ("B: 2 4 6j @6", "--load B --save B --ckpt-step 2", "B 6 own"),
    # --finetune, --no-load-optim, --pretrained-checkpoint, release
    ("A: 4 @4", "--load A --save B --finetune", "A 4 weights"),
    ("A: 4 @4; B: 2f @2", "--load A --save B --finetune", "B 2 own"),
    ("A: 4 @4; B: 2f @2", "--load A --save B", "save-of-another-run"),
    ("B: 4 @4", "--load B --save B --finetune", "save-of-another-run"),
    ("B: @release", "--load B --save B --finetune", "B release weights"),
    ("B: @release", "--load B --save B", "B release"),
    ("B: 2 @release<", "--load B --save B", "B 2"),
    ("B: 2 @release", "--load B --save B", "save-of-another-run"),
    ("B: 4 @4", "--load B --save B --no-load-optim", "B 4"),
    ("B: 4 6n @6", "--load B --save B --no-load-optim", "B 6 own"),
    ("P: 4 @4", "--load B --save B --pretrained-checkpoint P", "P 4 weights"),
    ("P: 4 @4; B: 2 @2", "--load B --save B --pretrained-checkpoint P", "B 2"),
    ("P: 4 @4; B: 2", "--load B --save B --pretrained-checkpoint P", "B 2"),
    ("P: 4 @4; B: 2s", "--load B --save B --pretrained-checkpoint P", "tracker-missing"),
    ("P: 4 @4; B: 2p @2", "--save B --pretrained-checkpoint P", "B 2 own"),
    ("P:", "--load B --save B --pretrained-checkpoint P", "checkpoint-missing"),
    # with snapshots
    ("", "--save B --snapshots 5", "snapshot 5"),
    ("B: 2r 4r @4", "--save B --snapshots 5", "snapshot 5"),
    ("B: 2r 8r @8", "--save B --snapshots 5", "B 8 own"),
    ("B: 2 4 @4", "--save B --snapshots 5", "save-of-another-run"),
    ("B: 2 4 @4", "--load B --save B --snapshots 5", "snapshot 5"),
    ("B: 2 8 @8", "--load B --save B --snapshots 5", "B 8"),
    ("A: 4 @4; B:", "--load A --save B --snapshots 5", "snapshot 5"),
    ("A: 4 12 @12; B:", "--load A --save B --snapshots 5", "snapshot 5"),
    ("A: 4 12 @12; B: 6a 8a @8", "--load A --save B --snapshots 7", "B 8 own"),
    ("A: 4 @4", "--load A --save B --finetune --snapshots 3", "snapshot 3"),
    ("B: 2 @9", "--load B --save B --snapshots 5", "snapshot 5"),
]


@each_row(("there", "flags", "expected"), SCENARIOS)
def test_start_continues_its_run_or_is_refused(there, flags, expected, tmp_path):
    for directory in filter(None, there.split(";")):
        name, _, content = directory.partition(":")
        _make(tmp_path / name.strip(), content.split())
    assert _outcome(tmp_path, flags) == expected


@each_row(("is_own", "iteration", "skips"), [(False, 5, True), (True, None, False)])
def test_flags_of_beginning_do_not_apply_later(is_own, iteration, skips):
    given = argparse.Namespace(no_load_optim=True, no_save_optim=False, override_ckpt_iteration=5)
    arguments = lineage.CheckpointChoice("root", 20, is_own=is_own).arguments(given)
    assert (arguments["override_ckpt_iteration"], arguments["no_load_optim"]) == (iteration, skips)


BEGINNINGS = [
    # what is there, flags of the run of the snapshots, flags of this start, what happens
    ("A: 4 @4", "--save B", "--load A --save B", "snapshots-of-another-run"),
    ("A: 4 @4", "--load A --save B", "--load A --save B --finetune", "snapshots-of-another-run"),
    ("A: 4 @4; C: 2 @2", "--load C", "--load A", "snapshots-of-another-run"),
    ("A: 4 @4", "--save B", "--save B --pretrained-checkpoint A", "snapshots-of-another-run"),
    ("A: 4 @4", "--load A --save B", "--load A --save B", ""),
    ("A: 4 @4; B: 6a @6", "--load A --save B", "--load B --save B", ""),
    ("A: 4r @4", "--save A", "--load A", ""),  # its own checkpoints
    ("A:", "--save B", "--load A --save B", ""),
    ("A: 4 @4", "--load A --save B", "--save B", ""),
    ("A: 4 @4", None, "--load A --save B", ""),  # of an earlier release
]


@each_row(("there", "recorded", "flags", "code"), BEGINNINGS)
def test_snapshots_of_another_run_are_not_continued(there, recorded, flags, code, tmp_path):
    for directory in there.split(";"):
        name, _, content = directory.partition(":")
        _make(tmp_path / name.strip(), content.split())
    here, before = (_beginning(tmp_path, each) for each in (flags, recorded))
    try:
        lineage.check_beginning(_command(tmp_path, flags, run="run")[1], here or "", before)
    except CheckpointError as error:
        assert error.code == code
    else:
        assert not code


def _beginning(root, flags):
    if flags is None:
        return None
    _, one = _command(root, flags)
    load, save, pretrained = (None if each is None else each.path for each in (one.load, one.save, one.pretrained))
    return lineage.beginning(load, save, pretrained, one.finetune)


def _make(root, words):
    """Writes a directory of checkpoints: small files, in the order that their times show."""
    root.mkdir()
    trackers = [word for word in words if word.startswith("@")]
    for number, kind in re.findall(r"(?<!\S)(\d+)([a-z]?)(?!\S)", " ".join(words)):
        directory = dense_files.checkpoint_path(root, int(number))
        if kind in "hsd" and kind:
            directory.mkdir()
            name = {"h": "__0_0.distcp", "s": ".metadata", "d": dense_files.STATE_FILE}[kind]
            (directory / name).touch()
        else:
            origin = ORIGINS.get(kind, "").format(root.parent)
            _save(root, int(number), "run" if kind == "r" else "other", origin)
            if kind == "j":
                manifest = directory / dense_files.MANIFEST
                manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"job": "launch"}))
        for path in (directory, directory / dense_files.MANIFEST):
            if path.exists():
                os.utime(path, (10 + int(number), 10 + int(number)))
    (root / dense_files.TRACKER_FILE).unlink(missing_ok=True)
    for word in trackers:
        content, time = word.strip("@<"), 99
        (root / dense_files.TRACKER_FILE).write_text(content)
        if word.endswith("<"):
            time = 10 + int(content) if content.isdigit() else 10
        os.utime(root / dense_files.TRACKER_FILE, (time, time))


def _save(root, iteration, run, origin=""):
    """Publishes a checkpoint whose only file names its run."""
    staging = dense_files.begin_save(root, iteration)
    (staging / "weights").write_text(f"{run} {iteration}")
    entries = {"weights": dense_files.describe_file(staging / "weights")}
    dense_files.publish_save(root, iteration, entries, lineage=dense_files.Lineage(run, origin))


def _command(root, flags, run=""):
    parser = argparse.ArgumentParser()
    for flag in ("--load", "--save", "--pretrained-checkpoint"):
        parser.add_argument(flag, type=lambda name: str(root / name))
    for flag in ("--ckpt-step", "--snapshots"):
        parser.add_argument(flag, type=int)
    for flag in ("--finetune", "--no-load-optim", "--exit-on-missing-checkpoint"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args(flags.split())
    command = lineage.Command(
        load=lineage.Directory.at(args.load),
        save=lineage.Directory.at(args.save),
        pretrained=lineage.Directory.at(args.pretrained_checkpoint),
        ckpt_step=args.ckpt_step,
        finetune=args.finetune,
        no_load_optim=args.no_load_optim,
        exit_on_missing=args.exit_on_missing_checkpoint,
        job="launch",
        run=run or ("run" if args.snapshots else ""),
    )
    return args.snapshots, command


def _outcome(root, flags):
    """What a start does: the checkpoint that it loads, or the code of its error."""
    snapshot, command = _command(root, flags)
    try:
        if snapshot is not None and (lineage.newest(command) or 0) <= snapshot:
            lineage.check_saves(command, snapshot)
            return f"snapshot {snapshot}"
        choice = lineage.choose(command)
        lineage.check_saves(command, 0 if choice.begins else choice.iteration or 0)
    except CheckpointError as error:
        return error.code
    if choice.root is None or not os.path.exists(choice.root):
        return "nothing"
    release = "release" if command.load and command.load.has_tracker else None
    if (what := release if choice.iteration is None else choice.iteration) is None:
        return "nothing"
    notes = [note for note in ("weights",) if choice.begins] + [note for note in ("own",) if choice.is_own]
    return " ".join([os.path.basename(choice.root), str(what), *notes])


COMMANDS = [
    "--load B --save B",
    "--load B --save B --exit-on-missing-checkpoint",
    "--load A --save B",
    "--load A --save B --ckpt-step 2",
    "--load A --save B --finetune",
    "--load A --save B --no-load-optim",
    "--load B --save B --pretrained-checkpoint A",
    "--save B --pretrained-checkpoint A",
    "--save B",
]


@pytest.mark.slow
@each_row("flags", COMMANDS)
@each_row("step", range(0, 40, 3))
def test_same_command_after_kill_loses_nothing(flags, step, monkeypatch, tmp_path):
    """The launch is killed at a change of the file system; its command is started again until it ends."""
    _make(tmp_path / "A", ["2", "4", "@4"])
    needs_one = "--exit-on-missing" in flags
    _make(tmp_path / "B", ["2", "@2"] if needs_one else [])
    before = _contents(tmp_path)
    with monkeypatch.context() as patch:
        die_at(patch, step)
        with pytest.raises(Killed):
            _train(tmp_path, flags, "first")
    dense_files.restore_replaced(tmp_path / "B")
    whole = _contents(tmp_path)
    assert whole.items() >= before.items()
    saved = [iteration for name, iteration in whole if name == "B"]
    try:
        began = _train(tmp_path, flags, "second")
        assert began == max(saved, default=began)
    except CheckpointError as error:
        assert (flags, error.code, bool(saved)) == ("--save B", "save-of-another-run", True)
    assert _contents(tmp_path).items() >= whole.items()


def _train(root, flags, job):
    """Loads, and saves every second iteration until the twelfth; returns the iteration at which it begins."""
    _, command = _command(root, flags, run=job)
    choice = lineage.choose(command)
    began = 0 if choice.begins else choice.iteration or 0
    lineage.check_saves(command, began)
    for iteration in range(began + 2, 13, 2):
        _save(root / "B", iteration, job, command.origin)
    return began


def _contents(root):
    """The complete checkpoints, by directory and iteration."""
    return {
        (name, one.iteration): (dense_files.checkpoint_path(root / name, one.iteration) / "weights").read_text()
        for name in ("A", "B")
        for one in dense_files.published(root / name)
    }
