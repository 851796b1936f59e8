"""A DataFrame on its way to the ranks: written once as Arrow files, then read in an order that all widths share.

``source`` says what is wanted. On the driver run ``feeding``, ``snapshots``, ``local_tables`` and ``spark_frames``; in
a Spark task or on the driver, ``writer``; in a rank, ``reader`` and ``loader``. ``manifest`` describes the files,
``row_order`` the order.
"""
