"""``python -m clusterddp.launch.supervisor RUN``: the supervisor of jobs that an older version queued."""

from clusterddp.supervisor.main import main

if __name__ == "__main__":
    main()
