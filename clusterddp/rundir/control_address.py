"""The address where an attempt's supervisor takes requests of the run's owner: ``private/attempt-N/control.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import Schema, is_text, optional

_ADDRESS: Schema = {
    "host": is_text,
    "port": lambda port: type(port) is int and 0 < port < 65536,
    "token": is_text,
    "job": optional(is_text),
}


@dataclass(frozen=True)
class Address:
    """The name of the supervisor's node, its port, the attempt's token, and the job by Slurm's own number (of a task of
    an array: not the array's)."""

    host: str
    port: int
    token: str
    job: str | None = None


def write_address(run: RunDirectory, attempt: int, address: Address) -> None:
    """Records an attempt's address."""
    write_json(run.control_file(attempt), asdict(address), mode=0o600)


def read_address(run: RunDirectory, attempt: int) -> Address | None:
    """The address of an attempt's supervisor. None if it has recorded none."""
    values = read_json(run.control_file(attempt), _ADDRESS)
    return Address(values["host"], values["port"], values["token"], values.get("job")) if values else None
