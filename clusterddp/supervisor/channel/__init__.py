"""How the control server sends over its connections; what is sent, and to whom, belongs to the modules above."""
