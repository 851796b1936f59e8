"""What ranks write to relative paths comes back to ``output_dir``, or a warning says what becomes of it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import watch
from sessions import LOCAL, Make

from distributor import PayloadError, Run, StartError, TorchDistributor, TrainingError
from distributor.channel.server import ChannelServer
from distributor.errors import ConfigurationError

spread = {"max_processes_per_node": 1}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, where ranks of local mode write."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def ended(run: Run) -> None:
    assert run.wait(watch.DEADLINE)


def write_in_steps(signals: str) -> None:
    """Writes, and goes on once a file of the test's is there."""
    import os
    import time
    from pathlib import Path

    def until(name: str) -> None:
        while not Path(signals, name).exists():
            time.sleep(0.01)

    if os.environ["RANK"] != "0":
        return
    os.makedirs("ckpt")
    Path("ckpt/a.txt").write_text("first")
    until("changed")
    Path("ckpt/a.txt").write_text("second")
    with open("open.txt", "w") as file:
        file.write("half")
        file.flush()
        Path("other.txt").touch()
        until("removed")
        os.remove("other.txt")
        until("closed")
        file.write("whole")


@pytest.mark.long_on_executors
def test_files_come_while_the_run_goes(make: Make, mode: str, here: Path, out: Path, tmp_path: Path) -> None:
    """As they are closed, again if they change; and they go if their rank removes them."""
    if mode != LOCAL:
        here = tmp_path
    run = make(2, output_dir=out).submit(write_in_steps, str(tmp_path))
    watch.until(lambda: files(out) == {"ckpt/a.txt": "first"})
    (tmp_path / "changed").touch()
    watch.until(lambda: files(out) == {"ckpt/a.txt": "second", "other.txt": ""})
    (tmp_path / "removed").touch()
    watch.until(lambda: files(out) == {"ckpt/a.txt": "second"})
    (tmp_path / "closed").touch()
    run.result(watch.DEADLINE)
    assert files(out) == {"ckpt/a.txt": "second", "open.txt": "halfwhole"}
    assert (here / "open.txt").exists() == (mode == LOCAL)


def fail_after_writing() -> None:
    import os
    from pathlib import Path

    Path(f"rank-{os.environ['RANK']}-{'x' * 248}").write_text("last words")
    raise ValueError("boom")


@pytest.mark.slow
def test_files_of_a_failed_run_are_kept(make: Make, here: Path, out: Path) -> None:
    """However long their names are."""
    with pytest.raises(TrainingError, match="boom"):
        make(1, output_dir=out).run(fail_after_writing)
    assert files(out) == {f"rank-0-{'x' * 248}": "last words"}


def write_and_wait(ready: str) -> None:
    import time
    from pathlib import Path

    Path("a.txt").write_text("x")
    Path(ready).touch()
    time.sleep(600)


@pytest.mark.parametrize("end", [Run.cancel, Run.kill])
def test_a_run_that_is_stopped_keeps_what_came(
    end: Callable[[Run], None], make: Make, here: Path, out: Path, tmp_path: Path
) -> None:
    run = make(1, output_dir=out, grace_period=1).submit(write_and_wait, str(tmp_path / "ready"))
    watch.until(lambda: files(out) == {"a.txt": "x"})
    end(run)
    ended(run)
    assert files(out) == {"a.txt": "x"}


def train_on() -> list[str]:
    """Goes on from the newest checkpoint; the checkpoints that it has found."""
    import os

    import torch

    found = sorted(os.listdir("ckpt")) if os.path.exists("ckpt") else []
    if os.environ["RANK"] == "0":  # another rank might find a file that is being written
        weights = torch.load(f"ckpt/{found[-1]}") if found else torch.zeros(3)
        os.makedirs("ckpt", exist_ok=True)
        torch.save(weights + 1, f"ckpt/{len(found)}.pt")
    return found


@pytest.mark.long_on_executors
@pytest.mark.parametrize("where", ["{}", pytest.param("file://{}", marks=pytest.mark.long)])
def test_a_later_run_finds_what_is_there(where: str, make: Make, mode: str, here: Path, out: Path) -> None:
    import torch

    distributor = make(2, output_dir=where.format(out), **({} if mode == LOCAL else spread))
    assert distributor.submit(train_on).results(watch.DEADLINE)[0] == []
    assert distributor.submit(train_on).results(watch.DEADLINE)[0] == ["0.pt"]
    assert distributor.submit(train_on).results(watch.DEADLINE)[0] == ["0.pt", "1.pt"]
    assert torch.load(out / "ckpt/2.pt").tolist() == [3.0, 3.0, 3.0]
    assert sorted(path.name for path in out.rglob("*")) == ["0.pt", "1.pt", "2.pt", "ckpt"]


