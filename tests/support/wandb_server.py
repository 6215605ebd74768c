"""A stand-in for W&B's server, over HTTP: as much of its protocol as the real client asks for here.

It keeps what it gets: rows of runs and their end, files, views. It is no W&B: what a real server
refuses, or shows of it, no test here can tell.
"""

import gzip
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Run:
    rows: list = field(default_factory=list)
    state: str = "running"
    files: set = field(default_factory=set)
    config: dict = field(default_factory=dict)


@dataclass
class Server:
    url: str = ""
    runs: dict = field(default_factory=dict)
    views: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)
    projects: set = field(default_factory=set)

    def answer(self, query, v):
        """Of a GraphQL query, by its name."""
        name = re.search(r"(query|mutation)\s*(\w*)", query)[2]
        self.asked.append(name)
        project = {"id": "p", "internalId": "p", "name": v.get("project"), "entity": ME}
        if name == "UpsertBucket":
            run = self.runs.setdefault(v["name"], Run())
            run.config |= json.loads(v["config"] or "{}")
            return {"upsertBucket": {"inserted": True, "bucket": self.bucket(v["name"], project)}}
        if name == "RunResumeStatus":
            known = v["name"] in self.runs
            bucket = self.bucket(v["name"], project) if known else None
            return {"model": project | {"bucket": bucket}}
        if name == "CreateRunFiles":
            files = [{"name": n, "uploadUrl": f"{self.url}/up/{v['run']}/{n}"} for n in v["files"]]
            return {"createRunFiles": {"runID": v["run"], "uploadHeaders": [], "files": files}}
        if "upsertView" in query:
            view = v | {"id": v.get("id") or f"view{len(self.views)}"}
            self.views[view["id"]] = view
            kept = {k: view[k] for k in ("id", "name", "displayName", "spec", "description")}
            kept |= {"type": view["type"], "project": {"name": "p", "entityName": "me"}}
            return {"upsertView": {"view": kept, "inserted": "id" not in v}}
        if "upsertModel" in query:
            self.projects.add(v.get("name"))
            return {"upsertModel": {"project": project, "model": project, "inserted": True}}
        if "viewer" in query:
            return {"viewer": ME | {"username": "me", "entity": "me", "flags": "{}", "teams": NONE}}
        if "allViews" in query:
            return {"project": {"allViews": self.found(v)} if self.views else None}
        if run := self.runs.get(v.get("run") or v.get("runName") or v.get("name")):
            return {"project": project | {"run": self.run(run, v)}}
        return {"project": None, "entity": ME, "models": NONE, "serverInfo": {"features": []}}

    def bucket(self, name, project):
        run = self.runs[name]
        tail = json.dumps([json.dumps(row) for row in run.rows[-1:]])
        said = {"id": name, "name": name, "displayName": name, "description": "", "notes": ""}
        said |= {"config": json.dumps(run.config), "summaryMetrics": "{}", "sweepName": None}
        said |= {"historyLineCount": len(run.rows), "eventsLineCount": 0, "logLineCount": 0}
        said |= {"historyTail": tail, "eventsTail": "[]", "tags": [], "project": project}
        return said | {"wandbConfig": '{"t": 1}'}

    def run(self, run, v):
        low, high = v.get("minStep", 0), v.get("maxStep", 1 << 40)
        last = max((row["_step"] for row in run.rows), default=-1)
        return self.bucket_of(run) | {
            "state": run.state,
            "historyKeys": {"lastStep": last, "keys": {}, "sets": []},
            "parquetHistory": {"parquetUrls": [], "liveData": None},
            "history": [json.dumps(row) for row in run.rows if low <= row["_step"] < high],
        }

    def bucket_of(self, run):
        name = next(name for name, other in self.runs.items() if other is run)
        said = {"projectId": "1", "createdAt": "2026-01-01T00:00:00Z", "heartbeatAt": None}
        said |= {"user": {"name": "me", "username": "me"}, "group": None, "jobType": None}
        said |= {"commit": None, "readOnly": False, "systemMetrics": "{}"}
        return self.bucket(name, {"id": "p"}) | said

    def found(self, v):
        """Views that were saved, of a name or a title."""
        views = [w for w in self.views.values() if v.get("viewName") in (None, w["name"])]
        views = [w for w in views if v.get("viewType", "runs") == w["type"]]
        keys = ("id", "name", "displayName", "spec", "description")
        more = {"user": {"username": "me"}, "createdAt": "", "updatedAt": "", "previewUrl": ""}
        nodes = [{k: w[k] for k in keys} | more for w in views]
        return {"edges": [{"node": n, "cursor": ""} for n in nodes], "pageInfo": LAST}

    def stream(self, run, content):
        """Of /files/ENTITY/PROJECT/RUN/file_stream."""
        history = content.get("files", {}).get("wandb-history.jsonl")
        if history:
            assert history["offset"] == len(self.runs[run].rows), "lines were left out, or repeated"
            self.runs[run].rows += map(json.loads, history["content"])
        if content.get("complete"):
            self.runs[run].state = "finished" if content.get("exitcode") == 0 else "failed"


NONE, LAST = {"edges": [], "pageInfo": {}}, {"endCursor": None, "hasNextPage": False}
NONE["pageInfo"] = LAST
ME = {"id": "me", "name": "me", "organization": None}


@contextmanager
def serving():
    """A server of this process, on a free port of this machine."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words):
            pass

        def content(self):
            if self.headers.get("Transfer-Encoding") == "chunked":
                content = b""
                while size := int(self.rfile.readline(), 16):
                    content += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            gzipped = self.headers.get("Content-Encoding") == "gzip"
            return gzip.decompress(content) if gzipped else content

        def send(self, answer):
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_PUT(self):
            self.content()
            _, _, run, name = self.path.split("/", 3)
            server.runs[run].files.add(name)
            self.send({})

        def do_POST(self):
            content, answer = self.content(), {}
            if self.path == "/graphql":
                asked = json.loads(content)
                answer = {"data": server.answer(asked["query"], asked.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                server.stream(self.path.split("/")[-2], json.loads(content))
            self.send(answer)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.handle_error = lambda *words: None  # clients that hang up
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
