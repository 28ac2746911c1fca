"""The bundled example job, handwritten digits. Nothing imports it."""
