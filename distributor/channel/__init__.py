"""Connections between the processes of a run. This package runs at both ends, and may import the package ``machine``.

The channel between a node and the driver carries live information, such as log lines and orders. Results and the
reasons for failures also travel through the Spark job. So a run that cannot open the channel still ends with the same
result, but shows no live log lines, and its nodes learn more slowly that another node has failed. If the channel of a
node was open and is lost for good, the node counts as lost, and the run's current attempt stops.
"""
