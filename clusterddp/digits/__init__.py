"""The bundled example job, handwritten digits: links to the files in ``jobs/``, of which the wheel has copies.

No module imports it.
"""
