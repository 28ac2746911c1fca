"""The context and its step loop: stops, saves, metrics, heartbeat. All of it runs in a rank."""
