"""The context and its step loop: stops, saves, metrics, heartbeat; nothing that runs outside a rank."""
