"""A script whose first line says when it ran: ``stamp.py FOLDER`` appends the time to FOLDER/script. No torch."""

import sys
import time

with open(f"{sys.argv[1]}/script", "a") as file:
    file.write(f"{time.time()}\n")