def remove_the_old() -> None:
    os.remove("ckpt/old.pt")
    Path("ckpt/new.pt").touch()


def test_a_file_of_an_earlier_run_goes_if_it_is_removed(make: Make, here: Path, out: Path) -> None:
    """So that ranks which keep the newest checkpoints keep no others in it."""
    (out / "ckpt").mkdir(parents=True)
    (out / "ckpt/old.pt").touch()
    make(1, output_dir=out).run(remove_the_old)
    assert files(out) == {"ckpt/new.pt": ""}


@pytest.mark.long
@pytest.mark.spark
def test_other_executors_find_it_too(two_executors: Any, out: Path) -> None:
    (out / "data").mkdir(parents=True)
    (out / "data/a.txt").write_text("there")
    (out / "run.sh").write_text("true")
    (out / "run.sh").chmod(0o755)
    (out / "half.txt.node-1.part").touch()  # of a driver that was killed

    def look() -> Any:
        import os
        from pathlib import Path

        return Path("data/a.txt").read_text(), os.access("run.sh", os.X_OK), Path("half.txt.node-1.part").exists()

    looked = TorchDistributor(2, False, False, output_dir=out, **spread).submit(look).results(watch.DEADLINE)
    assert looked == [("there", True, False)] * 2


def add_one() -> list[str]:
    """The names and sizes of what is there, before another file is written."""
    import os
    from pathlib import Path

    found = sorted(f"{path} {path.stat().st_size}" for path in Path("data").rglob("*") if path.is_file())
    Path(f"data/{len(found)}-{os.environ['RANK']}.txt").write_text("new")
    return found


