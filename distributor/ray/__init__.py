"""Ray: the launch path as users write it, and the companion that runs Ray on a node.

A wing (see docs/architecture.md): runs on the driver and on nodes.
"""
