"""Files are fetched from where they may be, as much as may come, in the time that there is."""

from __future__ import annotations

import asyncio
import base64
import gzip
import ipaddress
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from modulm.errors import QueueFull
from modulm_media.addresses import Hosts
from modulm_media.fetch import Budget, Fetcher
from modulm_media.flags import MediaConfig
from modulm_media.limits import Undecodable
from modulm_media.memory import MediaMemory

#: Where files may come from; what listens at TRAP must never be asked.
HOME, TRAP = "127.0.0.2", "127.0.0.1"
FILE = bytes(range(256)) * 40
ASKED: Counter[str] = Counter()


class Handler(BaseHTTPRequestHandler):
    """Answers of servers, good and bad, by path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        where = self.server.server_address[0]
        ASKED[where] += 1
        ASKED["Host " + self.headers["Host"].partition(":")[0]] += 1
        name, _, rest = self.path[1:].partition("/")
        getattr(self, f"do_{name}", self.do_missing)(rest)

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        all_headers = {"Content_Length": str(len(body)), "Connection": "close", **headers}
        for key, value in all_headers.items():
            if value is not None:
                self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_file(self, rest):
        self.answer(200, FILE, Content_Type="text/html")

    def do_missing(self, rest):
        self.answer(404)

    def do_to(self, rest):
        self.answer(302, Location=base64.urlsafe_b64decode(rest).decode())

    def do_loop(self, rest):
        self.answer(302, Location="/loop")

    def do_slow(self, rest):
        self.answer(200, Content_Length="100")
        for _ in range(20):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.1)

    def do_endless(self, rest):
        self.answer(200, Content_Length=None)
        for _ in range(64):
            self.wfile.write(bytes(1 << 17))

    def do_lying(self, rest):
        self.answer(200, FILE, Content_Length="999999999")

    def do_short(self, rest):
        self.answer(200, FILE[:10], Content_Length="99")

    def do_gzip(self, rest):
        self.answer(200, gzip.compress(bytes(1 << 20)), Content_Encoding="gzip")

    def do_garbage(self, rest):
        self.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def port():
    """Of both servers: the one that may be asked, and the trap."""
    while True:
        home = ThreadingHTTPServer((HOME, 0), Handler)
        try:
            trap = ThreadingHTTPServer((TRAP, home.server_address[1]), Handler)
            break
        except OSError:  # another process has this port at the trap's address
            home.server_close()
    threads = [threading.Thread(target=server.serve_forever) for server in (home, trap)]
    for thread in threads:
        thread.start()
    yield home.server_address[1]
    for server, thread in zip((home, trap), threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Names of a network that is not there."""
    real = socket.getaddrinfo
    known = {name: [HOME] for name in ("ok.test", "cdn.ok.test", "other.test")}
    known |= {"trap.test": [TRAP], "both.test": [HOME, TRAP]}

    def resolve(host, port, *args, **more):
        name = host.rstrip(".").lower() if isinstance(host, str) else host
        turns = known.get(name)
        if turns is None:
            return real(host, port, *args, **more)
        if name == "ok.test" and "rebind" in known:
            turns = known["rebind"].pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in turns]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    ASKED.clear()
    return known


def get(url, fetch=Fetcher, **flags):
    flags = {"allowed_media_networks": (f"{HOME}/32",), **flags}
    config = MediaConfig(**flags)
    return asyncio.run(fetch(config).get(url, "image", Budget(config)))


def refused(url, message, **flags):
    with pytest.raises(Undecodable, match=message):
        get(url, **flags)


def test_a_file_comes_and_its_type_is_not_asked_for(port):
    assert get(f"http://ok.test:{port}/file") == FILE
    assert ASKED["Host ok.test"] == 1
    assert get(f"HTTP://OK.TEST.:{port}/file#part") == FILE


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "0", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "localhost.",
     "localhost", "①②⑦.0.0.1", "trap.test", "both.test", "169.254.169.254", "10.0.0.1",
     "[fe80::1]", "[fd00::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "224.0.0.1", "0.0.0.0",
     "100.64.0.1", "metadata.google.internal"],
)  # fmt: skip
def test_private_addresses_are_not_asked(port, host):
    refused(f"http://{host}:{port}/file", "no public address|not a valid URL|is unknown|no host")
    assert not ASKED[TRAP]


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:PORT\\@ok.test/", "http://ok.test@127.0.0.1:PORT/", "http://ok.test.evil.test/",
     "http://127.0.0.1:PORT#@ok.test", "http://ok.test%00.evil/", "http://evilok.test/file",
     "http:// ok.test/", "http://ok.test:PORT/\nfile", "http://", "http:///file", "//ok.test/file",
     "gopher://ok.test/", "http://ok.test:99999/", "http://user:word@ok.test:PORT/file"],
)  # fmt: skip
def test_one_reading_of_a_url_is_checked_and_fetched(port, url):
    refused(url.replace("PORT", str(port)), ".", allowed_media_domains=("ok.test",))
    assert not ASKED[TRAP]


