"""The context and its step loop: stops, saves, metrics, heartbeat; no code that runs outside a rank."""
