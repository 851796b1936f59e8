"""The code of a rank.

This package runs in ranks. The launcher (the process that forks ranks) and the warm process run a part of it, too. The
package may import ``shipping``, ``machine`` and ``channel`` (see docs/architecture.md).
"""
