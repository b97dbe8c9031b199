"""What nginx reads from paths: a path per line in, its readings per line out, separated by tabs."""
import pathlib
import socket
import subprocess
import sys
import tempfile
from http.client import HTTPResponse

CONFIGURATION = """
daemon off; master_process off; pid nginx.pid; error_log stderr crit; worker_rlimit_nofile 1024;
events {}
http {
  access_log off; keepalive_requests 1000000; default_type text/plain;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  server { listen unix:merged; location / { return 200 "$uri"; } }
  server { listen unix:kept; merge_slashes off; location / { return 200 "$uri"; } }
}
"""


class Client:
    """A connection to a server, which is opened again after a response that ends it."""

    def __init__(self, path):
        self.path, self.connection = path, None

    def read(self, line):
        """The path as nginx reads it, or None if nginx rejects it."""
        if self.connection is None:
            self.connection = socket.socket(socket.AF_UNIX)
            self.connection.connect(self.path)
        self.connection.sendall(f"GET {line} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        response = HTTPResponse(self.connection)
        response.begin()
        body = response.read().decode()
        if response.will_close:
            self.connection.close()
            self.connection = None
        return body if response.status == 200 else None


def wait_for(path, nginx):
    """Waits until nginx listens."""
    while nginx.poll() is None:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
            return
        except OSError:
            continue
    sys.exit("nginx has ended")


with tempfile.TemporaryDirectory() as folder:
    (pathlib.Path(folder) / "nginx.conf").write_text(CONFIGURATION.replace("unix:", f"unix:{folder}/"))
    nginx = subprocess.Popen(["nginx", "-p", folder, "-c", "nginx.conf", "-e", "stderr"])
    try:
        clients = {name: Client(f"{folder}/{name}") for name in ("merged", "kept")}
        for client in clients.values():
            wait_for(client.path, nginx)
        for line in sys.stdin.read().splitlines():
            readings = {f"nginx-{name}": client.read(line) for name, client in clients.items()}
            print("\t".join(f"{name}={path}" for name, path in readings.items() if path))
    finally:
        nginx.terminate()
        nginx.wait()