def test_only_hosts_that_are_listed(port):
    for host, listed in (("ok.test", ["OK.test."]), ("cdn.ok.test", ["*.ok.test"])):
        assert get(f"http://{host}:{port}/file", allowed_media_domains=listed) == FILE
    for host, listed in (("ok.test", ["*.ok.test"]), ("cdn.ok.test", ["ok.test"]), ("ok.test", [])):
        refused(f"http://{host}:{port}/file", "allowed-media-domains", allowed_media_domains=listed)
    refused(f"http://trap.test:{port}/file", "no public", allowed_media_domains=["trap.test"])


def to(url):
    return "to/" + base64.urlsafe_b64encode(url.encode()).decode()


@pytest.mark.parametrize(
    "url",
    ["http://trap.test:PORT/file", "http://127.0.0.1:PORT/file", "//127.0.0.1:PORT/file",
     "file:///etc/passwd", "http://169.254.169.254/latest", "ftp://ok.test/", "http://ok.test@trap.test/",
     "data:image/png;base64,AAAA"],
)  # fmt: skip
def test_redirects_are_checked_like_the_first_url(port, url):
    start = f"http://ok.test:{port}"
    refused(f"{start}/{to(url.replace('PORT', str(port)))}", ".")
    assert not ASKED[TRAP]
    there = to(f"http://other.test:{port}/file")
    refused(f"{start}/{there}", "allowed-media-domains", allowed_media_domains=["ok.test"])


def test_redirects_are_followed_not_for_ever_and_not_where_they_are_off(port):
    start = f"http://ok.test:{port}"
    assert get(f"{start}/{to('/file')}") == FILE
    further = f"http://cdn.ok.test:{port}/{to('/file')}"
    assert get(f"{start}/{to(further)}") == FILE
    refused(f"{start}/loop", "more than 5 redirects")
    refused(f"{start}/{to('/file')}", "its host redirects", media_url_allow_redirects=False)


def test_a_name_is_resolved_once(port, names):
    names["rebind"] = [[HOME], [TRAP]]
    assert get(f"http://ok.test:{port}/file") == FILE
    assert names["rebind"] == [[TRAP]]
    assert not ASKED[TRAP]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "answered 404"),
        ("slow", "was not received within 0.3 s"),
        ("endless", "more than 1 MB"),
        ("lying", "more than 1 MB"),
        ("short", "did not answer with"),
        ("gzip", "compressed"),
        ("garbage", "did not answer with"),
    ],
)
def test_what_servers_do(port, path, message):
    refused(
        f"http://ok.test:{port}/{path}",
        message,
        image_fetch_timeout=0.3 if path == "slow" else 300,
        max_media_download_size_mb=1,
    )


def test_nobody_listens(port):
    with socket.socket() as free:
        free.bind((HOME, 0))
        refused(f"http://ok.test:{free.getsockname()[1]}/", "did not answer with")


def test_files_of_one_request_have_a_bound_together(port):
    config = MediaConfig(
        max_media_request_download_size_mb=1, allowed_media_networks=(f"{HOME}/32",)
    )
    fetcher, budget = Fetcher(config), Budget(config)
    data = "data:;base64," + base64.b64encode(bytes(400_000)).decode()

    async def several():
        for _ in range(3):
            await fetcher.get(data, "image", budget)

    with pytest.raises(Undecodable, match="1 MB of media in a request"):
        asyncio.run(several())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")
