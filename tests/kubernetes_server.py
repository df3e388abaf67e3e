"""A stand-in of Kubernetes' API server for JobSets: it stores, lists, shows and deletes them."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml


@contextlib.contextmanager
def serve(folder, monkeypatch):
    """Serve Kubernetes' interface, and let the client find it by its own configuration file.

    The server's `created` maps the names of the JobSets to them; with `status`, it refuses everything so.
    """
    loader = pytest.importorskip("kubernetes").config.kube_config
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Cluster)
    server.created, server.status, server.deleting = {}, None, {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    address = f"http://127.0.0.1:{server.server_port}"
    config = {"clusters": [{"name": "c", "cluster": {"server": address}}], "users": [{"name": "u", "user": {}}]}
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config | {"contexts": [context], "current-context": "c"}))
    monkeypatch.setattr(loader, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    yield server
    server.shutdown()


class _Cluster(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, created = body["metadata"]["name"], self.server.created
        assert urlsplit(self.path).path == self._folder(body["metadata"]["namespace"])
        exists = name in created
        if not exists and not self.server.status:
            created[name] = body
        self._answer(self.server.status or (409 if exists else 201), body)

    def do_GET(self):
        path, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        name = path.path.removeprefix(self._folder("default")).strip("/")
        if name:
            # A deleted object is shown until its pods have ended: here, for as many requests as `deleting` says.
            self.server.deleting[name] = self.server.deleting.get(name, 0) - 1
            if self.server.deleting[name] <= 0:
                self.server.created.pop(name, None)
            found = self.server.created.get(name)
            return self._answer(200 if found else 404, found or {})
        key, _, value = query["labelSelector"][0].partition("=")
        items = [x for x in self.server.created.values() if x["metadata"].get("labels", {}).get(key) == value]
        start = int(query.get("continue", ["0"])[0])
        page = {"items": items[start : start + 2], "metadata": {}}
        if start + 2 < len(items):
            page["metadata"]["continue"] = str(start + 2)
        return self._answer(self.server.status or 200, page)

    def do_DELETE(self):
        name = urlsplit(self.path).path.removeprefix(self._folder("default")).strip("/")
        self.server.deleting[name] = 2
        self._answer(200 if name in self.server.created else 404, {})

    def _folder(self, namespace):
        return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass
