"""The code of a rank. The launcher and the warm process run a part of it, too."""
