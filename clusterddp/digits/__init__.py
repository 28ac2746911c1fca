"""The bundled example job, handwritten digits. No module imports it."""
