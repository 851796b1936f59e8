"""Ray: the object that users pass as ``launch=``, and the process that starts Ray on each node.

This package runs on the driver and on nodes. It is a wing, which means that no core package imports it (see
docs/architecture.md).
"""
