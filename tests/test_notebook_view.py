"""What Jupyter shows of a run: executed for real, opened in a browser, and looked at."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

if TYPE_CHECKING:
    from recorded import Client

pytestmark = pytest.mark.slow

CELLS = [
    """
from distributor import TorchDistributor

def train(learning_rate):
    import time
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for epoch in range(4):
        print("epoch", epoch, flush=True)
        time.sleep(0.5)
    if learning_rate < 0 and dist.get_rank() == 1:
        raise ValueError(f"learning rate must be positive, not {learning_rate}")
    return learning_rate

distributor = TorchDistributor(2, local_mode=True, use_gpu=False)
distributor.run(train, 0.1)
""",
    "run = distributor.submit(train, -1)\nrun.wait()\nrun",
    "distributor.run(train, -2)",
    "TorchDistributor(0)",
    "TorchDistributor(2, local_mode=True, use_gpu=False, progress=False, logs='none').run(train, 0.1)",
    "TorchDistributor(2, local_mode=True, use_gpu=False, progress=False, logs='none').run(train, -3)",
    "import sys\nprint(sys.last_value.rank, repr(sys.last_value.__cause__))",
    """
import os, pathlib, signal, tempfile, threading, time

ready = pathlib.Path(tempfile.mkdtemp(), "ready")

def train_for_ever():
    ready.touch()
    while True:
        time.sleep(0.05)

def interrupt():
    while not ready.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
distributor.run(train_for_ever)
""",
    "run = distributor.submit(train, 0.2)\nrun",
    "run",
    "run.wait()",
    "run",
    """
def report_losses():
    from distributor import runtime

    for step in range(3):
        runtime.report(loss=1 / (1 + step) + runtime.rank(), step=step)

run = distributor.submit(report_losses)
run.result()
run.plot()
""",
    "run.placement",
    "run.attempts",
    "run.goodput",
    "run.timings",
    """
