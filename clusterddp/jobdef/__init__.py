"""The job definition: a ``Job``, how it is read, checked and written, and its secrets. Running it belongs elsewhere."""
