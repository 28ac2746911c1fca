"""A stand-in for Apptainer, with an image whose Python has torch and no clusterddp, for ranks in a container.

The image is a root of its own in a user and a mount namespace, with the host's system and the packages of this Python,
but neither clusterddp nor its repository. Only what is bound is visible in it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster import Cluster

#: ``apptainer exec [--nv | --rocm] [--pwd FOLDER] IMAGE COMMAND...``; binds what APPTAINER_BIND names.
APPTAINER = """#!/bin/bash
set -e
shift
cd /
while true; do
    case $1 in
        --pwd) pwd=$2; shift 2 ;;
        --nv | --rocm) shift ;;
        *) break ;;
    esac
done
export image=$1 pwd packages={packages}
exec unshare --user --map-root-user --mount bash -c '
    set -e
    mount -t tmpfs image "$image"
    folders=(/usr /etc /dev /proc /sys)
    for link in bin lib lib64 sbin; do ln -s usr/$link "$image/$link"; done
    for folder in "${{folders[@]}}" ${{APPTAINER_BIND//,/ }}; do
        mkdir -p "$image$folder"
        mount --rbind "$folder" "$image$folder"
    done
    python=$image/opt/python
    mkdir -p "$image/tmp" "$python/bin" "$python/lib/{version}/site-packages"
    ln -s /usr/bin/python3 "$python/bin/python3"
    echo "home = /usr/bin" > "$python/pyvenv.cfg"
    mount --rbind "$packages" "$python/lib/{version}/site-packages"
    for file in "$python/lib/{version}/site-packages"/__editable__*; do mount --bind /dev/null "$file"; done
    export PATH=/opt/python/bin:/usr/bin:/usr/sbin
    exec chroot "$image" env -C "$pwd" "$@"
' apptainer "${{@:2}}"
"""


def install_apptainer(cluster: Cluster, folder: Path) -> Path:
    """Makes ``apptainer`` in a folder, and returns the path of an image."""
    code = "from importlib.util import find_spec; import sys; print(find_spec('torch').origin, *sys.version_info[:2])"
    torch, *version = subprocess.check_output([cluster.python, "-c", code], text=True).split()
    program, image = folder / "apptainer", folder / "image"
    program.write_text(APPTAINER.format(packages=Path(torch).parents[1], version=f"python{'.'.join(version)}"))
    program.chmod(0o755)
    image.mkdir()
    return image
