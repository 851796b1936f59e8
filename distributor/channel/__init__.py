"""Connections between processes. This package runs at both ends and may import ``machine``.

The channel between a node and the driver carries live information, such as log lines and orders. Results and the
reasons of failures also travel in band, that is, through the Spark job. A run that cannot open the channel shows no
live log lines and reacts more slowly, but ends with the same result. If the channel was open and is lost for good, the
node counts as lost, which stops the run.
"""
