"""The connections of a run's processes, both ends of each. May import ``machine``.

The *channel* between a node and the driver carries what is live: output, heartbeats, orders. Results and the reasons
for failures also travel through the Spark job. So a run that cannot open the channel ends with the same result, but
shows no live output and learns later that a node has failed. A channel that was open and breaks for good means that its
node is lost.
"""
