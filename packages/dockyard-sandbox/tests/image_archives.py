"""Image archives made in memory: ``docker save`` and OCI layouts, with layers as a test wants them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Member = tuple[str, Any]
"""Name, and its content: text, bytes, or what `_add` knows: ('dir', mode), ('link', target), ('char',), …"""


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def layer(*members: Member, copied: Sequence[tuple[Path, str]] = (), without: Sequence[str] = ()) -> bytes:
    """A layer of ``members``, and of files on disk: (path, name in the image), but directories named in ``without``."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        return None if set(member.name.split("/")) & set(without) else member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, name in copied:
            tar.add(path, name, filter=kept)
        for name, content in members:
            _add(tar, name, content)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: Any) -> None:
    info = tarfile.TarInfo(name)
    info.mtime, info.mode = 1_600_000_000, 0o644
    data = b""
    if isinstance(content, str | bytes):
        data = content.encode() if isinstance(content, str) else content
    elif content[0] == "file":
        info.mode, data = content[1], content[2]
    elif content[0] == "dir":
        info.type, info.mode = tarfile.DIRTYPE, content[1]
    elif content[0] in ("symlink", "link"):
        info.type = tarfile.SYMTYPE if content[0] == "symlink" else tarfile.LNKTYPE
        info.linkname = content[1]
    else:
        info.type = {"char": tarfile.CHRTYPE, "fifo": tarfile.FIFOTYPE}[content[0]]
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _write(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            _add(tar, name, data)
    return path


def config_of(layers: Sequence[bytes], env: Sequence[str] = ("PATH=/usr/local/bin:/usr/bin:/bin",)) -> bytes:
    config = {"config": {"Env": list(env)}, "rootfs": {"type": "layers", "diff_ids": [digest(one) for one in layers]}}
    return json.dumps({"architecture": "amd64", "os": "linux", **config}).encode()


def docker_archive(path: Path, *layers: bytes, config: bytes | None = None, config_name: str | None = None) -> Path:
    config = config or config_of(layers)
    name = config_name or f"{digest(config)[7:]}.json"
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": name, "RepoTags": ["x:1"], "Layers": names}]).encode()
    files = {name: config, "manifest.json": manifest}
    return _write(path, {**files, **dict(zip(names, layers, strict=True))})


def oci_archive(path: Path, *layers: bytes, damage: str | None = None, pack: Any = gzip.compress) -> Path:
    """An OCI layout with compressed layers; ``damage`` names a blob of which one byte is changed afterwards."""
    config, packed = config_of(layers), [pack(one) for one in layers]
    manifest = json.dumps(
        {"config": {"digest": digest(config)}, "layers": [{"digest": digest(one)} for one in packed]}
    ).encode()
    index = json.dumps({"manifests": [{"digest": digest(manifest), "platform": {"architecture": "amd64"}}]}).encode()
    blobs = {"config": config, "manifest": manifest, "layer": packed[0]}
    files = {f"blobs/sha256/{digest(data)[7:]}": data for data in (config, manifest, *packed)}
    if damage is not None:
        name = f"blobs/sha256/{digest(blobs[damage])[7:]}"
        files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    return _write(path, {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": index, **files})
