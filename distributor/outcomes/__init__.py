"""Turns the results of a run into values or one exception. This code runs on the driver, pure but for ``advice``."""
