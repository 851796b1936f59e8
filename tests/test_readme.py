"""What README and guides say is true: rows of the tables of differences, what error texts are, files and commands."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distributor.channel.frames import UNREACHED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()

#: Pages with tables of differences. No names of Horovod are here, so that its page has none.
COMING_FROM = sorted(set(DOCS.glob("from-*.md")) - {DOCS / "from-horovod.md"})


def test_each_difference_names_a_test_that_exists() -> None:
    assert len(COMING_FROM) == 3
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in COMING_FROM:
        rows = differences(page.read_text())
        assert rows, page
        for *_, held in rows:
            names = re.findall(r"`(test_\w+)`", held)
            assert names, f"no test named: {held}"
            for name in names:
                assert f"def {name}(" in tests, name


def differences(page: str) -> list[list[str]]:
    """The rows of the tables below the heading: what, there, here, tests."""
    rows = table(page[page.index("## Differences") :].partition("\n## What")[0])
    assert {len(row) for row in rows} == {4}
    return rows


def table(section: str) -> list[list[str]]:
    """The rows of a section's tables, without their heads."""
    rows = (line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in row] for row in rows if row[0].strip(" -|")]


def section(page: str, heading: str) -> str:
    return page[page.index(f"\n## {heading}\n") :].removeprefix("\n").partition("\n## ")[0]


def test_the_readmes_differences_are_those_of_the_page() -> None:
    page = [row[:3] for row in differences((DOCS / "from-pyspark.md").read_text())]
    rows = table(section(README, "In place of PySpark's distributor"))
    assert len(rows) == 5
    assert all(row in page for row in rows)


def test_commands_and_files_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE) or f" {target}" in makefile, target
    anchors = {re.sub(r"[^\w -]", "", head).replace(" ", "-").lower() for head in re.findall(r"^#+ (.*)", README, re.M)}
    for path, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", README):
        assert (ROOT / path).exists(), path
        assert path or anchor in anchors, anchor


def test_versions_are_the_pinned_ones() -> None:
    """And each page names the same Pythons."""
    rows = {name: (everything, quick) for name, everything, quick in table(section(README, "Versions"))}
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints" / "main.txt").read_text(), re.MULTILINE))
    others = configparser.ConfigParser()
    others.read(ROOT / "constraints" / "versions.cfg")
    for name, pin in (("PyTorch", "torch"), ("PySpark", "pyspark"), ("DeepSpeed", "deepspeed")):
        everything, quick = rows[name]
        assert everything.split()[0] == pins[pin]
        versions = {environment[pin] for environment in others.values() if pin in environment}
        assert versions == set(re.findall(r"\d+\.\d+\.\d+", quick))
    for page in (README, (DOCS / "getting-started.md").read_text()):
        assert "Python 3.11 to 3.13" in page
    assert not re.findall(r"Python 3\.(?:[0-9]|10)\b", README)


def test_errors_of_the_documentation_are_those_of_the_code() -> None:
    sources = [path.read_text() for path in (ROOT / "distributor").rglob("*.py")]
    texts = "\n".join(text_of(node) for source in sources for node in ast.walk(ast.parse(source)))
    page = (DOCS / "errors.md").read_text()
    rows = re.findall(r"^\| `(.*?)`", section(page, "What it says"), re.M)
    assert len(rows) > 15
    for row in rows:
        if row not in ("Python in worker has different version", f"{UNREACHED} at"):  # Spark's; made of two
            setting = re.fullmatch(r"(spark\.\S+) is( true)?", row)  # the value is put in
            pattern = ".*".join(re.escape(part) for part in (setting[1] if setting else row).split("..."))
            assert re.search(pattern, texts), row


def text_of(node: ast.AST) -> str:
    """The text of a string, with nothing in place of what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return ""


@pytest.mark.long
def test_the_demo_does_its_first_half_without_java() -> None:
    demo = [sys.executable, str(ROOT / "examples" / "digits.py")]
    ended = subprocess.run(demo, capture_output=True, text=True, check=True, timeout=300, env={"PATH": ""})
    accuracy = re.search(r"accuracy on held-out digits (0\.\d+)", ended.stdout)
    assert accuracy is not None
    assert float(accuracy.group(1)) >= 0.95
    assert ended.stdout.strip().splitlines()[-1].startswith("The part on Spark is left out: no Java found")


def test_local_mode_needs_no_spark(tmp_path: Path) -> None:
    """Neither pyspark nor Java: the one cannot be imported, the other is not on the path."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nsys.modules['pyspark'] = None\nfrom distributor import TorchDistributor\n"
        "print(TorchDistributor(2, use_gpu=False).submit(lambda: 7).results())\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=300, env={"PATH": ""}
    )
    assert ended.stdout.strip() == "[7, 7]"
