"""Image archives (OCI layout or ``docker save``) to a directory, without trusting a byte of them.

Every layer is hashed before any of it is written, and must be what the image's configuration says. No
path of a layer is followed out of the directory: names with ``..`` or a leading slash are refused, and
symlinks on the way are resolved as inside the image.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dockyard_sandbox.layers import BadImage, ImageBounds, LayerWriter

_CHUNK = 1 << 20
_MAX_JSON_BYTES = 16 * 1024 * 1024
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class _Layer:
    member: str
    diff_id: str
    """Digest of the uncompressed layer."""
    blob_id: str | None
    """Digest of the layer as stored; None where the archive does not say."""


class Image:
    """An open archive whose configuration is verified."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._members = {_plain(member.name): member for member in tar.getmembers()}
        if "manifest.json" in self._members:
            config, layers = self._read_docker()
        elif "index.json" in self._members:
            config, layers = self._read_oci()
        else:
            raise BadImage("the archive has neither manifest.json (docker save) nor index.json (OCI layout)")
        self.config: dict[str, Any] = config
        diff_ids = config.get("rootfs", {}).get("diff_ids", [])
        if len(diff_ids) != len(layers) or not all(isinstance(one, str) for one in diff_ids):
            raise BadImage(f"the configuration names {len(diff_ids)} layers, the manifest {len(layers)}")
        self._layers = [_Layer(name, diff, blob) for (name, blob), diff in zip(layers, diff_ids, strict=True)]

    digest = ""
    """``sha256:…`` of the configuration: the image's id."""

    def env(self) -> dict[str, str]:
        """The variables that the image sets."""
        listed = self.config.get("config", {}).get("Env") or []
        return dict(one.split("=", 1) for one in listed if isinstance(one, str) and "=" in one)

    def unpack(self, target: Path, bounds: ImageBounds) -> None:
        """Write the layers, lowest first, into the empty directory ``target``. Raises BadImage."""
        writer = LayerWriter(target, bounds)
        for layer in self._layers:
            self._verify(layer, bounds)
        for layer in self._layers:
            with self._open(layer.member) as stream, _reading(layer.member):
                with tarfile.open(fileobj=stream, mode="r|") as entries:
                    writer.apply(entries)

    def _verify(self, layer: _Layer, bounds: ImageBounds) -> None:
        if layer.blob_id is not None:
            _check_digest(layer.member, layer.blob_id, self._raw(layer.member), bounds.max_bytes)
        with self._open(layer.member) as stream, _reading(layer.member):
            _check_digest(layer.member, layer.diff_id, stream, bounds.max_bytes)

    def _raw(self, name: str) -> IO[bytes]:
        member = self._members.get(name)
        try:
            stream = None if member is None else self._tar.extractfile(member)
        except (KeyError, RecursionError, tarfile.TarError):
            stream = None
        if stream is None:
            raise BadImage(f"the archive has no file {name!r}, which its manifest names")
        return stream

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        stream = self._raw(name)
        magic = stream.read(4)
        stream.seek(0)
        if magic[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=stream) as unzipped:
                yield unzipped  # type: ignore[misc]  # a GzipFile reads as any other file
        elif magic == b"\x28\xb5\x2f\xfd":
            raise BadImage(f"layer {name!r} is compressed with zstd; save the image with gzip or without compression")
        else:
            yield stream

    def _json(self, name: str, digest: str | None = None) -> Any:
        data = self._raw(name).read(_MAX_JSON_BYTES + 1)
        if len(data) > _MAX_JSON_BYTES:
            raise BadImage(f"{name!r} must be at most {_MAX_JSON_BYTES} bytes")
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if digest is not None and digest != found:
            raise BadImage(f"{name!r} has digest {found}, the archive says {digest}")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadImage(f"{name!r} is not JSON: {error}") from error

    def _read_docker(self) -> tuple[dict[str, Any], list[tuple[str, str | None]]]:
        manifests = self._json("manifest.json")
        try:
            (manifest,) = manifests
            name = _plain(manifest["Config"])
            layers: list[tuple[str, str | None]] = [(_plain(one), None) for one in manifest["Layers"]]
        except (ValueError, TypeError, KeyError) as error:
            raise BadImage("manifest.json must name one image with its Config and Layers") from error
        self.digest = f"sha256:{PurePosixPath(name).name.removesuffix('.json')}"
        return self._json(name, self.digest), layers

    def _read_oci(self) -> tuple[dict[str, Any], list[tuple[str, str | None]]]:
        try:
            manifest = self._json("index.json")
            for _ in range(3):  # an index of indexes, as some builders write it
                if "manifests" not in manifest:
                    break
                digest = _for_this_machine(manifest["manifests"])["digest"]
                manifest = self._json(_blob(digest), digest)
            self.digest = manifest["config"]["digest"]
            layers: list[tuple[str, str | None]] = [(_blob(one["digest"]), one["digest"]) for one in manifest["layers"]]
            return self._json(_blob(self.digest), self.digest), layers
        except (TypeError, KeyError) as error:
            raise BadImage(f"the OCI manifest lacks {error}") from error


@contextmanager
def open_image(archive: Path) -> Iterator[Image]:
    """Open an image archive. Raises BadImage."""
    try:
        tar = tarfile.open(archive)  # noqa: SIM115  closed below; the errors of opening are told apart
    except (OSError, tarfile.TarError) as error:
        raise BadImage(f"it is no tar archive: {' '.join(str(error).split())[:200]}") from error
    with tar:
        yield Image(tar)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise BadImage(f"layer {name!r} is damaged: {' '.join(str(error).split())[:200]}") from error


def _for_this_machine(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    usable = [one for one in manifests if one.get("platform", {}).get("architecture", wanted) == wanted]
    if not usable:
        raise BadImage(f"the archive has no image for linux/{wanted}")
    return usable[0]


def _blob(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise BadImage(f"a digest must be sha256 and 64 hex digits, got {digest[:100]!r}")
    return f"blobs/sha256/{value}"


def _plain(name: str) -> str:
    return str(PurePosixPath(name))


def _check_digest(name: str, wanted: str, stream: IO[bytes], max_bytes: int) -> None:
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise BadImage(f"layer {name!r} holds more than {max_bytes} bytes")
    if f"sha256:{digest.hexdigest()}" != wanted:
        raise BadImage(f"layer {name!r} has digest sha256:{digest.hexdigest()}, the image says {wanted[:100]}")
