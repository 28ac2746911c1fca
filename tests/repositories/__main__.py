"""``python -m tests.repositories FOLDER [NAME ...]``: runs the repositories whose checkouts the folder has."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.ddp import REPOSITORY
from tests.repositories.disturbances import DISTURBANCES, run
from tests.repositories.entries import Unusable, prepare, read_all
from tests.repositories.page import write_page

MEASURED = REPOSITORY / "docs" / "measurements" / "repositories.json"
WORK = REPOSITORY / "build" / "repositories"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repositories", description=__doc__)
    parser.add_argument("checkouts", type=Path, help="the folder of checkouts; nothing is downloaded")
    parser.add_argument("names", nargs="*", help="of these repositories only; default: all")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="that has the repositories' packages")
    parser.add_argument("--only", nargs="+", choices=DISTURBANCES, default=DISTURBANCES, help="some disturbances")
    options = parser.parse_args(arguments)
    entries = read_all()
    if unknown := set(options.names) - {entry.name for entry in entries}:
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(entry.name for entry in entries)}")
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    bad = 0
    for entry in entries:
        if options.names and entry.name not in options.names:
            continue
        row = measured.setdefault(entry.name, {"runs": {}})
        try:
            copy = prepare(entry, options.checkouts.resolve(), WORK / entry.name)
        except Unusable as error:
            print(f"{entry.name}: not run: {error}")
            continue
        row["commit"] = entry.commit
        for disturbance in dict.fromkeys(["undisturbed", *options.only]):
            if disturbance not in options.only and disturbance in row["runs"]:
                continue
            result = run(copy, disturbance, options.python)
            row["runs"][disturbance] = result.record()
            print(f"{entry.name}: {result}", flush=True)
            bad += result.state != "completed"
            MEASURED.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n")
    write_page(entries, measured)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