@pytest.mark.spark
@pytest.mark.slow
def test_what_is_too_large_for_the_job_comes_over_the_channel(
    two_executors: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributor.api.build.WITH_THE_JOB", 10)
    (out / "data/deep").mkdir(parents=True)
    (out / "data/deep/large.bin").write_bytes(bytes(3_000_000))
    (out / "data/empty.txt").touch()
    distributor = TorchDistributor(2, False, False, output_dir=out, **spread)
    looked = distributor.submit(add_one).results(watch.DEADLINE)
    assert looked == [["data/deep/large.bin 3000000", "data/empty.txt 0"]] * 2
    assert sorted(path.name for path in (out / "data").iterdir()) == ["2-0.txt", "2-1.txt", "deep", "empty.txt"]
    monkeypatch.setattr(ChannelServer, "listen", refuse)
    with pytest.raises(
        StartError, match="this node cannot reach the driver, from which it must copy the 2.9 MiB of output_dir"
    ):
        distributor.run(add_one)


def refuse(*_: object) -> Any:
    raise OSError("no")


def write_conflicts() -> None:
    import os
    from pathlib import Path

    import torch.distributed as dist

    dist.init_process_group("gloo")
    Path("same.txt").write_text("same")
    Path("other.txt").write_text(f"of rank {os.environ['RANK']}")
    if dist.get_rank() == 1:
        Path("second.txt").write_text("of the second only")
    dist.barrier()


@pytest.mark.spark
@pytest.mark.parametrize("where", ["{}", pytest.param("file://{}", marks=pytest.mark.long)])
def test_different_files_of_one_name_are_both_kept(
    where: str, two_executors: Any, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TorchDistributor(2, False, False, output_dir=where.format(out), **spread).run(write_conflicts)
    assert files(out) == {
        "other.txt": "of rank 0",
        "other.txt.node-1": "of rank 1",
        "same.txt": "same",
        "second.txt": "of the second only",
    }
    assert caplog.text.count("nodes wrote different bytes to 'other.txt'") == 1


def edit_a_project() -> None:
    import os
    from pathlib import Path

    Path("changed.txt").write_text("changed")
    os.makedirs("__pycache__", exist_ok=True)
    Path("__pycache__/a.pyc").touch()
    Path("link.txt").symlink_to("changed.txt")
    Path("outside").symlink_to("/etc")
    Path("passwd").symlink_to("/etc/passwd")


def test_changed_files_of_the_project_are_new(make: Make, mode: str, out: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "changed.txt").write_text("before")
    (project / "unchanged.txt").write_text("before")
    make(1, working_dir=project, output_dir=out).run(edit_a_project)
    assert files(out) == {"changed.txt": "changed", "link.txt": "changed"}
    assert (project / "changed.txt").read_text() == ("changed" if mode == LOCAL else "before")


def write_much() -> None:
    from pathlib import Path

    Path("a.bin").write_bytes(bytes(900_000))
    Path("b.bin").write_bytes(bytes(1_500_000))
    Path("c.bin").write_bytes(bytes(1000))


@pytest.mark.slow
def test_files_beyond_the_limit_stay(make: Make, here: Path, out: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(1, output_dir=out, output_limit=2_000_000).run(write_much)
    there = {path.name for path in out.iterdir()}
    assert "c.bin" in there and len(there) == 2
    lost = "a.bin" if "b.bin" in there else "b.bin"
    assert re.search(
        rf"1 new file .*output_dir.*'{lost}'.*: with this file, the files in output_dir would exceed output_limit "
        r"\(1.9 MiB\)",
        caplog.text,
    )


@pytest.mark.parametrize("where", ["{}", "file://{}"])
def test_a_run_does_not_begin_with_more_than_the_limit(where: str, out: Path) -> None:
    out.mkdir()
    (out / "large.bin").write_bytes(bytes(3 << 20))
    distributor = TorchDistributor(1, True, False, output_dir=where.format(out), output_limit="1m")
    with pytest.raises(PayloadError, match=r"holds 3.0 MiB, more than output_limit \(1.0 MiB\)"):
        distributor.run(print)


def look_for_a_warning(ready: str) -> None:
    import os
    import time
    from pathlib import Path

    if os.environ["RANK"] == "1":
        os.makedirs("ckpt")
        Path("ckpt/a.pt").touch()
    while not Path(ready).exists():
        time.sleep(0.01)


def test_without_it_a_warning_comes_with_the_first_file(
    make: Make, mode: str, here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {} if mode == LOCAL else spread
    run = make(2, **options).submit(look_for_a_warning, str(tmp_path / "ready"))
    if mode != LOCAL:
        watch.until(lambda: "removes new files of its ranks" in caplog.text)
    (tmp_path / "ready").touch()
    run.result(watch.DEADLINE)
    warnings = re.findall(r"removes new files .*, such as (.*)\. Pass output_dir=", caplog.text)
    assert warnings == ([] if mode == LOCAL else ["'ckpt/a.pt' (written by rank 1)"])
    assert (here / "ckpt/a.pt").exists() == (mode == LOCAL)


@pytest.mark.spark
def test_files_in_the_drivers_own_jvm_stay_where_they_are(
    one_jvm: Any, here: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The executor of ``local[4]`` works in the directory in which its JVM was started."""

    def write() -> str:
        from pathlib import Path

        Path("written-in-place.txt").write_text("x")
        return str(Path.cwd())

    folder = Path(TorchDistributor(1, False, False, output_dir=out).run(write))
    try:
        assert (folder / "written-in-place.txt").exists()
        assert files(out) == {"written-in-place.txt": "x"}
    finally:
        (folder / "written-in-place.txt").unlink()
    assert "removes new files" not in caplog.text


@pytest.mark.long
@pytest.mark.spark
def test_what_spark_has_put_there_is_found(two_executors: Any, tmp_path: Path) -> None:
    """``--files`` and ``addFile`` put files into the executor's current directory."""
    (tmp_path / "config.json").write_text("{}")
    two_executors.sparkContext.addFile(str(tmp_path / "config.json"))
    assert TorchDistributor(1, False, False).run(lambda: Path("config.json").read_text()) == "{}"


@pytest.mark.spark
@pytest.mark.parametrize("where", ["{}", pytest.param("file://{}", marks=pytest.mark.long)])
def test_without_a_channel_files_come_at_the_end(
    where: str, two_executors: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChannelServer, "listen", refuse)
    distributor = TorchDistributor(2, False, False, output_dir=where.format(out), **spread)
    distributor.run(write_conflicts)
    assert files(out)["other.txt.node-1"] == "of rank 1"
    assert files(out)["second.txt"] == "of the second only"
    assert len(files(out)) == 4
    with pytest.raises(TrainingError, match="boom"):
        distributor.run(fail_after_writing)
    assert files(out).keys() >= {f"rank-0-{'x' * 248}"}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://bucket/run", "Install s3fs"),
        ("nowhere://run", "Protocol not known: nowhere"),
        ("file:///dev/null/run", "Not a directory"),
    ],
)
def test_a_url_that_the_driver_cannot_use(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"output_dir '{url}' cannot be used: .*{why}"):
        TorchDistributor(1, True, False, output_dir=url).run(print)


@pytest.mark.spark
@pytest.mark.slow
def test_a_url_that_means_another_place_on_nodes(two_executors: Any) -> None:
    with pytest.raises(
        StartError, match="cannot be used on this node: the file that the driver has written to this URL is missing"
    ):
        TorchDistributor(1, False, False, output_dir="memory://run").run(print)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="output_dir .* cannot be used: .*file is not a folder"):
        TorchDistributor(1, True, False, output_dir=tmp_path / "file").run(print)
    assert os.path.isfile(tmp_path / "file")


def test_the_current_directory_itself_needs_no_copies(make_local: Make, here: Path) -> None:
    make_local(1, output_dir=".").run(write_much)
    assert {path.name for path in here.iterdir()} == {"a.bin", "b.bin", "c.bin"}


@pytest.mark.slow
def test_a_folder_around_the_current_directory_is_refused(make_local: Make, here: Path) -> None:
    with pytest.raises(
        StartError,
        match="contains the ranks' current directory, .*: pass an output_dir that is inside the current directory or",
    ):
        make_local(1, output_dir="..").run(write_much)


def write_twice(name: str, go: str) -> None:
    import time

    Path(f"{name}-1.txt").touch()
    while not Path(go).exists():
        time.sleep(0.01)
    Path(f"{name}-2.txt").touch()


def test_runs_at_once_do_not_copy_each_others_copies(make_local: Make, here: Path, tmp_path: Path) -> None:
    outs = [here / "out-a", here / "out-b"]
    found = [make_local(1, output_dir=out).submit(write_twice, out.name[-1], str(tmp_path / "go")) for out in outs]
    watch.until(lambda: all({"a-1.txt", "b-1.txt"} <= {*os.listdir(out)} for out in outs))
    (tmp_path / "go").touch()
    for run, out in zip(found, outs):
        run.result(watch.DEADLINE)
        assert f"{out.name[-1]}-2.txt" in os.listdir(out)
        assert not [path for path in out.iterdir() if path.is_dir()]


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["", "tmp"])
def test_temporary_folders_of_runs_stay(
    inside: str, make_local: Make, here: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = here / inside
    temporary.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    make_local(1, output_dir=out).run(write_much)
    assert {path.name for path in out.iterdir()} == {"a.bin", "b.bin", "c.bin"}
    shutil.rmtree(here)  # so that its warm process ends


def write_a_temporary_file() -> None:
    import os
    import tempfile
    from pathlib import Path

    os.makedirs(os.environ["TMPDIR"])
    Path(tempfile.mkdtemp(), "cache").touch()
    Path("result").touch()


@pytest.mark.slow
@pytest.mark.long_on_executors
def test_a_ranks_temporary_folder_is_no_output(make: Make, here: Path, out: Path) -> None:
    make(1, output_dir=out, env={"TMPDIR": "scratch"}).run(write_a_temporary_file)
    assert files(out) == {"result": ""}


def save_and_log() -> None:
    from distributor import runtime

    print("saves")
    runtime.save_checkpoint({"step": 1}, 1, wait=True)
    os.makedirs("logs", exist_ok=True)
    Path("logs/metrics.csv").touch()


@pytest.mark.slow
def test_neither_checkpoints_nor_logs_are_copied(make: Make, mode: str, here: Path, out: Path, tmp_path: Path) -> None:
    """But a rank's folder elsewhere may have the name of ``log_dir``."""
    (tmp_path / "project").mkdir()
    folder = tmp_path / "project" if mode == LOCAL else here
    os.chdir(folder)
    make(1, working_dir=tmp_path / "project", output_dir=out, checkpoints="kept", log_dir="logs").run(save_and_log)
    assert any((folder / "kept").iterdir()) and any((folder / "logs").glob("*/*"))
    assert files(out) == ({} if mode == LOCAL else {"logs/metrics.csv": ""})


def test_a_project_without_files_has_a_folder(make: Make, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert make(1, working_dir=tmp_path / "empty").run(lambda: os.listdir()) == []


def test_what_comes_back_into_the_project_does_not_travel_with_it(make: Make, tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("output_dir", "checkpoints", "log_dir")}
    for folder in places.values():
        folder.mkdir()
        (folder / "large.bin").write_bytes(bytes(2 << 20))
    distributor = make(1, working_dir=tmp_path, working_dir_limit=1 << 20, **places)
    assert "large.bin" in distributor.run(lambda: os.listdir())


def end_while_bringing() -> str:
    from pathlib import Path

    Path("late.bin").write_bytes(bytes(50_000_000))
    return "trained"


def test_a_run_that_brings_its_last_files_is_not_stalled(make: Make, here: Path, out: Path) -> None:
    assert make(1, output_dir=out, stall_timeout=1).run(end_while_bringing) == "trained"
    assert (out / "late.bin").stat().st_size == 50_000_000
