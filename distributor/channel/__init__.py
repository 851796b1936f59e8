"""Connections between processes. This package runs at both ends and may import ``machine``.

The channel between a node and the driver carries only live information. Results and the reasons of failures travel in
band, through the Spark job. A run that cannot open the channel loses live log lines and reacts more slowly, but reports
the same outcome. A node whose open channel is lost for good counts as lost, which stops the run.
"""
