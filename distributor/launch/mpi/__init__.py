"""MPI, although the launcher, and not MPI, starts the ranks.

Node 0's companion runs MPI's process manager, and gives the other companions the commands of MPI's daemons. In place of
each rank, MPI starts a *shim*, which gets what a process needs to join MPI, its *place*: variables and, with MPICH, a
socket. The shim passes its place to the node's companion, and the companion to the rank.

``path`` runs on the driver and on nodes, ``node`` beside ranks, ``rank`` in them, ``shim`` as MPI's process.
"""
