"""The command line. A wing: no room imports it."""
