"""GPUs of a machine and visible-devices settings."""

import os
import signal
import subprocess

import pytest
from hypothesis import given, strategies as st

from distributor.errors import ResourceError
from distributor.machine import devices

names = st.one_of(st.integers(0, 15).map(str), st.from_regex(r"(GPU|MIG)-[0-9a-f]{4}", fullmatch=True))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "2"}, "2"),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "3"}, None),
    ],
)
def test_visible_devices(environ, expected):
    assert devices.visible_devices(environ) == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, None),
        ("", ()),
        (" ", ()),
        ("-1", ()),
        ("NoDevFiles", ("NoDevFiles",)),
        ("3", ("3",)),
        (" 4 , 6 ", ("4", "6")),
        ("0,-1,1", ("0",)),
        ("0,,1", ("0",)),
        ("GPU-aa,MIG-GPU-bb/1/0", ("GPU-aa", "MIG-GPU-bb/1/0")),
    ],
)
def test_parse_visible(setting, expected):
    assert devices.parse_visible(setting) == expected


@given(st.lists(names))
def test_names_survive_a_setting(listed):
    setting = devices.rank_visibility(listed, True)["CUDA_VISIBLE_DEVICES"]
    assert devices.parse_visible(setting) == tuple(listed)


@pytest.mark.parametrize(
    ("addresses", "visible", "expected"),
    [
        ((), None, ()),
        (("1", "0"), None, ("1", "0")),
        (("1", "0"), ("4", "6"), ("6", "4")),
        (("0",), ("MIG-1",), ("MIG-1",)),
        (("GPU-aa", "1"), ("4", "6"), ("GPU-aa", "6")),
        (("MIG-1",), (), ("MIG-1",)),
    ],
)
def test_through_mapping(addresses, visible, expected):
    assert devices.through_mapping(addresses, visible, "host-a") == expected


@given(st.lists(names, min_size=1, max_size=8, unique=True), st.data())
def test_indices_pick_from_the_mapping(visible, data):
    picked = data.draw(st.permutations(range(len(visible))))
    mapped = devices.through_mapping([str(index) for index in picked], visible, "host-a")
    assert mapped == tuple(visible[index] for index in picked)


@pytest.mark.parametrize(
    ("address", "visible", "words"), [("2", ("4", "6"), ["GPU 2", "host-a", "only 2", "4,6"]), ("0", (), ["none"])]
)
def test_an_index_beyond_the_mapping_is_refused(address, visible, words):
    with pytest.raises(ResourceError) as caught:
        devices.through_mapping([address], visible, "host-a")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("0", "1", "2")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "2,GPU-aa"}, ("2", "GPU-aa")),
        ({"CUDA_VISIBLE_DEVICES": "7,GPU-aa"}, ()),
        ({"HIP_VISIBLE_DEVICES": "1"}, ("1",)),
        # HIP counts within what ROCR leaves.
        ({"ROCR_VISIBLE_DEVICES": "4,6"}, ("0", "1")),
        ({"ROCR_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "1"}, ("1",)),
    ],
)
def test_local_gpus(environ, expected):
    assert devices.local_gpus(environ, lambda: devices.Listing("", ("GPU-aa", "GPU-ab", "GPU-b"))) == expected


LISTING = devices.Listing("", ("GPU-8932f937-d72c", "GPU-8932aaaa-1111"), ("MIG-c7384736", "MIG-c7400000"))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("1,0", "1,0"),
        ("0,1,2", "0,1"),
        ("7", ""),
        ("7,0", ""),  # CUDA ignores what follows
        ("1st,0", "1st,0"),
        ("GPU-8932f937-d72c,GPU-8932a", "GPU-8932f937-d72c,GPU-8932a"),
        ("GPU-8932", ""),  # two have it
        ("GPU-1234", ""),
        ("MIG-c7384736,MIG-c74", "MIG-c7384736,MIG-c74"),
        ("MIG-d", ""),
        ("MIG-GPU-8932f937-d72c/1/0", "MIG-GPU-8932f937-d72c/1/0"),
        ("MIG-GPU-1234/1/0", ""),
        ("NoDevFiles", ""),
        ("0,GPU-8932f,MIG-x", "0,GPU-8932f"),
    ],
)
def test_names_up_to_the_first_that_is_not_there_are_seen(names, expected):
    assert ",".join(devices.present(names.split(","), LISTING)) == expected
    assert devices.present(names.split(","), devices.Listing("")) == tuple(names.split(","))


def test_names_are_taken_as_they_are_where_nvidia_smi_does_not_know_them():
    assert devices.present(["GPU-aa", "1"], devices.Listing("", ("", ""))) == ("GPU-aa", "1")


def test_amds_devices_are_not_nvidias(monkeypatch):
    monkeypatch.setattr(devices, "_count_amd", lambda _topology: 8)
    assert devices.local_gpus({"HIP_VISIBLE_DEVICES": "7"}, lambda: LISTING) == ("7",)
    assert devices.local_gpus({}, lambda: LISTING) == ("0", "1")
    assert len(devices.local_gpus({}, lambda: devices.Listing("", ()))) == 8


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts an ``nvidia-smi`` with the given script in place, the only program there is; ``None`` for no driver."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(devices, "_count_amd", lambda _topology: 0)

    def install(script):
        if script is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)

    return install


TWO = """[ $1 = -L ] && /bin/cat << END
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-e86cb44c-6756)
  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-a75d)
  MIG 3g.20gb     Device  1: (UUID: MIG-a28ad590-3fda)
GPU 1: B
END"""
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


