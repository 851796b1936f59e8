"""The processes of a node.

    owner         the Python worker of a Spark task or, in local mode, the driver: starts the agent
    agent         runs the node: obeys the driver, sends it output and results
    launcher      forks or starts the ranks of one attempt; a *spare* is the forked launcher of the next attempt
    companion     runs beside the ranks, such as a Ray head
    warm process  has imported torch, forks the agents of several runs
    guard         the parent of an agent or warm process, cleans up after it
    keeper        keeps ranks' states in shared memory for the run's next job

This package may import ``rank``, ``launch``, ``channel``, ``shipping`` and ``machine``.
"""
