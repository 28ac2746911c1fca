"""The training half: what runs inside a rank, with torch. The launch half never imports it."""
