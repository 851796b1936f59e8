"""A Spark DataFrame reaches the ranks: written once as Arrow files, then read in an order that any width shares.

``source`` (driver) describes what is wanted; ``columns`` says which types there are; ``writer`` (a Spark task or the
driver) writes Arrow files; ``snapshot`` (driver) commits them; ``manifest`` describes them; ``plan`` says which rows
each global batch has; ``reader`` and ``loader`` (a rank) read and deliver them.
"""
