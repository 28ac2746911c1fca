"""Makes the names of temporary files the same every time, so that strace can be told of them."""

import secrets

secrets.token_hex = lambda size=4: "0" * 2 * size
