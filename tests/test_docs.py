"""The documentation: every block of code runs or says why not, and prints what stands below it; the site's build."""

from __future__ import annotations

import doctest
import importlib.util
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from unittest import SkipTest

import pytest
from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Languages of fences: those whose blocks are run, and those that are shown.
RUN, SHOWN = ("python", "sh"), ("dockerfile", "json", "text", "toml", "yaml")

#: Pages whose blocks take long.
SLOW = ("README.md", "docs/checkpoints.md", "docs/dataframe-to-model.md")
LONG = (
    *("docs/cli.md", "docs/contributing.md", "docs/data.md", "docs/deepspeed.md", "docs/from-databricks.md"),
    *("docs/from-horovod.md", "docs/getting-started.md", "docs/predict.md", "docs/resume.md"),
)

#: The session of pages that make one.
MASTER = "local-cluster[2,2,1024]"

FENCES = RawFencedCodeBlockLexer(re.compile(r"(?P<info>[^\n]*)\n"))
INVISIBLE = DirectiveInHTMLCommentLexer("invisible-code-block", "python")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(document: Document) -> list[Region]:
    return sorted(FENCES(document), key=lambda fence: fence.start)


def language(fence: Region) -> str:
    return str(fence.lexemes["info"]).partition(" ")[0]


def title(fence: Region) -> str | None:
    """The name of the file that a fence is, if it is one."""
    match = re.search(r' title="(.+)"$', str(fence.lexemes["info"]))
    return None if match is None else match.group(1)


def outside_of_fences(parse: Callable[[Document], Iterable[Region]]) -> Callable[[Document], Iterator[Region]]:
    """What a parser finds, but for what is itself shown as text."""

    def parse_outside(document: Document) -> Iterator[Region]:
        known = fences(document)
        for region in parse(document):
            if not any(fence.start < region.start < fence.end for fence in known):
                yield region

    return parse_outside


def blocks(document: Document) -> Iterator[Region]:
    """The fences that are run or written, each with what it has to print."""
    known = fences(document)
    for fence, after in pairwise([*known, None]):
        assert fence is not None
        fence.parsed = fence.lexemes["source"]
        if title(fence) is not None:
            fence.evaluator = write
        elif language(fence) in RUN:
            fence.evaluator = run_python if language(fence) == "python" else run_shell
            if after is not None and after.lexemes["info"] == "text" and between(document, fence, after) == "":
                fence.lexemes["output"] = after.lexemes["source"]
        else:
            continue
        yield fence


def invisible_blocks(document: Document) -> Iterator[Region]:
    for region in INVISIBLE(document):
        yield Region(region.start, region.end, region.lexemes["source"], PythonEvaluator())


def between(document: Document, first: Region, second: Region) -> str:
    """What is written between two regions; that of a mark ends before the end of its comment."""
    return document.text[first.end : second.start].strip().removeprefix("-->")


def write(example: Example) -> None:
    path = Path(title(example.region) or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(example.parsed)


def run_python(example: Example) -> str | None:
    with redirect_stdout(io.StringIO()) as printed:
        PythonEvaluator()(example)
    return difference(example.region, printed.getvalue())


def run_shell(example: Example) -> str | None:
    """Runs a block with the Python of the tests first on the path."""
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.parsed],
        env={**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ended.returncode != 0:
        return f"it ended with {ended.returncode}:\n{ended.stderr}"
    return difference(example.region, ended.stdout)


def difference(block: Region, printed: str) -> str | None:
    """What a block should not have printed; ``None`` if nothing is shown below it, or if that is the same."""
    if "output" not in block.lexemes:
        return None
    shown = comparable(str(block.lexemes["output"]))
    printed = comparable(printed, of_ranks="[rank" in shown)
    if doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS):
        return None
    return f"what is shown:\n{shown}\nwhat was printed:\n{printed}"


