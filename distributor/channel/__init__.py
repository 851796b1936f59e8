"""Connections between the processes of a run.

This package runs at both ends of each connection. It may import the package ``machine``.

The channel between a node and the driver carries live information, such as log lines and the driver's orders. Results
and the reasons for failures also travel through the Spark job. Therefore, a run that cannot open the channel still ends
with the same result, but shows no live log lines, and its nodes learn more slowly that another node has failed. If a
node's channel was open, but then breaks and cannot be restored, the node counts as lost, and the run's current attempt
stops.
"""
