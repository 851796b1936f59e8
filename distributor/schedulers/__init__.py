"""Where a job runs: on this machine, or as one barrier-mode Spark job. Both end in the same agent."""
