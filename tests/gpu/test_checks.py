"""What ``doctor --nodes`` and ``preflight`` check on stand-in devices."""

from __future__ import annotations

from pathlib import Path

from tests import ddp

SCRIPT = Path(__file__).with_name("scripts") / "doctor.py"


def test_devices_are_identified_and_compute_and_reduce(tmp_path: Path) -> None:
    """Also a device whose products are wrong in one precision is found, and one that is next to other CPUs."""
    for device, cpus in ((0, "0-4095"), (1, "4096-4097")):
        near = tmp_path / "pci" / f"0000:{device:02x}:00.0" / "local_cpulist"
        near.parent.mkdir(parents=True)
        near.write_text(f"{cpus}\n")
    ranks = ddp.run(SCRIPT, tmp_path / "pci", ranks=2, folder=tmp_path, devices=2)
    for rank in range(2):
        said = ranks.output(rank).splitlines()
        assert said[0].startswith("ok device Stand-in GPU, ")
        assert said[1].startswith("ok health ")
        assert said.pop(2).startswith(("ok locality ", "warning locality ")[rank])
        assert said[2:4] == ["ok compute matrix products are correct", "matrix products are correct"]
        assert said[4].startswith("correct sum over 2 ranks, ") and said[4].endswith(" GB/s (nccl)")
        assert said[5] == "512 of 262,144 elements of a matrix product in float16 are wrong"
