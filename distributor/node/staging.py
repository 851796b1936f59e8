"""Prepares a node's private folder for the node's ranks."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from distributor.errors import StartError
from distributor.machine import folders, limits, state_folders
from distributor.machine.storage import is_url
from distributor.shipping import project
from distributor.values import checkpoints, dataset, environment, layout
from distributor.values.checkpoints import SharedMemory
from distributor.values.job import Function, Job, Script
from distributor.values.plan import AgentOrder, Call, NodeOrder, Plan, Site

_VISIBLE = 10.0  # seconds within which a node must see a file; NFS may show it late

#: Names in the node's folder that are kept from one attempt to the next.
_STAYING = (
    layout.OWNER,
    folders.ELSEWHERE_TO_THE_END,
    layout.WORKING_DIR,
    layout.SCRIPT,
    layout.CALL,
    layout.OUTPUT_DIR,
)


def unpack(job: Job, agent: AgentOrder) -> None:
    """Write the job's script, pickled call and project folder into the node's folder. A large call is there already.

    The driver's ranks need no copies, except of a script from a pipe. Without a project folder, ranks run in the
    executor's current directory if it is also the driver's, or else in a new folder, so that their new files can be
    told apart. It has links to the files in the executor's current directory, where Spark puts those of ``--files``.
    """
    if (script := _copied_script(job, agent)) is not None:
        copy = layout.script(agent.folder, script)
        copy.parent.mkdir()
        copy.write_bytes(script.source)
    if isinstance(job.target, Function) and isinstance(job.target.pickled, bytes) and job.target.pickled:
        layout.call(agent.folder).write_bytes(job.target.pickled)
    if agent.on_driver:
        return
    folder = layout.working_dir(agent.folder)
    if job.working_dir is not None:
        assert job.working_dir.archive is not None
        project.unpack_folder(job.working_dir.archive, folder)
    elif not agent.in_place:
        folder.mkdir()
        for name in os.listdir():
            (folder / name).symlink_to(os.path.abspath(name))


def _copied_script(job: Job, agent: AgentOrder) -> Script | None:
    """Return the script if ranks run a copy of it."""
    script = job.target if isinstance(job.target, Script) else None
    return None if script is None or (agent.on_driver and not script.piped) else script


def write(plan: Plan, folder: str) -> None:
    """Write the files of a plan, and note which paths elsewhere must be removed after the attempt."""
    folders.note_elsewhere(folder, plan.elsewhere)
    for name, text in plan.files.items():
        Path(folder, name).write_text(text, encoding="utf-8")


def clear(agent: AgentOrder) -> None:
    """Remove what an attempt has left behind, but not shipped files and output."""
    folder = Path(agent.folder)
    folders.remove_elsewhere(folder)
    for path in folder.iterdir():
        if path.suffix[1:] in layout.STREAMS or path.name in _STAYING or str(path) == agent.root:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def shared_memory(job: Job, agent: AgentOrder, nodes: int) -> tuple[SharedMemory | None, list[str]]:
    """Create the folder in shared memory for ranks' states. Return it, ``None`` if they keep none, and warnings.

    The ``nodes`` of this machine may together take half of what is free, and leave the rest to ranks. States of an
    earlier job count as free, because they are removed once this job has saved its own.
    """
    if job.checkpoints is None or not job.checkpoints.memory:
        return None, []
    path = state_folders.path_for(agent.folder)
    folders.note_elsewhere(agent.folder, [path], to_the_end=True)
    try:
        earlier = sum(each.size for each in state_folders.find(job.run_id) if each.attempt < job.attempt)
        os.mkdir(path, 0o700)
        free = min(shutil.disk_usage(path).free + earlier, limits.total_memory())
        return SharedMemory(path, free // 2 // nodes, job.checkpoints.replicate), []
    except OSError as error:
        return None, [
            f"cannot use shared memory for Checkpoints(memory=True), so nothing is kept in memory: {error}. Let this "
            "user write to /dev/shm, or pass memory=False"
        ]


def await_data(job: Job, host: str) -> None:
    """Wait until this node sees the run's data: NFS may show it late. StartError if it does not come."""
    deadline = time.monotonic() + _VISIBLE
    for name, each in job.data.items():
        while not is_url(each.folder) and not os.path.exists(os.path.join(each.folder, dataset.MANIFEST)):
            if time.monotonic() > deadline:
                raise StartError(
                    f"data {name!r}: {host} does not see the folder {each.folder!r}. Write it once to a folder that "
                    f"the driver and all executors see: data={{{name!r}: snapshot(df, '/shared/{name}')}}"
                )
            time.sleep(0.05)


