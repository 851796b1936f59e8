"""Copies new files of ranks, from their current directories, to ``output_dir``. Runs on the driver."""
