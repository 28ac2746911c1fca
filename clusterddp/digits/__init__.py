"""The bundled example job, handwritten digits; nothing imports it."""