def launcher_order(agent: AgentOrder, plan: Plan, site: Site) -> NodeOrder:
    """Return the launcher's order, whose descriptors are added when it starts."""
    job = site.job
    cwd = current_folder(job, agent)
    asked = job.env.get("PYTHONPATH", "").split(os.pathsep)  # for new processes; ranks may be forks
    sys_path = [os.path.abspath(os.path.join(cwd or "", path)) for path in asked if path]
    sys_path += [os.path.abspath(path) for path in agent.sys_path]
    if cwd is not None and job.working_dir is not None:
        sys_path.insert(0, cwd)
    if agent.root not in sys_path:
        sys_path.append(agent.root)
    return NodeOrder(
        run_id=job.run_id,
        plan=plan,
        placement=site.placement,
        grace_period=job.deadlines.grace_period,
        start_timeout=job.deadlines.start_timeout,
        store_fd=None,
        event_fd=-1,
        folder=agent.folder,
        cwd=cwd,
        sys_path=tuple(sys_path),
        collect_all=job.collect == "all",
        start_method=job.startup.start_method,
        root=agent.root,
        environ=environment.apply(
            os.environ, {**plan.node_env, **_checkpoint_env(agent, site), **dataset.to_environ(job.data)}
        ),
        require_group=job.training.require_group,
        tracked=job.tracked,
        gpu_check=_gpu_check(job),
        check=_check(site),
    )


def _gpu_check(job: Job) -> Call | None:
    """Return the call by which ranks check, in every attempt, that they see their GPUs; ``None`` if they use none."""
    if not job.resources.use_gpu:
        return None
    return Call("distributor.rank.gpus", "check", {"through_torch": job.launch.uses_torch})


def _check(site: Site) -> Call | None:
    """Return the call by which ranks check that checkpoints can be kept, in a job's first attempt only.

    Later attempts can start even if the place cannot be reached.
    """
    if site.job.checkpoints is None or site.attempt > site.job.attempt:
        return None
    return Call("distributor.checkpoint.start", "check_place")


def _checkpoint_env(agent: AgentOrder, site: Site) -> dict[str, str]:
    if site.job.checkpoints is None:
        return {}
    hosts = {0: site.placement.master.host, site.placement.numbering.group_rank: site.node.host}
    return checkpoints.to_environ(site.job.checkpoints, agent.folder, hosts, site.memory, site.job.fence)


def shipped(job: Job, agent: AgentOrder) -> tuple[tuple[str, str], ...]:
    """Return the paths of the copies of the job's script and project folder, on this node and on the driver."""
    paths = []
    if (script := _copied_script(job, agent)) is not None:
        paths.append((str(layout.script(agent.folder, script)), script.path))
    if job.working_dir is not None and not agent.on_driver:
        paths.append((f"{layout.working_dir(agent.folder)}/", f"{job.working_dir.path}/"))
    return tuple(paths)


def current_folder(job: Job, agent: AgentOrder) -> str | None:
    """Return the folder in which ranks run; ``None`` for the agent's current directory."""
    if agent.on_driver:
        return None if job.working_dir is None else job.working_dir.path
    if agent.in_place and job.working_dir is None:
        return None
    return str(layout.working_dir(agent.folder))
