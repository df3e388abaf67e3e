"""A server on loopback that answers as the Hugging Face hub's API, and the real client with it as its endpoint."""

import contextlib
import hashlib
import http.server
import json
import threading

import pytest


def commit(revision):
    return hashlib.sha1(revision.encode()).hexdigest()


@contextlib.contextmanager
def serve(revisions, cache):
    """Serve `org/suite`, whose revisions are dicts from file names to bytes; yield the list of requested files.

    The client stores what it downloads below `cache`.
    """
    fetched = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def answer(self, body, **headers):
            self.send_response(200)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:4] == ["api", "models", "org", "suite"]:
                if parts[4] == "refs":
                    branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": commit(n)} for n in revisions]
                    return self.answer(json.dumps({"branches": branches, "tags": [], "converts": []}).encode())
                name = next((n for n in revisions if parts[5] in (n, commit(n))), None)
                if parts[4] == "revision" and name:
                    siblings = [{"rfilename": file} for file in revisions[name]]
                    info = {"id": "org/suite", "sha": commit(name), "siblings": siblings, "private": False}
                    return self.answer(json.dumps(info).encode())
                if parts[4] == "tree" and name:
                    files = [
                        {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for file, data in revisions[name].items()
                    ]
                    return self.answer(json.dumps(files).encode())
            if parts[:3] == ["org", "suite", "resolve"]:
                name = next(n for n in revisions if parts[3] in (n, commit(n)))
                data = revisions[name][parts[4]]
                fetched.append((self.command, parts[4]))
                etag = f'"{hashlib.sha1(data).hexdigest()}"'
                return self.answer(data, ETag=etag, X_Repo_Commit=commit(name), Accept_Ranges="bytes")
            self.send_error(404)

        def do_HEAD(self):
            self.do_GET()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    import huggingface_hub
    from huggingface_hub import constants

    address = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "HfApi", _api(huggingface_hub.HfApi, address, cache))
        patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        try:
            yield fetched
        finally:
            server.shutdown()


def _api(made, address, cache):
    """Return the real client with this test's endpoint and cache; it reads the environment when imported."""

    def create():
        api = made(endpoint=address, token=False)
        download = api.snapshot_download
        api.snapshot_download = lambda *a, **k: download(*a, cache_dir=cache, **k)
        return api

    return create
