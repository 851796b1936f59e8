"""Accelerate: its configuration file becomes variables of ranks. ``variables`` runs in a process of its own."""
