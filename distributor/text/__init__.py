"""Makes texts for users. This code runs in all processes of a run. It imports no other part of ``distributor``."""