ready.unlink()
run = distributor.submit(train_for_ever)
threading.Thread(target=interrupt).start()
run.result()
""",
    "run.cancel()\nrun.wait()",
]

#: The cells by what they show.
LIVE, PLOT, PLACEMENT, ATTEMPTS, GOODPUT, TIMINGS, WAIT = 8, 12, 13, 14, 15, 16, 17

#: Colours of the badges of runs that succeeded and that failed.
GREEN, RED = (0x1A, 0x7F, 0x37), (0xCF, 0x22, 0x2E)


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


@pytest.fixture(scope="module")
def executed() -> Client:
    import recorded

    return recorded.execute(CELLS, words)


@pytest.fixture(scope="module")
def page(executed: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import nbconvert

    path = tmp_path_factory.mktemp("page") / "notebook.html"
    path.write_text(nbconvert.HTMLExporter(template_name="basic").from_notebook_node(executed.nb)[0])
    return path


def browser(page: Path, *options: str) -> str:
    """What a headless Chromium prints of a page."""
    program = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if program is None:
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail("no Chromium on the path")
        pytest.skip("no Chromium on the path")
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    return subprocess.run(
        [*command, *options, page.as_uri()], capture_output=True, text=True, check=True, timeout=300
    ).stdout


def error_of(executed: Client, cell: int) -> str:
    (output,) = [output for output in executed.nb.cells[cell].outputs if output.output_type == "error"]
    return "\n".join(output.traceback)


def test_the_status_is_live_while_a_run_goes(executed: Client) -> None:
    states = executed.shown[0]
    assert states[0].startswith("waiting train starting 2 ranks · ")
    assert any("running: 2 of 2 ranks up" in state and "ranks 0-1 epoch" in state for state in states)
    assert re.match(r"succeeded train 2 ranks · 1 node · .* function \d+\.\d s .*placement node host", states[-1])
    assert 3 < len(states) < 1000


@pytest.mark.long
def test_the_notebook_keeps_the_last_state_only(executed: Client) -> None:
    displays = [output for output in executed.nb.cells[0].outputs if output.output_type == "display_data"]
    assert len(displays) == 1
    assert words(displays[0]["data"]["text/html"]).startswith("succeeded")


def test_a_failure_is_the_typed_error_first_and_short(executed: Client) -> None:
    error = error_of(executed, 2)
    assert re.match(
        r"TrainingError: rank 1 on \S+ failed: ValueError: learning rate must be positive, not -2\n\nTraceback", error
    )
    # The line of the cell is known here alone: the rank has no more than its number.
    assert 'raise ValueError(f"learning rate must be positive, not {learning_rate}")' in error
    assert error.count("Cell In[") == 2
    assert error.endswith("Cell In[3], line 1, in <module>\n    distributor.run(train, -2)")
    assert "ipykernel" not in error
    for foreign in ("distributor/", "java", "\tat "):
        assert foreign not in error
    assert len(error.splitlines()) < 25


@pytest.mark.long
def test_a_traceback_is_in_the_error_and_not_above_it_as_well(executed: Client) -> None:
    cell = executed.nb.cells[2]
    shown = [str(output.get("data") or output.get("text")) for output in cell.outputs if output.output_type != "error"]
    assert shown
    assert not [text for text in shown if "Traceback" in text or "raise ValueError" in text]
    assert "traceback of rank 1" in executed.shown[1][-1]  # no error tells it


@pytest.mark.long
def test_a_wrong_argument_is_two_lines(executed: Client) -> None:
    error = error_of(executed, 3)
    assert error.startswith("ConfigurationError: num_processes must be a positive integer, not 0")
    assert error.endswith("TorchDistributor(0)")


@pytest.mark.long
def test_a_handle_shows_why_its_run_failed(executed: Client) -> None:
    (result,) = [output for output in executed.nb.cells[1].outputs if output.output_type == "execute_result"]
    text = words(result["data"]["text/html"])
    assert text.startswith("failed train 2 ranks · 1 node")
    for part in ("127.0.0.1", "0-1", "traceback of rank 1", "ValueError: learning rate must be positive, not -1"):
        assert part in text
    assert re.search(r" function \d+\.\d s ", text)  # until it failed
    assert result["data"]["text/plain"].startswith("<Run ")


@pytest.mark.long
def test_a_handle_is_live_wherever_it_is_shown_while_its_run_goes(executed: Client) -> None:
    started, again, _, ended = executed.nb.cells[LIVE : LIVE + 4]
    for cell in (started, again):  # one box each, not the live one and another that stays as it was
        (box,) = [output for output in cell.outputs if "data" in output and "text/html" in output["data"]]
        assert words(box["data"]["text/html"]).startswith("succeeded train 2 ranks"), cell.source
    (result,) = [output for output in ended.outputs if output.output_type == "execute_result"]
    assert words(result["data"]["text/html"]).startswith("succeeded train 2 ranks")


@pytest.mark.long
def test_the_whole_exception_is_there_in_the_next_cell(executed: Client) -> None:
    (printed,) = [output for output in executed.nb.cells[6].outputs if output.output_type == "stream"]
    assert printed["text"] == "1 ValueError('learning rate must be positive, not -3')\n"


@pytest.mark.long
def test_an_interrupt_has_a_short_traceback(executed: Client) -> None:
    error = error_of(executed, 7)
    where = "  Cell In[8], line 16, in <module>\n    distributor.run(train_for_ever)"
    assert error == f"KeyboardInterrupt\n\nraised by\n{where}"
    assert executed.shown[7][-1].startswith("cancelled train_for_ever 2 ranks")
    (line,) = [output["text"] for output in executed.nb.cells[7].outputs if output.output_type == "stream"]
    assert re.fullmatch(r"\[distributor\] run \w+: interrupted; rank.* at Cell In\[8\]:\d\n", line)


@pytest.mark.long
def test_progress_false_shows_no_view(executed: Client) -> None:
    assert [output.output_type for output in executed.nb.cells[4].outputs] == ["execute_result"]


def test_a_browser_shows_badges_and_errors(page: Path, tmp_path: Path) -> None:
    text = words(browser(page, "--dump-dom"))
    for part in ("succeeded train", "failed train", "traceback of rank 1", "TrainingError: rank 1 on"):
        assert part in text
    picture = tmp_path / "page.png"
    browser(page, f"--screenshot={picture}", "--window-size=1000,2400", "--hide-scrollbars")
    with Image.open(picture) as image:
        colours = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24)}
    # Badges are some 60 by 20 pixels. One run succeeded, and two failed, one of which is shown twice: a shorter word.
    assert 300 < colours[GREEN] < 3000
    assert 1.4 < colours[RED] / colours[GREEN] < 2.4


def value_of(executed: Client, cell: int) -> dict[str, str]:
    (result,) = [output for output in executed.nb.cells[cell].outputs if output.output_type == "execute_result"]
    return dict(result["data"])


@pytest.mark.long
def test_a_plot_is_drawn_in_a_kernel_without_a_backend(executed: Client, tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_bytes(base64.b64decode(value_of(executed, PLOT)["image/png"]))
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.width > 400 and len(picture.getcolors(1 << 24) or ()) > 10


@pytest.mark.long
def test_attributes_of_a_run_read_well_as_values_of_cells(executed: Client) -> None:
    assert re.fullmatch(r"node 0 on \S+ \(127\.0\.0\.1\): ranks 0-1\s*", value_of(executed, PLACEMENT)["text/plain"])
    assert re.fullmatch(
        r"\(attempt 0, \d\.\d s, last step 2: it succeeded,\)", value_of(executed, ATTEMPTS)["text/plain"]
    )
    assert re.match(r"\d+ % of .* s in training", value_of(executed, GOODPUT)["text/plain"])
    assert re.search(r"'fork': 0\.\d{1,4},", value_of(executed, TIMINGS)["text/plain"])


@pytest.mark.long
def test_an_interrupted_wait_shows_the_lines_of_the_cell(executed: Client) -> None:
    where = f"  Cell In[{WAIT + 1}], line 4, in <module>\n    run.result()"
    assert error_of(executed, WAIT) == f"KeyboardInterrupt\n\nraised by\n{where}"
