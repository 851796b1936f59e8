"""What ranks report, and what becomes of it. ``rank`` and ``trainers`` run in ranks, all else on the driver."""