@pytest.mark.parametrize(
    ("script", "count", "named", "text"),
    [
        pytest.param(None, 0, "7", "there is no nvidia-smi", id="no-driver"),
        pytest.param(
            f'echo "{NO_DRIVER}"; exit 9', 0, "", f"nvidia-smi fails with exit code 9: {NO_DRIVER}", id="not-loaded"
        ),
        # The nvidia-smi of an image may not fit the driver, which works.
        pytest.param("echo mismatch >&2; exit 18", 0, "7", "nvidia-smi fails with exit code 18: mismatch", id="misfit"),
        pytest.param("exit 1", 0, "7", "nvidia-smi fails with exit code 1", id="silent"),
        pytest.param("echo 'No devices were found'", 0, "", "nvidia-smi lists no GPU", id="no-devices"),
        pytest.param(TWO, 2, "", "nvidia-smi lists 2 GPUs with 2 MIG devices", id="two"),
    ],
)
def test_gpus_are_counted_by_their_driver(driver, script, count, named, text):
    driver(script)
    assert devices.local_gpus({}) == tuple(str(index) for index in range(count))
    assert ",".join(devices.local_gpus({"CUDA_VISIBLE_DEVICES": "7"})) == named
    assert devices.described({"CUDA_VISIBLE_DEVICES": "7"}, devices.list_gpus()) == f"CUDA_VISIBLE_DEVICES=7, {text}"


def test_what_nvidia_smi_lists(driver):
    driver(TWO)
    listing = devices.list_gpus()
    assert (listing.gpus, listing.migs) == (("GPU-e86cb44c-6756", ""), ("MIG-c7384736-a75d", "MIG-a28ad590-3fda"))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "CUDA_VISIBLE_DEVICES is not set, said"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='', said"),
        (
            {"HIP_VISIBLE_DEVICES": "7", "ROCR_VISIBLE_DEVICES": "1"},
            "HIP_VISIBLE_DEVICES=7, ROCR_VISIBLE_DEVICES=1, said",
        ),
    ],
)
def test_what_variables_and_driver_say(environ, words):
    assert devices.described(environ, devices.Listing("said")) == words


def test_a_driver_that_hangs_is_an_error(driver, monkeypatch):
    monkeypatch.setattr(devices, "_PATIENCE", 0.1)
    driver("while :; do :; done")
    with pytest.raises(ResourceError, match=r"nvidia-smi -L did not end within 0.1 s. A GPU or its driver may be"):
        devices.local_gpus({})
    assert devices.local_gpus({"CUDA_VISIBLE_DEVICES": "7"}) == ("7",)  # CUDA may work: ranks find out


def test_nobody_waits_for_a_process_that_hangs_in_the_driver(driver, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: started.append(popen(*args, **options)) or started[0]
    )
    monkeypatch.setattr(popen, "kill", lambda self: None)  # as in an uninterruptible sleep
    monkeypatch.setattr(devices, "_PATIENCE", 0.1)
    driver("while :; do :; done")
    assert devices.list_gpus().hangs
    assert started[0].poll() is None
    os.kill(started[0].pid, signal.SIGKILL)
    started[0].communicate()


def test_gpus_are_counted_without_nvidia_smi(tmp_path, monkeypatch):
    for name in ("0000:65:00.0", "0000:ca:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(devices, "_DRIVER", str(tmp_path))
    assert devices.local_gpus({}, lambda: devices.Listing("there is no nvidia-smi")) == ("0", "1")
    assert devices.local_gpus({}, lambda: devices.Listing("no driver", ())) == ()


def write_topology(folder, nodes):
    """AMD's topology: a folder per node with its properties, ``None`` for one that may not be read."""
    for index, properties in enumerate(nodes):
        path = folder / str(index) / "properties"
        path.parent.mkdir()
        if properties is None:
            path.mkdir()  # an OSError for root, too, whom permissions do not keep out
        else:
            path.write_text(properties)


CPU, GPU = "cpu_cores_count 64\nsimd_count 0\n", "cpu_cores_count 0\nsimd_count 440\n"


@pytest.mark.parametrize(("nodes", "expected"), [([], 0), ([CPU], 0), ([CPU, GPU], 1), ([CPU, CPU, GPU, GPU], 2)])
def test_amd_gpus_are_nodes_with_simd_units(tmp_path, nodes, expected):
    write_topology(tmp_path, nodes)
    assert devices._count_amd(str(tmp_path)) == expected


def test_no_amd_driver(tmp_path):
    assert devices._count_amd(str(tmp_path / "absent")) == 0


# At both ends, whichever way the folder is listed.
@pytest.mark.parametrize("nodes", [[None, GPU, GPU, None], ["\n", GPU, GPU, "\n"]], ids=["forbidden", "blank-line"])
def test_amd_gpus_beside_nodes_of_other_containers_are_counted(tmp_path, nodes):
    write_topology(tmp_path, nodes)
    assert devices._count_amd(str(tmp_path)) == 2


@pytest.mark.parametrize(
    ("gpus", "use_gpu", "expected"), [(("4", "6"), True, "4,6"), (("4",), False, ""), ((), True, ""), ((), False, "")]
)
def test_rank_visibility(gpus, use_gpu, expected):
    amd = expected or "-1"  # AMD takes an empty list for none
    assert devices.rank_visibility(gpus, use_gpu) == {"CUDA_VISIBLE_DEVICES": expected, "HIP_VISIBLE_DEVICES": amd}


def test_numbers_mean_what_amds_lower_filter_leaves():
    assert devices.numbered_by("m", {}) == "m"
    assert devices.numbered_by("m", {"ROCR_VISIBLE_DEVICES": "2,3"}) != devices.numbered_by("m", {})
    assert devices.numbered_by("", {"ROCR_VISIBLE_DEVICES": "2,3"}) == ""