def comparable(text: str, of_ranks: bool = True) -> str:
    """Output without what differs between machines; lines of ranks, which come in any order, are first, or left out."""
    text = text.replace(socket.gethostname(), "laptop")
    text = re.sub(r'File ".*", line \d+', 'File "file.py", line 1', text)
    lines = [line.rstrip() for line in text.splitlines()]
    first = sorted(line for line in lines if line.startswith("[rank")) if of_ranks else []
    return "\n".join([*first, *(line for line in lines if not line.startswith("[rank"))]) + "\n"


def parse(page: Path) -> Document:
    return Document.parse(str(page), blocks, outside_of_fences(invisible_blocks), outside_of_fences(SkipParser()))


def run(page: Path) -> list[str]:
    """Runs a page's blocks from the top to the end, in the current directory; why some were not."""
    document = parse(page)
    document.namespace["__name__"] = "__main__"  # as in a notebook or a script
    reasons = []
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest as skipped:
            reasons.append(str(skipped))
    return reasons


def wants_spark(page: Path) -> bool:
    document = parse(page)
    skipped = {fence.start for _, fence in skips(document) if fence is not None}
    return any("SparkSession" in fence.parsed for fence in blocks(document) if fence.start not in skipped)


def skips(document: Document) -> Iterator[tuple[Region, Region | None]]:
    """The marks of a page, each with the fence that it stands before."""
    known = fences(document)
    for skip in outside_of_fences(SkipParser())(document):
        yield skip, next((fence for fence in known if fence.start > skip.start), None)


def marks(page: Path) -> list[pytest.MarkDecorator]:
    decorators = []
    if wants_spark(page):
        decorators.append(pytest.mark.spark)
    if name_of(page) in SLOW:
        decorators.append(pytest.mark.slow)
    if name_of(page) in LONG:
        decorators.append(pytest.mark.long)
    return decorators