def test_bytes_are_reserved_while_they_stream(port):
    """Before the file is there: two files that come at once share what one request may hold."""
    config = MediaConfig(allowed_media_networks=(f"{HOME}/32",))
    memory = MediaMemory(len(FILE) // 2)
    with memory.reserve() as held, pytest.raises(QueueFull):
        asyncio.run(
            Fetcher(config).get(f"http://ok.test:{port}/file", "image", Budget(config, held))
        )
    assert memory.used_bytes == 0


def test_certificates_are_of_the_name_not_of_the_address(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-days", "2", "-subj", "/CN=ok.test", "-addext", "subjectAltName=DNS:ok.test",
            "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer((HOME, 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    class Trusting(Fetcher):
        _context = ssl.create_default_context(cafile=certificate)

    try:
        port = server.server_address[1]
        assert get(f"https://ok.test:{port}/file", Trusting) == FILE
        with pytest.raises(Undecodable, match="did not answer with"):
            get(f"https://other.test:{port}/file", Trusting)
        with pytest.raises(Undecodable, match="did not answer with"):
            get(f"https://ok.test:{port}/file")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_files_of_this_machine(tmp_path):
    below = tmp_path / "media"
    below.mkdir()
    (below / "a b.png").write_bytes(FILE)
    (tmp_path / "secret").write_bytes(b"secret")
    (below / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(below / "pipe")
    root = {"allowed_local_media_path": str(below)}
    assert get(f"file://{below}/a%20b.png", **root) == FILE
    assert get(f"file://localhost{below}/a b.png", **root) == FILE
    for path in (f"{below}/../secret", f"{below}/link", "/etc/passwd", f"{below}/pipe", str(below),
                 f"{below}/%2e%2e/secret", f"{below}/no", f"{below}/a\0b"):  # fmt: skip
        with pytest.raises(Undecodable, match="no such file"):
            get(f"file://{path}", **root)
    for url in ("file://host/etc/passwd", "file:", "file:etc/passwd"):
        with pytest.raises(Undecodable, match="PATH is expected"):
            get(url, **root)
    with pytest.raises(Undecodable, match="does not read local files"):
        get(f"file://{below}/a%20b.png")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:", "data: URLs are"),
        ("data:,", "data: URLs are"),
        ("data:image/png,AAAA", "data: URLs are"),
        ("data:;base64,", "is empty"),
        ("data:image/png;base64,@@@", "not base64"),
        ("data:image/png;base64,AAA", "not base64"),
        ("data:image/png;base64," + "A" * 2_000_000, "more than 1 MB"),
    ],
)
def test_data_urls(url, message):
    assert get("data:image/png;base64,AAAA") == bytes(3)
    assert get("DATA:;charset=utf-8;BASE64,AAAA") == bytes(3)
    with pytest.raises(Undecodable, match=message):
        get(url, max_media_download_size_mb=1)


def test_public_addresses():
    hosts = Hosts(MediaConfig(allowed_media_networks=("10.1.0.0/16", "fd00::/8")))
    for address in ("8.8.8.8", "2606:4700::1111", "10.1.2.3", "fd00::5", "::ffff:10.1.2.3"):
        assert hosts.allowed(address)
    for address in (
        "10.2.0.1",
        "192.168.0.1",
        "172.16.0.1",
        "::",
        "::ffff:10.2.0.1",
        "fe80::1%eth0",
    ):
        assert not hosts.allowed(address)


@pytest.mark.parametrize(
    "address",
    [
        "64:ff9b:1::",
        "64:ff9b:1::808:808",
        "::8.8.8.8",
        "::127.0.0.1",
        "3fff::1",
        "3fff:fff::1",
        "5f00::1",
        "fec0::1",
        "2001::1",
        "2001:db8::1",
        "192.88.99.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
    ],
)
def test_odd_addresses_are_refused_by_a_list_of_our_own(address, monkeypatch):
    """Pythons differ in what they call global."""
    for kind in (ipaddress.IPv4Address, ipaddress.IPv6Address):
        monkeypatch.setattr(kind, "is_global", property(lambda self: True))
    hosts = Hosts(MediaConfig())
    assert not hosts.allowed(address)
    assert hosts.allowed("64:ff9b::808:808")


def test_name_servers_that_do_not_answer_hold_up_nothing_else(monkeypatch):
    """Looking a name up takes a thread; other work of the process has threads of its own."""
    ending, asked = threading.Event(), []

    def resolve(host, *args, **more):
        asked.append(host)
        ending.wait(600)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        hosts = Hosts(MediaConfig())
        urls = [httpx.URL(f"https://slow{number}.test/") for number in range(8)]
        lookups = [asyncio.ensure_future(hosts.resolved(url)) for url in urls]
        while len(asked) < 2:
            await asyncio.sleep(0.002)
        try:
            async with asyncio.timeout(300):
                await asyncio.to_thread(len, asked)
        finally:
            ending.set()
            results = await asyncio.gather(*lookups, return_exceptions=True)
        assert all(isinstance(one, Undecodable) for one in results)
        hosts.close()

    asyncio.run(main())
