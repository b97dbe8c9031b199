"""What Python reads from paths: a path per line in, its readings per line out, separated by tabs."""
import posixpath
import sys
from urllib.parse import unquote, urljoin, urlparse, urlsplit

# Without decoding.
RAW = {
    "python-urlsplit": lambda path: urlsplit(path).path or "/",
    "python-urlparse": lambda path: urlparse(path).path or "/",
    "python-urljoin": lambda path: urlsplit(urljoin("http://localhost", path)).path or "/",
    "python-http.server": lambda path: "/" + path.lstrip("/") if path.startswith("//") else path,
}


def normpath(path):
    """POSIX keeps two slashes at the start; what is joined to a folder has none of them."""
    return "/" + posixpath.normpath(unquote(path)).lstrip("/")


READERS = {
    **RAW,
    **{f"{name}-decoded": lambda path, raw=raw: unquote(raw(path)) for name, raw in RAW.items()},
    **{f"{name}-normpath": lambda path, raw=raw: normpath(raw(path)) for name, raw in RAW.items()},
}

for line in sys.stdin.read().splitlines():
    readings = []
    for name, reader in READERS.items():
        try:
            readings.append(f"{name}={reader(line)}")
        except ValueError:
            pass  # Rejected.
    print("\t".join(readings))
