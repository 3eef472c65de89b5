"""Pages: their links lead somewhere, and code names none that is not there."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.cases import each_row

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "README.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:```.*?^```|    .*?)$", re.MULTILINE | re.DOTALL)
FOLDERS = ("benchmarks", "docs", "examples", "megatron", "moc", "scripts", "tests", "tools")
FOREIGN = {"--busier-experts", "--no-kill", "--partition", "--account", "--jobid"}  # of programs that are not ours
COMPOSED = {"--host-gbs", "--network-gbs", "--storage-gbs"}  # by simulate.py
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[tuple[Path, str]]:
    """File and anchor of each link to something of the repository; the file is absolute."""
    targets = [target.partition("#") for target in LINK.findall(page.read_text(encoding="utf-8"))]
    within = [(path, anchor) for path, _, anchor in targets if not re.match(r"[a-z]+:", path)]
    return [(Path(os.path.normpath(page.parent / path)) if path else page, anchor) for path, anchor in within]


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [LINK.sub("]", heading).replace("[", "").replace("]", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@each_row("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_existing_targets(page):
    for target, anchor in links(page):
        assert target.exists(), f"{page.relative_to(ROOT)} links to {target}, which is not there"
        missing = anchor and anchor not in anchors(target)
        assert not missing, (
            f"{page.relative_to(ROOT)} links to #{anchor} of {target.relative_to(ROOT)}: no such heading"
        )


def test_every_page_is_in_index_or_index_of_its_folder():
    listed = {target for index in (INDEX, *INDEX.parent.glob("*/README.md")) for target, _ in links(index)}
    assert {page for page in PAGES if page.is_relative_to(INDEX.parent)} - {INDEX} <= listed


@each_row("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_on_pages_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`|\bpython ((?:tools|benchmarks|examples)/\w+\.py)", text)
    given = {"moc/sharding/rules/rotating.py"}  # the reader writes it
    files = {name for pair in named for name in pair if name} - given
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


@pytest.fixture(scope="module")
def sources() -> str:
    """All programs, as text."""
    suffixes = (".py", ".sh", ".sbatch")
    folders = (ROOT / folder for folder in FOLDERS if folder not in ("docs", "tests"))
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@each_row("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_named_on_pages_exist(page, sources):
    """As an option, or as a field that makes one."""
    named = (
        set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+(?![\w*-])", page.read_text(encoding="utf-8"))) - FOREIGN - COMPOSED
    )
    fields = {flag: flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in named}
    known = {flag for flag, field in fields.items() if flag in sources or re.search(rf"\b{field}\b", sources)}
    assert sorted(named - known) == []


def published() -> set[str]:
    """Names of packages that are known to be published: what pyproject.toml requires, and tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in wanted} | {"uv"}


def installed_by_name(text: str) -> list[str]:
    """The names that commands of pip in a text install; paths, options and placeholders are left out."""
    found = []
    for command in re.findall(r"pip install ([^\n`]*)", text):
        for word in re.findall(r"'[^']*'|\S+", command):
            if re.fullmatch(r"[-.$/].*|[A-Z_]+", word.strip("'\"")):
                continue
            name = re.match(r"'?([a-zA-Z][\w-]*)", word)
            if name is None:
                break
            found.append(name[1])
            if not word[-1].isalnum() and word[-1] not in "']":  # the end of a sentence
                break
    return found


@each_row(
    ("text", "names"),
    [
        ("`pip install uv`", ["uv"]), ("run pip install 'a-b[c]>=1,<2', or", ["a-b"]), ("pip install -e '.[a]'", []),
        ("pip install WHEEL 'a' b | c", ["a", "b"]), ("pip install '&lt;WANTED>' | x", []), ("pip install {x} y", []),
        ("pip install ./a.whl", []),
    ],
)  # fmt: skip
def test_package_names_in_pip_commands_are_found(text, names):
    assert installed_by_name(text) == names


def test_pip_installs_only_known_packages(sources):
    """Anybody could register such a name."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES] + [sources]
    assert {name for text in texts for name in installed_by_name(text)} - published() == set()


def test_pages_named_in_code_exist():
    """In docstrings, messages and ``--help``."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git here")
    named = {}
    for name in listed.stdout.split():
        if name.endswith((".py", ".sh", ".sbatch", ".yaml", "CHANGELOG.md")) and (ROOT / name).exists():
            found = re.findall(r"\bdocs/[\w/.-]+\.md\b", (ROOT / name).read_text(encoding="utf-8"))
            named.update(dict.fromkeys(found, name))
    assert named
    assert [f"{name}: {page}" for page, name in named.items() if not (ROOT / page).exists()] == []
