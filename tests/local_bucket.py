"""Serve gs:// on this machine: each library keeps its own path layer, over a folder instead of Google's network.

etils.epath and the libraries built on it use fsspec, which gets its local file system for `gs://`. TensorStore connects
to a loopback server that implements the part of Google's JSON API that it uses. Orbax's calls to google-cloud-storage
return a plain bucket. Objects are files: gs://bucket/a/b is FOLDER/bucket/a/b.
"""

import json
import os
import sys
import threading
import types
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class LocalBuckets(DirFileSystem):
    """Map buckets to folders of $LOCAL_BUCKETS."""

    protocol = ("gcs", "gs")

    def __init__(self, **_):
        super().__init__(path=os.environ["LOCAL_BUCKETS"], fs=LocalFileSystem(auto_mkdir=True))


class _EventFiles:
    """Write TensorBoard's files to a bucket."""

    def open(self, path):
        local = Path(os.environ["LOCAL_BUCKETS"], path.removeprefix("gs://"))
        local.parent.mkdir(parents=True, exist_ok=True)
        return local.open("wb")

    def directory_check(self, path):
        """Do nothing: a bucket has no directories."""


def install() -> None:
    """Map gs:// to folders of $LOCAL_BUCKETS in this process; `serve` returns the environment that sets it."""
    from tensorboardX import record_writer

    record_writer.register_writer_factory("gs", _EventFiles())
    for protocol in LocalBuckets.protocol:
        fsspec.register_implementation(protocol, LocalBuckets, clobber=True)
    storage = types.ModuleType("google.cloud.storage")
    storage.Client = lambda: types.SimpleNamespace(get_bucket=lambda name: types.SimpleNamespace(name=name))
    cloud = types.ModuleType("google.cloud")
    cloud.storage = storage
    sys.modules |= {"google.cloud": cloud, "google.cloud.storage": storage}


def serve(folder: Path) -> tuple[ThreadingHTTPServer, dict[str, str]]:
    """Start a server for TensorStore over `folder`; return it and the environment for the processes that use it."""
    handler = type("Handler", (_Handler,), {"folder": folder, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, {
        "LOCAL_BUCKETS": str(folder),
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_address[1]}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    lock: threading.Lock

    def do_GET(self):
        kind, bucket, name, query = self._parts()
        if kind != "o" or not name:
            return self._list(bucket, query)
        path = self.folder / bucket / name
        with self.lock:
            if not path.is_file():
                return self._answer(404)
            data, generation = path.read_bytes(), path.stat().st_mtime_ns
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            return self._answer(304)
        headers, status = {"x-goog-generation": str(generation)}, 200
        unit, _, requested = self.headers.get("Range", "").partition("=")
        if unit == "bytes":
            first, _, last = requested.partition("-")
            first, last = (int(first), int(last or len(data) - 1)) if first else (len(data) - int(last), len(data) - 1)
            if first >= len(data):
                return self._answer(416)
            headers["Content-Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
            data, status = data[first : last + 1], 206
        return self._answer(status, data, headers)

    def do_POST(self):
        _, bucket, _, query = self._parts()
        data = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.folder / bucket / query["name"]
        with self.lock:
            existing = path.stat().st_mtime_ns if path.is_file() else 0
            if int(query.get("ifGenerationMatch", existing)) != existing:
                return self._answer(412)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            generation = path.stat().st_mtime_ns
        return self._answer(200, json.dumps({"name": query["name"], "generation": str(generation)}).encode())

    def do_DELETE(self):
        _, bucket, name, _ = self._parts()
        path = self.folder / bucket / name
        with self.lock:
            if not path.is_file():
                return self._answer(404)
            path.unlink()
        return self._answer(204)

    def log_message(self, *_):
        """Log nothing."""

    def _list(self, bucket, query):
        root, prefix = self.folder / bucket, query.get("prefix", "")
        names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
        first, stop = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        listed = [name for name in names if name.startswith(prefix) and first <= name < stop]
        items = [{"name": name, "size": str((root / name).stat().st_size)} for name in listed]
        return self._answer(200, json.dumps({"items": items}).encode())

    def _parts(self):
        parsed = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parsed.query))
        # [/upload]/storage/v1/b/BUCKET/o[/OBJECT]
        parts = parsed.path.removeprefix("/upload").split("/")
        return parts[5] if len(parts) > 5 else "", parts[4], urllib.parse.unquote("/".join(parts[6:])), query

    def _answer(self, status, data=b"", headers=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