WITH_CODE = [
    pytest.param(page, marks=marks(page), id=name_of(page)) for page in PAGES if next(blocks(parse(page)), None)
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_every_block_of_code_runs_or_says_why_not(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "import deepspeed" in page.read_text():
        request.getfixturevalue("deepspeed")
    if wants_spark(page):
        request.getfixturevalue("sessions").get(MASTER)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for reason in run(page):
        print(f"{name_of(page)}: not run: {reason}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_marked_as_they_should_be(page: Path) -> None:
    assert problems(parse(page)) == []


def problems(document: Document) -> list[str]:
    """Fences without a language, marks without a reason or a block, files that nothing uses."""
    texts = []
    known = fences(document)
    for fence in known:
        where, named = document.line_column(fence.start), language(fence)
        if not named:
            texts.append(f"{where}: a fence without a language")
        elif named not in (*RUN, *SHOWN):
            texts.append(f"{where}: {named!r} is neither a language that is run nor one that is shown")
        elif str(fence.lexemes["info"]) != named and title(fence) is None:
            texts.append(f"{where}: {fence.lexemes['info']!r} is more than a language and a title")
        file = title(fence)
        users = [other.lexemes["source"] for other in known if other.start > fence.start and language(other) in RUN]
        if file is not None and not any(is_used(file, str(source)) for source in users):
            texts.append(f"{where}: nothing uses the file {file!r}")
    for skip, fence in skips(document):
        where, (action, reason) = document.line_column(skip.start), skip.parsed
        if action != "next" or not re.fullmatch(r'".{10,}"', reason or ""):
            texts.append(f'{where}: a mark has to be: skip: next "the reason"')
        if fence is None or language(fence) not in RUN or between(document, skip, fence) != "":
            texts.append(f"{where}: no block of code comes right after the mark")
    return texts


def is_used(file: str, source: str) -> bool:
    """Whether code names a file, or runs it as a module of its folder."""
    module = ".".join(Path(file).with_suffix("").parts[1:])
    return file in source or (module != "" and module in source)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```\ntext\n```", "a fence without a language"),
        ("```bash\nls\n```", "'bash' is neither"),
        ("```python linenums\n1\n```", "'python linenums' is more than a language and a title"),
        ('```python title="train.py"\n1\n```', "nothing uses the file 'train.py'"),
        ("<!-- skip: next -->\n```sh\nls\n```", "a mark has to be"),
        ('<!-- skip: next "why" -->\n```sh\nls\n```', "a mark has to be"),
        ('<!-- skip: start "for good reasons" -->\n```sh\nls\n```', "a mark has to be"),
        ('<!-- skip: next "for good reasons" -->\nwords\n```sh\nls\n```', "no block of code comes right after"),
        ('<!-- skip: next "for good reasons" -->\n```text\nls\n```', "no block of code comes right after"),
        ('<!-- skip: next "for good reasons" -->\n', "no block of code comes right after"),
    ],
)
def test_wrong_marks_are_found(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text + "\n")
    (problem,) = problems(parse(tmp_path / "page.md"))
    assert expected in problem


@pytest.mark.parametrize(
    "text",
    [
        "```python\nraise ValueError\n```",
        "```python\nprint(1)\n```\n\n```text\n2\n```",
        "```sh\nfalse\n```",
        "```sh\necho 1\n```\n```text\n2\n```",
        '```python title="train.py"\n1 / 0\n```\n\n```sh\npython train.py\n```',
        '<!-- skip: next "for good reasons" -->\n```python\n1 / 0\n```\n\n```python\n1 / 0\n```',
        "<!-- invisible-code-block: python\n1 / 0\n-->",
    ],
)
def test_blocks_that_do_not_work_are_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(text + "\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, ArithmeticError, ValueError)):
        run(tmp_path / "page.md")


def test_what_is_shown_as_text_is_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '```text\n<!-- skip: next "for good reasons" -->\n```\n\n'
        '```python\nprint("[rank 1 x]\\n[rank 0 x] 17")\n```\n\n```text\n[rank 0 x] ...\n[rank 1 x]\n```\n'
    )
    monkeypatch.chdir(tmp_path)
    assert problems(parse(page)) == []
    assert run(page) == []


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site of a folder where no network can be reached."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=folder,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def frameworks() -> ModuleType:
    """What writes the table of docs/frameworks.md."""
    spec = importlib.util.spec_from_file_location("frameworks", ROOT / "tools" / "frameworks.py")
    assert spec is not None and spec.loader is not None
    frameworks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(frameworks)
    return frameworks


def test_the_table_of_frameworks_is_what_was_noted(frameworks: ModuleType) -> None:
    """By the last runs of ``make test-frameworks``."""
    assert doctest.testmod(frameworks).failed == 0
    text, noted = frameworks.PAGE.read_text(), json.loads(frameworks.NOTED.read_text())
    assert frameworks.page(text, noted) == text
    assert len(re.findall("(?m)^\\| .* \\| passed \\|", text)) > 10
    assert "failed" not in frameworks.table(noted)


def test_the_rows_that_tests_declare_are_those_that_were_noted(frameworks: ModuleType) -> None:
    """A row that only GPUs can show is in the table before it has run."""
    noted, declared = json.loads(frameworks.NOTED.read_text()), frameworks.declared()
    waiting = {name for name, row in declared.items() if row["only"] == {"GPU"}} - noted.keys()
    assert noted.keys() == declared.keys() - waiting
    lines = dict(re.findall(r"(?m)^\| (.+?) \| .+? \| (.+?) \|", frameworks.PAGE.read_text()))
    for name, row in declared.items():
        shown = re.split("; ", lines[row["system"]])
        assert any(text == row["row"] or text.startswith(f"{row['row']} (") for text in shown), name
        assert name not in waiting or f"{row['row']} (not run)" in shown, name


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    ended = build(ROOT, tmp_path)
    assert ended.returncode == 0, ended.stderr
    for page in PAGES[1:]:
        assert (tmp_path / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()
    for file in [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]:
        loaded = r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>|url\([\"']?https?:[^)]*\)"
        assert re.findall(loaded, file.read_text()) == [], file
