"""The arguments of Megatron-LM's loop that have an entry are those that its source reads."""

import ast
import dataclasses
import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core

from megatron.training import config  # noqa: E402

from megatron.pretraining.config import ConfigError  # noqa: E402
from megatron.pretraining.entry import stock_loop  # noqa: E402
from tests.cases import each_row  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def read_arguments() -> set[str]:
    """The names that the functions of Megatron-LM's loop read of ``args`` and of its container of configurations."""
    spec = importlib.util.find_spec("megatron.training")
    tree = ast.parse((Path(next(iter(spec.submodule_search_locations))) / "training.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(stock_loop.FUNCTIONS) <= functions.keys()
    found = set()
    for name in stock_loop.FUNCTIONS:
        for node in ast.walk(functions[name]):
            match node:
                case ast.Attribute(value=ast.Name(id="args"), ctx=ast.Load()):
                    found.add(node.attr)
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id="cfg_container"))):
                    found.add(node.attr)
                case ast.Call(
                    func=ast.Name(id="getattr"), args=[ast.Name(id="args"), ast.Constant(value=str(key)), *_]
                ):
                    found.add(key)
                case ast.Call(func=ast.Attribute(attr="fields"), args=[ast.Name(id=kind)]):  # read by name of the field
                    found |= {one.name for one in dataclasses.fields(getattr(config, kind))}
    return found - {"get_builder_cls"}


def test_each_loop_argument_has_entry():
    missing = read_arguments() - stock_loop.known_arguments()
    assert not missing, "port these arguments, or refuse them"


def test_each_entry_is_read_by_loop():
    unread = stock_loop.known_arguments() - read_arguments() - {"tensorboard_log_interval"}  # read by training_log
    assert not unread


@each_row("file", stock_loop.PORTED)
def test_ported_argument_is_read_in_listed_file(file):
    text = (ROOT / file).read_text()
    assert not [name for name in stock_loop.PORTED[file].split() if name not in text]


def test_all_refusals_are_in_one_message():
    arguments = Namespace(log_straggler=True, log_energy=True, iterations_to_skip=[], cuda_graph_impl="none")
    with pytest.raises(ConfigError) as caught:
        stock_loop.refuse_arguments(arguments)
    assert [one.code for one in caught.value.problems] == ["loop-argument-unsupported"] * 2
    assert "--log-straggler " in str(caught.value) and "--log-energy " in str(caught.value)
    stock_loop.refuse_arguments(Namespace(log_straggler=False, iterations_to_skip=[3][:0], cuda_graph_impl="none"))


@each_row(
    "arguments",
    [
        dict(ckpt_convert_format="torch", ckpt_convert_save="there"),
        dict(moe_use_upcycling=True),
        dict(logits_save_dir="there"),
        dict(logits_load_dir="there"),
        dict(fault_injector_ranks="0"),
        dict(fault_injector_num_ranks=1),
        dict(enable_ft_package=True),
        dict(inprocess_restart=True),
    ],
)
def test_ignored_flags_and_random_weights_are_refused(arguments):
    with pytest.raises(ConfigError) as caught:
        stock_loop.refuse_arguments(Namespace(**arguments))
    assert [one.code for one in caught.value.problems] == ["loop-argument-unsupported"]
