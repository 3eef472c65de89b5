"""Options in the source of a script: what a launcher may refuse without running it."""

from megatron.pretraining.entry.options import options_in
from tests.cases import each_row


def found(tmp_path, source, **modules):
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "script.py").write_text(source)
    packages = tmp_path / "site-packages"
    packages.mkdir(exist_ok=True)
    (packages / "package.py").write_text("def add(parser): ...\n")
    return options_in(tmp_path / "script.py", [tmp_path, packages])


def test_options_of_script_and_its_modules_are_found(tmp_path):
    source = "from inner import add\nimport json\nparser.add_argument('-x', '--first')\nother = '--second'\n"
    assert found(tmp_path, source, inner="parser.add_argument('--third')") == {"-x", "--first", "--second", "--third"}


@each_row(
    "source",
    [
        "parser.add_argument(f'--{name}')",
        "parser.add_argument(*names)",
        "from package import add\nparse(extra_args_provider=add if wanted else None)",
        "import package\nparse(extra_args_provider=package.add)",
        "def broken(",
    ],
)
def test_options_not_named_in_source_are_unknown(source, tmp_path):
    assert found(tmp_path, source) is None


def test_provider_in_module_next_to_script_is_found(tmp_path):
    source = "import inner\nparse(extra_args_provider=inner.add)"
    assert found(tmp_path, source, inner="parser.add_argument('--third')") == {"--third"}


def test_provider_of_missing_package_adds_nothing(tmp_path):
    source = "try:\n    from missing.arguments import add\nexcept ImportError:\n    pass\n"
    assert found(tmp_path, source + "parse(extra_args_provider=add if has else None)") == frozenset()
